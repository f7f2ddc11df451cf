"""How tensor parallelism cuts a model: which side of a linear, and in pieces of what size.

Source: `QKVParallelLinear`, `MergedColumnParallelLinear` and `RowParallelLinear` of vLLM 0.33
(`model_executor/layers/linear.py`) and their parameters' packing (`model_executor/parameter.py`).
"""

from __future__ import annotations

from math import gcd, lcm

from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding

# Linears whose input is split over the ranks of a tensor-parallel group; all others split their rows.
INPUT_SPLIT = ("attn.o", "mlp.down", "mlp.experts.down", "mlp.shared.down")
_WORD = 32
_AWQ_ROWS = 8


def whole_unit(encoding: Encoding, split: str, layout: str) -> int:
    """How many "columns" or "rows" of a form stay together: a quantization group, or codes in a word."""
    if isinstance(encoding, Codebook):
        return (encoding.group_size or 1) if split == "columns" else (encoding.group_rows or 1)
    if not isinstance(encoding, AffineInt | AffineMin):
        return 1
    in_words = _WORD // gcd(encoding.bits, _WORD)
    if split == "columns":
        return lcm(encoding.group_size or 1, 1 if layout in ("awq", "int-quantized") else in_words)
    if layout == "awq":
        return _AWQ_ROWS
    packed_zeros = layout in ("gptq", "gptq_v2") or (
        isinstance(encoding, AffineInt) and not encoding.symmetric
    )
    return in_words if packed_zeros and layout != "int-quantized" else 1
