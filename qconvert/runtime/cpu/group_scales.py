"""Reads scales, zeros and mins of a row, in whatever type they are stored, for the kernels.

Sixteen groups at a time. Reading may go beyond a row's last group, to numbers that are not used;
who makes a record keeps `LANES` more elements behind the last row.
"""

from __future__ import annotations

import numpy as np

from qconvert.quant.simd.lanes import LANES, lane, splat
from qconvert.runtime.cpu.coded_dots import byte_floats, half_floats
from qconvert.runtime.cpu.kernel_args import BF16, F16, F32
from qconvert.runtime.cpu.simd import (
    float_at,
    floats,
    in_narrow_registers,
    kept_apart,
    load_bf16,
    paired,
    routine,
    store_f32,
    total,
    two_floats,
)

_ONE = np.float32(1)


@routine
def numbers_at(kind, stored, supers, shared, i):  # type: ignore[no-untyped-def]
    """Numbers [i, i + 16) of the groups of a weight, as float32."""
    in_narrow_registers()
    if kind == F32:
        return floats(stored + 4 * i)
    if kind == BF16:
        return load_bf16(stored + 2 * i)
    if kind == F16:
        return half_floats(stored + 2 * i)
    if shared == LANES:
        return byte_floats(stored + i) * splat(float_at(supers + 4 * (i // LANES)))
    return byte_floats(stored + i) * two_floats(supers + 4 * (i // (LANES // 2)))


@routine
def scales_at(linear, i):  # type: ignore[no-untyped-def]
    """Scales [i, i + 16) of the groups of a weight."""
    in_narrow_registers()
    scale = numbers_at(linear.number_type, linear.scales, linear.supers, linear.shared, i)
    if linear.divisor != _ONE:
        scale = scale / splat(linear.divisor)
    return scale


@routine
def mins_at(linear, i):  # type: ignore[no-untyped-def]
    """Mins [i, i + 16) of the groups of a weight that has them."""
    in_narrow_registers()
    return numbers_at(linear.number_type, linear.mins, linear.super_mins, linear.shared, i)


@routine
def zeros_at(linear, i):  # type: ignore[no-untyped-def]
    """Zeros [i, i + 16) of the groups of a weight."""
    in_narrow_registers()
    if linear.zeros:
        return byte_floats(linear.zeros + i)
    return splat(np.float32(linear.zero))


@routine
def spread(linear, row, groups, each, steps, sums, out):  # type: ignore[no-untyped-def]
    """Write the scales of a row times the steps of its input, `each` times per group.

    `steps` are one for each number written, `sums` the input's sum over each group, both followed by
    zeros up to a multiple of 16; `out` has room for `groups` times `each` numbers and 16 more. Returns
    what zeros and mins take away from the row's product.
    """
    in_narrow_registers()
    away, shifts = splat(np.float32(0)), linear.zeros or linear.zero
    factor = linear.factor * linear.unit
    for g in range(0, groups, LANES):
        i = row * groups + g
        scale = scales_at(linear, i) * splat(factor)
        if shifts:
            away = away + scale * zeros_at(linear, i) * floats(sums + 4 * g)
        if linear.mins:
            away = away - mins_at(linear, i) * floats(sums + 4 * g)
        at = 4 * g * each
        if each == 1:
            store_f32(out + at, scale * floats(steps + at))
        else:
            store_f32(out + at, scale)
            left = groups - g  # and not `min`, a routine of numba's that is in no narrow registers
            _repeat(left if left < LANES else LANES, each, steps + at, out + at)
    return total(away) if shifts or linear.mins else np.float32(0)


@routine
def _repeat(groups, each, steps, out):  # type: ignore[no-untyped-def]
    """Scales at `out` times their steps: what a group writes too much, the next one overwrites."""
    kept_apart()
    in_narrow_registers()
    scale = floats(out)
    if each == 2:
        store_f32(out, paired(scale, scale, 0) * floats(steps))
        store_f32(out + 64, paired(scale, scale, 1) * floats(steps + 64))
        return
    if each == 4:
        for half in range(2):
            two, at = paired(scale, scale, half), 128 * half
            store_f32(out + at, paired(two, two, 0) * floats(steps + at))
            store_f32(out + at + 64, paired(two, two, 1) * floats(steps + at + 64))
        return
    one = splat(lane(scale, 0))
    for g in range(groups):
        if g:
            one = splat(lane(scale, g))
        for e in range(0, each, LANES):
            at = 4 * (g * each + e)
            store_f32(out + at, one * floats(steps + at))
