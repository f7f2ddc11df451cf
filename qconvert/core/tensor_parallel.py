"""Describes how tensor parallelism cuts a model: which side of a linear, and in pieces of what size.

Source: `QKVParallelLinear`, `MergedColumnParallelLinear` and `RowParallelLinear` of vLLM 0.33
(`model_executor/layers/linear.py`) and their parameters' packing (`model_executor/parameter.py`).
"""

from __future__ import annotations

from math import gcd, lcm

from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding
from qconvert.core.layout_traits import LayoutTraits

# Linears whose input is split over the ranks of a tensor-parallel group; all others split their rows.
INPUT_SPLIT = ("attn.o", "mlp.down", "mlp.experts.down", "mlp.shared.down")
_WORD = 32


def whole_unit(encoding: Encoding, split: str, layout: LayoutTraits) -> int:
    """How many "columns" or "rows" of a weight stay together: a quantization group, or codes in a word."""
    if isinstance(encoding, Codebook):
        return (encoding.group_size or 1) if split == "columns" else (encoding.group_rows or 1)
    if not isinstance(encoding, AffineInt | AffineMin):
        return 1
    in_words = 1 if layout.packs == "no" else _WORD // gcd(encoding.bits, _WORD)
    if split == "columns":
        return lcm(encoding.group_size or 1, in_words if layout.packs == "columns" else 1)
    zeros = layout.symmetric_zeros or (isinstance(encoding, AffineInt) and not encoding.symmetric)
    return in_words if layout.packs == "rows" or zeros else 1
