"""Applies the steps of `ops.transcode` to rows: the same names, arithmetic of `quant`.

What needs a compiler is imported where it is used: carrying packed codes over needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import DType
from qconvert.core.encodings import GgmlBlocks
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.ops.base import CLEAN, Finding
from qconvert.quant import transcode

Made = tuple[Value, Finding]


def _moved(made: tuple[Value, float]) -> Made:
    return made[0], Finding(code_error=made[1])


def _cast_scales(value: AffineIntRows, dtype: DType) -> Made:
    made, moved, overflow = transcode.cast_scales(value, dtype)
    return made, Finding(code_error=moved, overflow=overflow)


def _to_middles(value: AffineIntRows | AffineMinRows, _: None) -> Made:
    made, moved, overflow = transcode.to_middles(value)
    return made, Finding(code_error=moved, overflow=overflow)


def _divide_by_one(value: CodebookRows, _: None) -> Made:
    return replace(value, encoding=replace(value.encoding, second="divided"), divisor=1.0), CLEAN


def _round_divisor(value: CodebookRows, _: None) -> Made:
    from qconvert.quant.ggml.from_codes import moved_by

    made = transcode.round_divisor(value)
    assert value.divisor and made.divisor
    return made, Finding(code_error=moved_by(value.divisor / made.divisor))


def _divisor_to_factor(value: CodebookRows, _: None) -> Made:
    encoding = replace(value.encoding, second="multiplied")
    return _with_inverse(value, CodebookRows(value.codes_RI, value.scales_RG, encoding, factor=1.0))


def _factor_to_divisor(value: CodebookRows, _: None) -> Made:
    encoding = replace(value.encoding, second="divided")
    return _with_inverse(value, CodebookRows(value.codes_RI, value.scales_RG, encoding, 1.0))


def _with_inverse(before: CodebookRows, made: CodebookRows) -> Made:
    """The number of a tensor that divided multiplies now, or the other way round: one over it, rounded."""
    from qconvert.quant.ggml.from_codes import moved_scales

    number = before.divisor if before.factor is None else before.factor
    if number is None:  # there was none
        return made, CLEAN
    inverse = transcode.inverse_of(number)
    made = replace(made, factor=inverse) if made.divisor is None else replace(made, divisor=inverse)
    return made, Finding(code_error=moved_scales(before, made))


def _widen_scales(value: CodebookRows, dtype: DType) -> Made:
    from qconvert.quant.codebook import wide

    encoding = replace(value.encoding, scale_dtype=dtype)
    assert dtype is DType.F32, "what holds all other scales"
    return replace(
        value, scales_RG=wide(value.scales_RG, value.encoding.scale_dtype), encoding=encoding
    ), CLEAN


def _absorb_divisor(value: CodebookRows, _: None) -> Made:
    made = transcode.fold_divisor(value)
    assert made is not None, "asked for where it is not exact"
    return made, CLEAN


def _to_ggml_blocks(value: AffineIntRows | AffineMinRows | CodebookRows, encoding: GgmlBlocks) -> Made:
    from qconvert.quant.ggml.from_codes import block_codes, mxfp4_blocks, nvfp4_blocks

    if isinstance(value, CodebookRows) and value.encoding.is_nvfp4:
        bytes_RB, moved = nvfp4_blocks(value)
        return GgmlRows(bytes_RB, encoding), Finding(code_error=moved)
    if isinstance(value, CodebookRows):
        return GgmlRows(mxfp4_blocks(value), encoding), CLEAN
    bytes_RB, moved, overflow = block_codes(value, encoding.type)
    return GgmlRows(bytes_RB, encoding), Finding(code_error=moved, overflow=overflow)


def _from_ggml_blocks(value: GgmlRows, _: object) -> Made:
    from qconvert.quant.dequantize import first_bad_row
    from qconvert.quant.ggml.to_codes import grid_of_blocks

    made = grid_of_blocks(value)
    return made, Finding(bad_row=first_bad_row(made))


def _take_factor(value: CodebookRows, _: None) -> Made:
    from qconvert.quant.ggml.from_codes import factors_of

    return DenseRows(factors_of(value), DType.F32), CLEAN


def _invert(value: DenseRows, _: None) -> Made:
    import numpy as np

    numbers = value.rows_RI
    inverse = np.array([[transcode.inverse_of(float(number)) for number in row] for row in numbers], "<f4")
    moved = float(np.abs(inverse.astype(np.float64) * numbers - 1).max(initial=0))
    return DenseRows(inverse, value.dtype), Finding(code_error=moved)


ROWS: Mapping[str, Callable[[Any, Any], Made]] = {
    "zeros_to_mins": lambda value, _: _moved(transcode.to_mins(value)),
    "mins_to_zeros": lambda value, _: _moved(transcode.to_zeros(value)),
    "offsets_to_mins": lambda value, _: _moved(transcode.offsets_to_mins(value)),
    "zeros_to_floats": lambda value, _: (transcode.to_float_zeros(value), CLEAN),
    "offsets_to_zeros": lambda value, _: _moved(transcode.offsets_to_zeros(value)),
    "to_middles": _to_middles,
    "cast_scales": _cast_scales,
    "split_groups": lambda value, size: (transcode.split_groups(value, size), CLEAN),
    "from_int8_rows": lambda value, _: _moved(transcode.from_int8_rows(value)),
    "to_int8_rows": lambda value, decoded: _moved(transcode.to_int8_rows(value, decoded)),
    "repeat_tensor_scale": lambda value, encoding: (transcode.spread_scale(value, encoding), CLEAN),
    "divide_by_one": _divide_by_one,
    "round_divisor": _round_divisor,
    "absorb_divisor": _absorb_divisor,
    "divisor_to_factor": _divisor_to_factor,
    "factor_to_divisor": _factor_to_divisor,
    "widen_scales": _widen_scales,
    "resolve_nested_scales": lambda v, _: (replace(v, encoding=replace(v.encoding, second=None)), CLEAN),
    "to_ggml_blocks": _to_ggml_blocks,
    "from_ggml_blocks": _from_ggml_blocks,
    "take_factor": _take_factor,
    "invert": _invert,
}
