"""Finds codes of tables, compiled by numba: the inner loops of `codebook_encode`.

Groups are independent, so a weight may be split into any blocks of rows. A group is copied into scratch
memory padded with zeros to whole lanes.

Axes: R rows, I columns, B rows of blocks, G groups of a row, P columns of a group padded to whole lanes, T
entries of a table, E edges between neighbouring entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    clamp,
    kernel,
    lane,
    load,
    peak,
    rounded_even,
    routine,
    splat,
    store,
    where,
)

_ZERO, _ONE, _EIGHT, _INFINITE = np.float32(0), np.float32(1), np.float32(8), np.float32(np.inf)
INT8_ENDS = np.float32(-127), np.float32(127)
MIDDLES, MAGNITUDES, FLOAT8, INT8 = range(4)


class Table(NamedTuple):
    """How a kernel finds the code of a scaled number.

    `kind` MIDDLES counts the `edges_E` below the number and takes the code at that index of `order_T`;
    MAGNITUDES does so with the magnitude, and the sign is bit 3 (of a zero only if `signed_zero`); FLOAT8
    rounds to E4M3, half to even, after rounding to a type with `dropped` fewer mantissa bits than float32;
    INT8 rounds half to even. `numbers_T` are the table's values by code.
    """

    kind: int
    edges_E: np.ndarray
    order_T: np.ndarray
    numbers_T: np.ndarray
    dropped: int
    signed_zero: bool


@kernel
def find_peaks(weights_RI: Any, first: Any, group_rows: Any, size: Any, peaks_BG: Any) -> None:
    """Raises the largest magnitudes of blocks to the finite ones of some rows, float32, from the `first` on.

    A block has `group_rows` rows and `size` columns, fewer at the edges.
    """
    rows, width = weights_RI.shape
    padded = -(-size // LANES) * LANES
    w_P = np.zeros(padded, np.float32)
    for row in range(rows):
        block = (first + row) // group_rows
        for group in range(peaks_BG.shape[1]):
            copy_group(weights_RI[row], group * size, min(size, width - group * size), w_P)
            largest = splat(_ZERO)
            for i in range(0, padded, LANES):
                size_of = absolute(load(w_P, i))
                size_of = where(size_of < splat(_INFINITE), size_of, largest)
                largest = where(size_of > largest, size_of, largest)
            peaks_BG[block, group] = max(peaks_BG[block, group], peak(largest))


@kernel
def encode_groups(
    weights_RI: Any, size: Any, factors_RG: Any, divide: Any, steps_RG: Any, table: Any, codes_RI: Any,
    tally_4: Any,
) -> None:  # fmt: skip
    """Fills the codes nearest to `weights * factors`, or with `divide` to `weights / factors`.

    The weights are float32. A code is dequantized to `numbers_T[code] * steps`. Adds to a tally: sum of
    squared errors, sum of squared weights, largest error, largest error in steps.
    """
    rows, width = weights_RI.shape
    padded = -(-size // LANES) * LANES
    w_P, t_P, codes_P = np.empty(padded, np.float32), np.empty(padded, np.float32), np.empty(padded, np.uint8)
    for row in range(rows):
        sums = splat(_ZERO), splat(_ZERO)
        for group in range(factors_RG.shape[1]):
            count = min(size, width - group * size)
            copy_group(weights_RI[row], group * size, count, w_P)
            _scale(w_P, factors_RG[row, group], divide, t_P)
            _find_codes(t_P, table, codes_P)
            for i in range(count):
                codes_RI[row, group * size + i] = codes_P[i]
            for i in range(count, padded):
                codes_P[i] = 0
            step = steps_RG[row, group]
            for i in range(padded):
                t_P[i] = table.numbers_T[codes_P[i]] * step
            for i in range(count, padded):
                t_P[i] = _ZERO
            sums, worst = _losses(w_P, t_P, sums)
            tally_4[2] = max(tally_4[2], worst)
            if step > _ZERO:
                tally_4[3] = max(tally_4[3], worst / step)
        for k in range(LANES):
            tally_4[0] += lane(sums[0], k)
            tally_4[1] += lane(sums[1], k)


@routine
def copy_group(weights_I: Any, first: Any, count: Any, w_P: Any) -> None:
    """Writes `count` weights from `first` on to scratch memory, and zeros after them."""
    for i in range(count):
        w_P[i] = weights_I[first + i]
    for i in range(count, w_P.size):
        w_P[i] = _ZERO


@routine
def _scale(w_P: Any, factor: Any, divide: Any, t_P: Any) -> None:
    """Writes a group scaled."""
    for i in range(0, w_P.size, LANES):
        w = load(w_P, i)
        if divide:
            store(t_P, i, w / factor)
        else:
            store(t_P, i, w * factor)


@routine
def _find_codes(t_P: Any, table: Any, codes_P: Any) -> None:
    if table.kind == FLOAT8:
        _round_to_float8(t_P, table.dropped, codes_P)
    elif table.kind == INT8:
        low, high = INT8_ENDS
        for i in range(0, t_P.size, LANES):
            store(codes_P, i, rounded_even(clamp(load(t_P, i), low, high)))
    elif table.kind == MAGNITUDES:
        least = -_ONE if table.signed_zero else _ZERO
        for i in range(0, t_P.size, LANES):
            t = load(t_P, i)
            code = _passed(absolute(t), table.edges_E)
            sign = where((t < _ZERO) & (code > least), splat(_EIGHT), splat(_ZERO))
            store(codes_P, i, code + sign)
    else:
        for i in range(0, t_P.size, LANES):
            store(codes_P, i, _passed(load(t_P, i), table.edges_E))
        for i in range(t_P.size):
            codes_P[i] = table.order_T[codes_P[i]]


@routine
def _passed(t: Any, edges_E: Any) -> Any:
    """Counts the (rising) edges below each lane."""
    count = splat(_ZERO)
    for k in range(edges_E.size):
        count = where(t > edges_E[k], splat(np.float32(k + 1)), count)
    return count


@routine
def _round_to_float8(t_P: Any, dropped: Any, codes_P: Any) -> None:
    """Writes E4M3 codes, half to even, saturating at 448. Overwrites `t_P`."""
    bits_P = t_P.view(np.uint32)
    lost = np.uint32(dropped)
    half = np.uint32((1 << dropped) >> 1)
    for i in range(t_P.size):
        codes_P[i] = np.uint8((bits_P[i] >> np.uint32(24)) & np.uint32(0x80))
        bits = bits_P[i] & np.uint32(0x7FFFFFFF)
        if dropped:
            even = np.uint32((bits >> lost) & np.uint32(1))
            bits = np.uint32(np.uint32(bits + half - np.uint32(1) + even) >> lost) << lost
        bits_P[i] = min(np.uint32(bits), np.uint32(0x43E00000))
    for i in range(t_P.size):
        bits = bits_P[i]
        odd = np.uint32((bits >> np.uint32(20)) & np.uint32(1))
        normal = np.uint32(np.uint32(bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(960)
        # Codes below 2**-6 are multiples of 2**-9; the eighth multiple is 2**-6 itself.
        small = np.uint32(np.rint(min(t_P[i], _ONE) * np.float32(512)))
        codes_P[i] |= np.uint8(normal if bits >= np.uint32(0x3C800000) else small)


@routine
def _losses(w_P: Any, d_P: Any, sums: Any) -> Any:
    """Returns the sums of squared errors and of squares with a group's added, and its largest error."""
    errors, squares = sums
    worst = splat(_ZERO)
    for i in range(0, w_P.size, LANES):
        w = load(w_P, i)
        error = w - load(d_P, i)
        errors = errors + error * error
        squares = squares + w * w
        worst = where(absolute(error) > worst, absolute(error), worst)
    return (errors, squares), peak(worst)
