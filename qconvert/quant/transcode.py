"""Transcodes between quantization formats with every code kept, and measures how far weights move.

Distances are in steps: multiples of the scale of the group that a weight is in.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows
from qconvert.quant.casts import cast
from qconvert.quant.codebook import TABLES, wide, with_tensor_number
from qconvert.quant.dequantize import INT8_STEP, mins_of, zeros_of
from qconvert.quant.packed_codes import codes_of


def to_mins(value: AffineIntRows) -> tuple[AffineMinRows, float]:
    """Converts zero points to mins, rounded to the scales' dtype; returns the largest error in steps too."""
    encoding = value.encoding
    assert not encoding.act_order
    group = encoding.group_size or value.width
    scales_RG = wide(value.scales_RG, encoding.scale_dtype)
    exact_RG = -zeros_of(value).astype(np.float32) * scales_RG
    mins = cast(DenseRows(exact_RG, DType.F32), encoding.scale_dtype)[0]
    steps = most_steps(wide(mins.rows_RI, encoding.scale_dtype) - exact_RG, scales_RG)
    made = AffineMin(encoding.bits, group, encoding.scale_dtype)
    return AffineMinRows(value.codes_RX, value.scales_RG, mins.rows_RI, made), steps


def to_zeros(value: AffineMinRows) -> tuple[AffineIntRows, float]:
    """Converts mins to the nearest zero points among the codes; returns the largest error in steps too."""
    encoding = value.encoding
    scales_RG = wide(value.scales_RG, encoding.scale_dtype)
    mins_RG = mins_of(value)
    places_RG = np.divide(-mins_RG, scales_RG, out=np.zeros_like(mins_RG), where=scales_RG != 0)
    zeros_RG = np.clip(np.rint(places_RG), 0, (1 << encoding.bits) - 1)
    steps = most_steps(mins_RG + zeros_RG * scales_RG, scales_RG)
    size = None if encoding.group_size == value.width else encoding.group_size
    made = AffineInt(encoding.bits, size, symmetric=False, scale_dtype=encoding.scale_dtype)
    return AffineIntRows(value.codes_RX, value.scales_RG, zeros_RG.astype(np.uint8), made), steps


def offsets_to_mins(value: AffineMinRows) -> tuple[AffineMinRows, float]:
    """Stores mins where zero points or middles were, rounded to the scales' dtype; returns the largest error
    in steps too.
    """
    dtype = value.encoding.scale_dtype
    exact_RG = mins_of(value)
    mins = cast(DenseRows(exact_RG, DType.F32), dtype)[0]
    steps = most_steps(wide(mins.rows_RI, dtype) - exact_RG, wide(value.scales_RG, dtype))
    made = AffineMin(value.encoding.bits, value.encoding.group_size, dtype)
    return AffineMinRows(value.codes_RX, value.scales_RG, mins.rows_RI, made), steps


def to_float_zeros(value: AffineIntRows) -> AffineMinRows:
    """Stores zero points as numbers of the scales' dtype, which holds those of up to 8 bits; exact."""
    encoding = value.encoding
    assert not encoding.act_order
    made = AffineMin(encoding.bits, encoding.group_size or value.width, encoding.scale_dtype, "zero")
    zeros = cast(DenseRows(zeros_of(value).astype(np.float32), DType.F32), encoding.scale_dtype)[0]
    return AffineMinRows(value.codes_RX, value.scales_RG, zeros.rows_RI, made)


def offsets_to_zeros(value: AffineMinRows) -> tuple[AffineMinRows, float]:
    """Stores zero points where mins or middles were, rounded to the scales' dtype; returns the largest error
    in steps too.
    """
    encoding = value.encoding
    scales_RG, mins_RG = wide(value.scales_RG, encoding.scale_dtype), mins_of(value)
    exact_RG = np.divide(-mins_RG, scales_RG, out=np.zeros_like(mins_RG), where=scales_RG != 0)
    zeros = cast(DenseRows(exact_RG, DType.F32), encoding.scale_dtype)[0]
    moved_RG = mins_RG + wide(zeros.rows_RI, encoding.scale_dtype) * scales_RG
    made = replace(encoding, offset="zero")
    return AffineMinRows(value.codes_RX, value.scales_RG, zeros.rows_RI, made), most_steps(
        moved_RG, scales_RG
    )


def to_middles(value: AffineIntRows | AffineMinRows) -> tuple[AffineMinRows, float, int]:
    """Stores, in bfloat16, scales and the weights in the middle of the codes where zero points or mins were.

    Returns also the largest change of a weight, in steps of the new scales, and how many became infinite.
    """
    encoding, half = value.encoding, np.float32(1 << (value.encoding.bits - 1))
    assert encoding.group_size is not None
    scales_RG = wide(value.scales_RG, encoding.scale_dtype)
    if isinstance(value, AffineIntRows):
        exact_RG = (half - zeros_of(value).astype(np.float32)) * scales_RG
    else:
        exact_RG = mins_of(value) + half * scales_RG
    scales, many = cast(DenseRows(value.scales_RG, encoding.scale_dtype), DType.BF16)
    middles, more = cast(DenseRows(exact_RG, DType.F32), DType.BF16)
    with np.errstate(invalid="ignore"):  # of numbers that became infinite
        new_RG = wide(scales.rows_RI, DType.BF16)
        moved_RG = half * np.abs(new_RG - scales_RG)
        moved_RG += np.abs(wide(middles.rows_RI, DType.BF16) - exact_RG)
    made = AffineMin(encoding.bits, encoding.group_size, DType.BF16, "middle")
    moved = 0.0 if many or more else most_steps(moved_RG, new_RG)
    return AffineMinRows(value.codes_RX, scales.rows_RI, middles.rows_RI, made), moved, many + more


