"""How tensor parallelism cuts a model: which side of a linear, and in pieces of what size.

Source: `QKVParallelLinear`, `MergedColumnParallelLinear` and `RowParallelLinear` of vLLM 0.33
(`model_executor/layers/linear.py`) and their parameters' packing (`model_executor/parameter.py`).
"""

from __future__ import annotations

from math import gcd, lcm

from qconvert.tensors import Codebook, Form, GroupInt, GroupMin

# Linears whose input is split over the ranks of a tensor-parallel group; all others split their rows.
INPUT_SPLIT = ("attn.o", "mlp.down", "mlp.experts.down", "mlp.shared.down")
_WORD = 32
_AWQ_ROWS = 8


def whole_unit(form: Form, split: str, layout: str) -> int:
    """How many "columns" or "rows" of a form stay together: a quantization group, or codes in a word."""
    if isinstance(form, Codebook):
        return (form.group_size or 1) if split == "columns" else (form.group_rows or 1)
    if not isinstance(form, GroupInt | GroupMin):
        return 1
    in_words = _WORD // gcd(form.bits, _WORD)
    if split == "columns":
        return lcm(form.group_size or 1, 1 if layout in ("awq", "int-quantized") else in_words)
    if layout == "awq":
        return _AWQ_ROWS
    packed_zeros = layout in ("gptq", "gptq_v2") or (isinstance(form, GroupInt) and not form.symmetric)
    return in_words if packed_zeros and layout != "int-quantized" else 1
