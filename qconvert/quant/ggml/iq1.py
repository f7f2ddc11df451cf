"""Encodes rows as IQ1_S and IQ1_M: codes -1, 0 and 1 on a lattice in 8 dimensions, shifted by 1/8.

v = d * (2 * s + 1) * (code + shift): a 3-bit scale code s per 32 elements (S) or 16 (M), the index of one of
2048 points per 8 elements, and a shift of 1/8 or -1/8 per 32 or 8 elements. Of all splits of a group's sorted
elements into three codes the one of highest weighted correlation is taken; cells off the lattice then move to
a neighbour. Source: quantize_row_iq1_s_impl, quantize_row_iq1_m_impl and iq1_find_best_neighbour2 in
ggml-quants.c. S needs the importance of every column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.lattice_search import above, move, put_indices, put_scale_codes
from qconvert.quant.ggml.lattices import lattice
from qconvert.quant.ggml.scalars import half_bits, put_half
from qconvert.quant.ggml.tiles import (
    add_squares,
    gather,
    stacked,
    tile,
    weigh_by_importance,
    weigh_by_square,
)
from qconvert.quant.simd.lanes import LANES, absolute, kernel, load, mask_bits, routine, splat, store, where

BLOCK = 256
_CELL, _LEVELS = 8, 3
_ZERO, _HALF, _ONE, _TWO, _THREE = (np.float32(number) for number in (0, 0.5, 1, 2, 3))
_LARGEST = np.finfo(np.float32).max
_SHIFT, _MIDDLE = np.float32(0.125), np.float32(1.5)  # an odd number is 2 * (code + 1.5)
_STEPS = np.float32(15)
_NOTHING_S, _NOTHING_M = np.float32(1e-12), np.float32(1e-7)  # GROUP_MAX_EPS_IQ1_S, GROUP_MAX_EPS_IQ1_M
_GROWN_S, _GROWN_M = np.float32(1.125), np.float32(1.1125)  # the last factors of d
_NO_IMPORTANCE = np.empty(0, np.float32)


def encode_iq1_s_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ1_S of rows, flat; `importance` is the mean squared activation of every column."""
    _encode_s(rows, importance, out, lattice("IQ1_S"))