def cast_scales(value: AffineIntRows, dtype: DType) -> tuple[AffineIntRows, float, int]:
    """Rounds the scales to another dtype, codes kept; returns also the largest change of a weight, in steps
    of the new scales, and how many scales became infinite.
    """
    encoding = replace(value.encoding, scale_dtype=dtype, signless_zero=False)
    if dtype is value.encoding.scale_dtype:
        return replace(value, encoding=encoding), 0.0, 0
    scales, overflow = cast(DenseRows(value.scales_RG, value.encoding.scale_dtype), dtype)
    before_RG, after_RG = wide(value.scales_RG, value.encoding.scale_dtype), wide(scales.rows_RI, dtype)
    steps = 0.0
    if not overflow and not np.array_equal(before_RG, after_RG):
        steps = most_steps((after_RG - before_RG) * _reach(value), after_RG)
    return replace(value, scales_RG=scales.rows_RI, encoding=encoding), steps, overflow


def split_groups(value: AffineIntRows, size: int) -> AffineIntRows:
    """Repeats scales for groups of `size` columns, a divisor of the present group size; exact."""
    columns = value.encoding.group_size or value.width
    times = columns // size
    zeros_RG = None if value.zeros_RG is None else np.repeat(value.zeros_RG, times, axis=1)
    scales_RG = np.repeat(value.scales_RG, times, axis=1)
    return AffineIntRows(value.codes_RX, scales_RG, zeros_RG, replace(value.encoding, group_size=size))


def from_int8_rows(value: CodebookRows) -> tuple[AffineIntRows, float]:
    """Converts bitsandbytes' int8 rows: the scale becomes absmax / 127, the product rounded to float32."""
    scales_R1 = value.scales_RG * INT8_STEP
    exact_R1 = value.scales_RG.astype(np.float64) * np.float64(INT8_STEP)
    encoding = AffineInt(8, None, symmetric=True, scale_dtype=DType.F32)
    steps = most_steps((scales_R1 - exact_R1) * 128, exact_R1)
    return AffineIntRows(value.codes_RI ^ np.uint8(0x80), scales_R1, None, encoding), steps


def to_int8_rows(value: AffineIntRows, decoded: DType) -> tuple[CodebookRows, float]:
    """Converts symmetric int8 rows to bitsandbytes': absmax, 127 scales, in float32."""
    scales_R1 = wide(value.scales_RG, value.encoding.scale_dtype)
    absmax_R1 = (scales_R1.astype(np.float64) / np.float64(INT8_STEP)).astype(np.float32)
    encoding = Codebook("int8", None, DType.F32, decoded)
    steps = most_steps((absmax_R1 * np.float64(INT8_STEP) - scales_R1) * 128, scales_R1)
    return CodebookRows(codes_of(value) ^ np.uint8(0x80), absmax_R1, encoding), steps


def spread_scale(value: CodebookRows, encoding: Codebook) -> CodebookRows:
    """Repeats the one scale of a tensor for every block of `encoding`."""
    groups = encoding.groups(value.width)
    return CodebookRows(value.codes_RI, np.repeat(value.scales_RG, groups, axis=1), encoding)


def fold_divisor(value: CodebookRows) -> CodebookRows | None:
    """Absorbs the tensor-wide NVFP4 scale into the block scales; None if one is then not exactly E4M3."""
    assert value.divisor or value.factor
    numbers_T = TABLES["e4m3"]
    scales_RG = wide(value.scales_RG, DType.F8_E4M3)
    quotients_RG = with_tensor_number(scales_RG, value.divisor, value.factor)
    order_T = np.argsort(numbers_T)[: np.isfinite(numbers_T).sum()]  # NaN sorts last
    places_RG = np.searchsorted(numbers_T[order_T], quotients_RG).clip(max=len(order_T) - 1)
    scales_RG = order_T[places_RG].astype(np.uint8)
    if not np.array_equal(numbers_T[scales_RG], quotients_RG):
        return None
    return CodebookRows(value.codes_RI, scales_RG, replace(value.encoding, second=None))


def inverse_of(number: float) -> float:
    """One over a number, rounded to float32; 1 where that is infinite or 0."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = float(np.float32(np.float64(1) / np.float64(number)))
    return inverse if inverse and np.isfinite(inverse) else 1.0


def round_divisor(value: CodebookRows) -> CodebookRows:
    """Rounds the tensor-wide divisor to float32."""
    return replace(value, divisor=float(np.float32(value.divisor or 1)))


def _reach(value: AffineIntRows) -> np.ndarray:
    """Returns the largest |code - zero| of every group, [rows, groups]."""
    zeros_RG = zeros_of(value).astype(np.int16)
    rows, groups = zeros_RG.shape
    if value.groups_I is not None:
        return np.full((rows, groups), 1 << value.encoding.bits)
    codes_RGg = codes_of(value).reshape(rows, groups, -1)
    return np.asarray(np.maximum(codes_RGg.max(axis=2) - zeros_RG, zeros_RG - codes_RGg.min(axis=2)))


def most_steps(moved: np.ndarray, scales: np.ndarray) -> float:
    """Returns the largest |moved| / |scale|; infinite where a weight with a scale of 0 moves."""
    moved, scales = np.abs(moved.astype(np.float64)), np.abs(scales.astype(np.float64))
    ratios = np.divide(moved, scales, out=np.where(moved > 0, np.inf, 0.0), where=scales > 0)
    return float(ratios.max(initial=0.0))
