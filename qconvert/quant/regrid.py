"""From one grid to another with every code kept, and how far that moves a weight.

Distances are in steps: multiples of the scale of the group that a weight is in.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qconvert.quant.casts import cast
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.grids import INT8_STEP, zeros_of
from qconvert.quant.steps import most_steps
from qconvert.tensors import Codebook, Coded, Dense, DType, GroupInt, GroupMin, IntAffine, MinAffine


def to_mins(value: IntAffine) -> tuple[MinAffine, float]:
    """Zeros as mins, `-zero * scale` rounded to the scales' dtype, and the largest rounding in steps."""
    form = value.form
    assert not form.act_order
    group = form.group_size or value.width
    scales_RG = wide(value.scales_RG, form.scale_dtype)
    exact_RG = -zeros_of(value).astype(np.float32) * scales_RG
    mins = cast(Dense(exact_RG, DType.F32), form.scale_dtype)[0]
    steps = most_steps(wide(mins.rows_RI, form.scale_dtype) - exact_RG, scales_RG)
    made = GroupMin(form.bits, group, form.scale_dtype)
    return MinAffine(value.codes_RX, value.scales_RG, mins.rows_RI, made), steps


def to_zeros(value: MinAffine) -> tuple[IntAffine, float]:
    """Mins as the nearest integer zeros in reach of the codes, and the largest rounding in steps."""
    form = value.form
    scales_RG = wide(value.scales_RG, form.scale_dtype)
    mins_RG = wide(value.mins_RG, form.scale_dtype)
    places_RG = np.divide(-mins_RG, scales_RG, out=np.zeros_like(mins_RG), where=scales_RG != 0)
    zeros_RG = np.clip(np.rint(places_RG), 0, (1 << form.bits) - 1)
    steps = most_steps(mins_RG + zeros_RG * scales_RG, scales_RG)
    size = None if form.group_size == value.width else form.group_size
    made = GroupInt(form.bits, size, symmetric=False, scale_dtype=form.scale_dtype)
    return IntAffine(value.codes_RX, value.scales_RG, zeros_RG.astype(np.uint8), made), steps


def cast_scales(value: IntAffine, dtype: DType) -> tuple[IntAffine, float, int]:
    """The same codes over scales rounded to another dtype, how far the weights move at most, in steps
    of the new scales, and how many scales became infinite.
    """
    form = replace(value.form, scale_dtype=dtype, signless_zero=False)
    if dtype is value.form.scale_dtype:
        return replace(value, form=form), 0.0, 0
    scales, overflow = cast(Dense(value.scales_RG, value.form.scale_dtype), dtype)
    before_RG, after_RG = wide(value.scales_RG, value.form.scale_dtype), wide(scales.rows_RI, dtype)
    steps = 0.0
    if not overflow and not np.array_equal(before_RG, after_RG):
        steps = most_steps((after_RG - before_RG) * _reach(value), after_RG)
    return replace(value, scales_RG=scales.rows_RI, form=form), steps, overflow


def split_groups(value: IntAffine, size: int) -> IntAffine:
    """The same numbers in groups of `size` columns, which must divide the present ones."""
    columns = value.form.group_size or value.width
    times = columns // size
    zeros_RG = None if value.zeros_RG is None else np.repeat(value.zeros_RG, times, axis=1)
    scales_RG = np.repeat(value.scales_RG, times, axis=1)
    return IntAffine(value.codes_RX, scales_RG, zeros_RG, replace(value.form, group_size=size))


def from_int8_rows(value: Coded) -> tuple[IntAffine, float]:
    """bitsandbytes' int8 rows, absmax / 127 for a scale: the product is rounded to float32."""
    scales_R1 = value.scales_RG * INT8_STEP
    exact_R1 = value.scales_RG.astype(np.float64) * np.float64(INT8_STEP)
    form = GroupInt(8, None, symmetric=True, scale_dtype=DType.F32)
    steps = most_steps((scales_R1 - exact_R1) * 128, exact_R1)
    return IntAffine(value.codes_RI ^ np.uint8(0x80), scales_R1, None, form), steps


def to_int8_rows(value: IntAffine, decoded: DType) -> tuple[Coded, float]:
    """Symmetric int8 rows as bitsandbytes keeps them: absmax, 127 scales, in float32."""
    scales_R1 = wide(value.scales_RG, value.form.scale_dtype)
    absmax_R1 = (scales_R1.astype(np.float64) / np.float64(INT8_STEP)).astype(np.float32)
    form = Codebook("int8", None, DType.F32, decoded)
    steps = most_steps((absmax_R1 * np.float64(INT8_STEP) - scales_R1) * 128, scales_R1)
    return Coded(value.codes_RI ^ np.uint8(0x80), absmax_R1, form), steps


def spread_scale(value: Coded, form: Codebook) -> Coded:
    """One scale for everything, written out for every block of `form`."""
    groups = form.groups(value.width)
    return Coded(value.codes_RI, np.repeat(value.scales_RG, groups, axis=1), form)


def fold_divisor(value: Coded) -> Coded | None:
    """NVFP4 scales divided by the number of the whole tensor; None where a quotient is no E4M3 number."""
    assert value.divisor
    numbers_T = TABLES["e4m3"]
    quotients_RG = wide(value.scales_RG, DType.F8_E4M3) / np.float32(value.divisor)
    order_T = np.argsort(numbers_T)[: np.isfinite(numbers_T).sum()]  # what is none comes last
    places_RG = np.searchsorted(numbers_T[order_T], quotients_RG).clip(max=len(order_T) - 1)
    scales_RG = order_T[places_RG].astype(np.uint8)
    if not np.array_equal(numbers_T[scales_RG], quotients_RG):
        return None
    return Coded(value.codes_RI, scales_RG, replace(value.form, second=None))


def round_divisor(value: Coded) -> Coded:
    """The same with a divisor that float32 holds."""
    return replace(value, divisor=float(np.float32(value.divisor or 1)))


def _reach(value: IntAffine) -> np.ndarray:
    """The largest |code - zero| of every group, [rows, groups]."""
    zeros_RG = zeros_of(value).astype(np.int16)
    rows, groups = zeros_RG.shape
    if value.groups_I is not None:
        return np.full((rows, groups), 1 << value.form.bits)
    codes_RGg = value.codes_RI.reshape(rows, groups, -1)
    reach_RG: np.ndarray = np.maximum(codes_RGg.max(axis=2) - zeros_RG, zeros_RG - codes_RGg.min(axis=2))
    return reach_RG