def encode_iq1_m(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ1_M of the flat array of whole rows to the flat `out`."""
    _encode_m(rows, _NO_IMPORTANCE, BLOCK, out, lattice("IQ1_M"))


def encode_iq1_m_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    _encode_m(rows, importance, importance.size, out, lattice("IQ1_M"))


@kernel
def _encode_s(rows: np.ndarray, importance: np.ndarray, out: np.ndarray, points: Any) -> None:
    size, groups = 32, 8
    starts, indices = np.empty(LANES, np.intp), np.empty(32 * LANES, np.int32)
    codes = np.empty(groups * LANES, np.uint8)
    all_x, w, odds, ranks, work = tile(BLOCK), tile(size), tile(size), tile(size), tile(6 * (size + 1))
    shifts, scales, lanes, d = tile(groups), tile(groups), tile(4), tile(1)
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, all_x)
            variance = _TWO * add_squares(splat(_ZERO), all_x, BLOCK) / np.float32(BLOCK)
            greatest = splat(_ZERO)
            for group in range(groups):
                x = all_x[group * size * LANES : (group + 1) * size * LANES]
                weigh_by_importance(x, w, importance, column + group * size, size, variance)
                _rank(x, ranks, size)
                low, high, shift, scale = _split_32(x, w, ranks, work)
                used = above(_reach(x, size), _NOTHING_S) & (shift != _ZERO)
                _assign(ranks, odds, size, low, high, scale < _ZERO)
                shift = where(used, where(scale < _ZERO, -shift, shift), splat(_ONE)) * _SHIFT
                scale = where(used, absolute(scale), splat(_ZERO))
                off = splat(_ZERO)
                sum_wqx, sum_wqq = splat(_ZERO), splat(_ZERO)
                for cell in range(4):
                    off = off + _place(x, w, odds, cell, scale, shift, points, lanes)
                    sum_wqx, sum_wqq = _add_products(x, w, odds, cell, shift, sum_wqx, sum_wqq)
                moved = used & (off > _ZERO) & (sum_wqx > _ZERO) & (sum_wqq > _ZERO)
                scale = where(moved, sum_wqx / sum_wqq, scale)
                put_indices(odds, size, _CELL, _LEVELS, used, points, indices, group * 4, lanes)
                store(shifts, group * LANES, shift)
                store(scales, group * LANES, scale)
                greatest = where(greatest > scale, greatest, scale)
            store(d, 0, greatest / _STEPS * _GROWN_S)
            put_scale_codes(scales, groups, 7, greatest / _STEPS, codes)
            store(lanes, 0, greatest)
            for k in range(LANES):
                _put_s(indices, shifts, codes, lanes[k], d[k], k, out, starts[k] // BLOCK * 50)


@kernel
def _encode_m(rows: np.ndarray, importance: np.ndarray, width: int, out: np.ndarray, points: Any) -> None:
    size, groups = 16, 16
    starts, indices = np.empty(LANES, np.intp), np.empty(32 * LANES, np.int32)
    codes = np.empty(groups * LANES, np.uint8)
    all_x, all_w, all_odds, ranks, work = tile(BLOCK), tile(BLOCK), tile(BLOCK), tile(size), tile(4 * 17 + 1)
    shifts, scales, lanes, d = tile(2 * groups), tile(groups), tile(4), tile(1)
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, all_x)
            variance = _TWO * add_squares(splat(_ZERO), all_x, BLOCK) / np.float32(BLOCK)
            greatest = splat(_ZERO)
            if importance.size:
                weigh_by_importance(all_x, all_w, importance, column, BLOCK, variance)
            else:
                weigh_by_square(all_x, all_w, BLOCK)
            for group in range(groups):
                x = all_x[group * size * LANES : (group + 1) * size * LANES]
                w = all_w[group * size * LANES : (group + 1) * size * LANES]
                odds = all_odds[group * size * LANES : (group + 1) * size * LANES]
                _rank(x, ranks, size)
                low, high, signs, scale = _split_16(x, w, ranks, work)
                used = above(_reach(x, size), _NOTHING_M) & (signs > -_ONE)
                _assign(ranks, odds, size, low, high, scale < _ZERO)
                signs = where(used, where(scale < _ZERO, _THREE - signs, signs), splat(_ZERO))
                scale = where(used, absolute(scale), splat(_ZERO))
                off = splat(_ZERO)
                sum_wqx, sum_wqq = splat(_ZERO), splat(_ZERO)
                for cell in range(2):
                    minus = signs > _ONE
                    if cell == 1:
                        minus = where(signs == _ONE, splat(_THREE), signs) > _TWO
                    shift = where(minus, splat(-_SHIFT), splat(_SHIFT))
                    store(shifts, (group * 2 + cell) * LANES, shift)
                    off = off + _place(x, w, odds, cell, scale, shift, points, lanes)
                    sum_wqx, sum_wqq = _add_products(x, w, odds, cell, shift, sum_wqx, sum_wqq)
                moved = used & (off > _ZERO) & (sum_wqx > _ZERO) & (sum_wqq > _ZERO)
                scale = where(moved, sum_wqx / sum_wqq, scale)
                for at in range(0, size * LANES, LANES):
                    store(odds, at, where(used, load(odds, at), splat(_ONE)))
                put_indices(odds, size, _CELL, _LEVELS, used, points, indices, group * 2, lanes)
                store(scales, group * LANES, scale)
                greatest = where(greatest > scale, greatest, scale)
            put_scale_codes(scales, groups, 7, greatest / _STEPS, codes)
            step = _refit(all_x, all_w, all_odds, shifts, codes, greatest / _STEPS)
            store(d, 0, where(greatest > _ZERO, step * _GROWN_M, splat(_ZERO)))
            store(lanes, 0, greatest)
            for k in range(LANES):
                _put_m(indices, shifts, codes, lanes[k], d[k], k, out, starts[k] // BLOCK * 56)


@routine
def _reach(x: np.ndarray, n: int) -> Any:
    """Returns the largest magnitude in every lane."""
    high = absolute(load(x, 0))
    for at in range(LANES, n * LANES, LANES):
        size = absolute(load(x, at))
        high = where(high > size, high, size)
    return high


@routine
def _rank(x: np.ndarray, ranks: np.ndarray, n: int) -> None:
    """Fills a tile with the places of the elements in ascending order; equal ones keep theirs."""
    for at in range(0, n * LANES, LANES):
        store(ranks, at, splat(_ZERO))
    for at in range(0, n * LANES, LANES):
        value, rank = load(x, at), load(ranks, at)
        for other in range(at + LANES, n * LANES, LANES):
            below = load(x, other) < value
            rank = where(below, rank + _ONE, rank)
            store(ranks, other, where(below, load(ranks, other), load(ranks, other) + _ONE))
        store(ranks, at, rank)


@routine
def _split_32(x: np.ndarray, w: np.ndarray, ranks: np.ndarray, work: np.ndarray) -> Any:
    """Returns the first ranks of codes 0 and 1, the shift's sign (0: no weights) and the scale, as lanes.

    Sums over sorted elements give the sums of each of the three codes as differences. `work` is a tile of
    six times 33.
    """
    n, run = 32, 33 * LANES
    sums_x, sums_w = work[:run], work[run : 2 * run]
    for at in range(0, 2 * run, LANES):
        store(work, at, splat(_ZERO))
    for at in range(0, n * LANES, LANES):
        store(work, 2 * run + at, load(w, at) * load(x, at))
    for at in range(0, n * LANES, LANES):
        for k in range(LANES):
            sorted_at = (np.int64(ranks[at + k]) + 1) * LANES + k
            sums_x[sorted_at], sums_w[sorted_at] = work[2 * run + at + k], w[at + k]
    for at in range(LANES, run, LANES):
        store(sums_x, at, load(sums_x, at - LANES) + load(sums_x, at))
        store(sums_w, at, load(sums_w, at - LANES) + load(sums_w, at))
    for at in range(0, run, LANES):
        above_x = load(sums_x, n * LANES) - load(sums_x, at)
        above_w = load(sums_w, n * LANES) - load(sums_w, at)
        store(work, 2 * run + at, above_x * (_ONE + _SHIFT))
        store(work, 3 * run + at, above_w * (_ONE + _SHIFT) * (_ONE + _SHIFT))
        store(work, 4 * run + at, above_x * (_ONE - _SHIFT))
        store(work, 5 * run + at, above_w * (_ONE - _SHIFT) * (_ONE - _SHIFT))
    best, scale = splat(-_LARGEST), splat(_ZERO)
    best_low, best_high, best_shift = splat(_ZERO), splat(_ZERO), splat(_ZERO)
    for low in range(0, run, LANES):
        low_x, low_w = load(sums_x, low), load(sums_w, low)
        plus_x, plus_w = low_x * (_SHIFT - _ONE), low_w * (_SHIFT - _ONE) * (_SHIFT - _ONE)
        minus_x, minus_w = low_x * (-_SHIFT - _ONE), low_w * (-_SHIFT - _ONE) * (-_SHIFT - _ONE)
        for high in range(low, run, LANES):
            middle_x, middle_w = load(sums_x, high) - low_x, (load(sums_w, high) - low_w) * _SHIFT * _SHIFT
            middle_x = middle_x * _SHIFT
            for shift in (_ONE, -_ONE):
                if shift > _ZERO:
                    sum_wqx = plus_x + middle_x + load(work, 2 * run + high)
                    sum_wqq = plus_w + middle_w + load(work, 3 * run + high)
                else:
                    sum_wqx = minus_x - middle_x + load(work, 4 * run + high)
                    sum_wqq = minus_w + middle_w + load(work, 5 * run + high)
                better = (sum_wqq > _ZERO) & (sum_wqx * sum_wqx > best * sum_wqq)
                if mask_bits(better) != 0:
                    scale = where(better, sum_wqx / sum_wqq, scale)
                    best = where(better, scale * sum_wqx, best)
                    best_low = where(better, splat(np.float32(low // LANES)), best_low)
                    best_high = where(better, splat(np.float32(high // LANES)), best_high)
                    best_shift = where(better, splat(shift), best_shift)
    return best_low, best_high, best_shift, scale


@routine
def _split_16(x: np.ndarray, w: np.ndarray, ranks: np.ndarray, work: np.ndarray) -> Any:
    """Does the same for two cells with their own shifts; `work` is a tile of 4 * 17 + 1.

    Instead of the shift it returns the number of the two: 2 if that of the first cell is -1/8, plus 1 if that
    of the second is; -1 where there are no weights.
    """
    n, run = 16, 17 * LANES
    product = work[4 * run :]
    for at in range(0, 4 * run, LANES):
        store(work, at, splat(_ZERO))
    for at in range(0, n * LANES, LANES):
        store(product, 0, load(w, at) * load(x, at))
        half = 0 if at < _CELL * LANES else 2 * run
        for k in range(LANES):
            sorted_at = half + (np.int64(ranks[at + k]) + 1) * LANES + k
            work[sorted_at], work[run + sorted_at] = product[k], w[at + k]
    for part in range(0, 4 * run, run):
        for at in range(part + LANES, part + run, LANES):
            store(work, at, load(work, at - LANES) + load(work, at))
    best, scale = splat(-_LARGEST), splat(_ZERO)
    best_low, best_high, best_signs = splat(_ZERO), splat(_ZERO), splat(-_ONE)
    for low in range(0, run, LANES):
        for high in range(low, run, LANES):
            plus_x0, plus_w0, minus_x0, minus_w0 = _cell_sums(work, low, high)
            plus_x1, plus_w1, minus_x1, minus_w1 = _cell_sums(work[2 * run :], low, high)
            for signs in range(4):
                x0, w0 = (plus_x0, plus_w0) if signs < 2 else (minus_x0, minus_w0)
                x1, w1 = (plus_x1, plus_w1) if signs % 2 == 0 else (minus_x1, minus_w1)
                sum_wqx, sum_wqq = x0 + x1, w0 + w1
                better = (sum_wqq > _ZERO) & (sum_wqx * sum_wqx > best * sum_wqq)
                if mask_bits(better) != 0:
                    scale = where(better, sum_wqx / sum_wqq, scale)
                    best = where(better, scale * sum_wqx, best)
                    best_low = where(better, splat(np.float32(low // LANES)), best_low)
                    best_high = where(better, splat(np.float32(high // LANES)), best_high)
                    best_signs = where(better, splat(np.float32(signs)), best_signs)
    return best_low, best_high, best_signs, scale


@routine
def _cell_sums(sums: np.ndarray, low: int, high: int) -> Any:
    """Returns a cell's sums of w * q * x and w * q * q with shift 1/8, then those with -1/8.

    `sums` holds sums of w * x and of w over the sorted elements. Neighbouring q differ by 1, so that the
    first is the total times the largest q less two of these sums. (Other orders round otherwise.)
    """
    run = 17 * LANES
    total_x, total_w = load(sums, run - LANES), load(sums, 2 * run - LANES)
    below_x = load(sums, low) + load(sums, high)
    low_w, high_w = load(sums, run + low), load(sums, run + high)
    p0, p1, p2 = _SHIFT - _ONE, _SHIFT, _SHIFT + _ONE
    m0, m1, m2 = -_SHIFT - _ONE, -_SHIFT, _ONE - _SHIFT
    plus_w = total_w * p2 * p2 + low_w * (p0 * p0 - p1 * p1) + high_w * (p1 * p1 - p2 * p2)
    minus_w = total_w * m2 * m2 + low_w * (m0 * m0 - m1 * m1) + high_w * (m1 * m1 - m2 * m2)
    return total_x * p2 - below_x, plus_w, total_x * m2 - below_x, minus_w


@routine
def _assign(ranks: np.ndarray, odds: np.ndarray, n: int, low: Any, high: Any, mirrored: Any) -> None:
    """Fills `odds` with 1, 3 and 5 for ranks below `low`, below `high` and the others; mirrored: 5, 3, 1."""
    for at in range(0, n * LANES, LANES):
        rank = load(ranks, at)
        odd = where(rank < high, splat(_THREE), splat(_THREE + _TWO))
        odd = where(rank < low, splat(_ONE), odd)
        store(odds, at, where(mirrored, _THREE + _THREE - odd, odd))


@routine
def _place(
    x: np.ndarray, w: np.ndarray, odds: np.ndarray, cell: int, scale: Any, shift: Any, points: Any,
    lanes: np.ndarray,
) -> Any:  # fmt: skip
    """Moves a cell to a neighbour where it is off the lattice; returns 1 in those lanes, 0 in the others.

    `lanes` is a tile of 4.
    """
    number, worth = splat(_ZERO), _HALF
    for at in range(cell * _CELL * LANES, (cell + 1) * _CELL * LANES, LANES):
        number = number + (load(odds, at) - _ONE) * worth
        worth = worth * _THREE
    store(lanes, 0, number)
    store(lanes, LANES, scale)
    store(lanes, 2 * LANES, shift - _MIDDLE)
    store(lanes, 3 * LANES, splat(_ZERO))
    for k in range(LANES):
        p = np.int64(lanes[k])
        if points.runs_P1[p] != points.runs_P1[p + 1]:
            middle = lanes[2 * LANES + k]
            move(x, w, odds, cell * _CELL, _CELL, k, lanes[LANES + k], middle, True, p, points)
            lanes[3 * LANES + k] = _ONE
    return load(lanes, 3 * LANES)


@routine
def _add_products(
    x: np.ndarray, w: np.ndarray, odds: np.ndarray, cell: int, shift: Any, sum_wqx: Any, sum_wqq: Any
) -> Any:
    """Adds a cell's weighted products of numbers with codes, and of codes with codes, to two sums."""
    for at in range(cell * _CELL * LANES, (cell + 1) * _CELL * LANES, LANES):
        q = load(odds, at) * _HALF + (shift - _MIDDLE)
        wq = load(w, at) * q
        sum_wqx, sum_wqq = sum_wqx + wq * load(x, at), sum_wqq + wq * q
    return sum_wqx, sum_wqq


@routine
def _refit(
    x: np.ndarray, w: np.ndarray, odds: np.ndarray, shifts: np.ndarray, codes: np.ndarray, step: Any
) -> Any:
    """Returns the super-block's scale of least weighted squared error, for the codes and scales chosen."""
    sum_wqx, sum_wqq = splat(_ZERO), splat(_ZERO)
    for cell in range(32):
        middle = load(shifts, cell * LANES) - _MIDDLE
        steps = load(codes, cell // 2 * LANES) * _TWO + _ONE
        for at in range(cell * _CELL * LANES, (cell + 1) * _CELL * LANES, LANES):
            q = (load(odds, at) * _HALF + middle) * steps
            wq = load(w, at) * q
            sum_wqx, sum_wqq = sum_wqx + wq * load(x, at), sum_wqq + wq * q
    return where(sum_wqq > _ZERO, sum_wqx / sum_wqq, step)


@routine
def _put_s(
    indices: np.ndarray, shifts: np.ndarray, codes: np.ndarray, greatest: np.float32, d: np.float32, k: int,
    out: np.ndarray, at: int,
) -> None:  # fmt: skip
    """Writes d, the low bytes of indices, and words of four times three high bits, the scale, the shift."""
    put_half(out, at, d)
    for group in range(8):
        word = 0
        for cell in range(4):
            index = indices[(group * 4 + cell) * LANES + k]
            out[at + 2 + group * 4 + cell] = index & 0xFF
            word |= (index >> 8) << 3 * cell
        if greatest > _ZERO:
            word |= codes[group * LANES + k] << 12 | (shifts[group * LANES + k] < _ZERO) << 15
        out[at + 34 + 2 * group], out[at + 35 + 2 * group] = word & 0xFF, word >> 8


@routine
def _put_m(
    indices: np.ndarray, shifts: np.ndarray, codes: np.ndarray, greatest: np.float32, d: np.float32, k: int,
    out: np.ndarray, at: int,
) -> None:  # fmt: skip
    """Writes the low bytes of indices, nibbles of three high bits and the shift, and words of scales.

    A word holds the scales of four groups and four bits of d.
    """
    for cell in range(32):
        out[at + cell] = indices[cell * LANES + k] & 0xFF
    for byte in range(16):
        word = 0
        for cell in range(2):
            here = (byte * 2 + cell) * LANES + k
            minus = greatest > _ZERO and shifts[here] < _ZERO
            word |= (indices[here] >> 8 | (8 if minus else 0)) << 4 * cell
        out[at + 32 + byte] = word
    bits = half_bits(d)
    for number in range(4):
        word = (bits >> 4 * number & 15) << 12
        for group in range(4):
            word |= codes[(number * 4 + group) * LANES + k] << 3 * group
        out[at + 48 + 2 * number], out[at + 49 + 2 * number] = word & 0xFF, word >> 8
