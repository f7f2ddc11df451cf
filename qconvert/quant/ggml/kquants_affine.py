"""Encodes rows as Q2_K, Q4_K and Q5_K: super-blocks of 256 in groups with a scale and a minimum.

v = d * s * code - dmin * m. Every group of 16 or 32 elements gets the affine scale of least error; the
groups' scales and minimums are then rounded to 4 or 6 bits, d and dmin to half precision, and the codes are
recomputed for the rounded scales. Sixteen super-blocks are encoded at a time. Source:
quantize_row_q{2,4,5}_K_ref (plain) and _impl (weighted) in ggml-quants.c.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.ggml.pack import put_nibbles, put_pairs, put_scales_4, put_scales_6, put_top_bits
from qconvert.quant.ggml.scalars import put_half
from qconvert.quant.ggml.search import affine_trials, fit_affine, fit_nonnegative, nonnegative_trials
from qconvert.quant.ggml.tiles import (
    add_squares,
    consecutive,
    gather,
    scatter,
    stacked,
    sum_of,
    tile,
    weigh_by_importance,
    weigh_by_magnitude,
    weigh_by_size,
)
from qconvert.quant.simd.lanes import LANES, clamp, kernel, load, nearest, routine, splat, store, where

BLOCK = 256
_ZERO = np.float32(0)
_FIFTH_BIT = np.float32(16)
_TRIALS_Q2 = affine_trials(3, -0.5, 0.1, 15)
_TRIALS_Q4 = affine_trials(15, -1.0, 0.1, 20)
_TRIALS_Q5 = affine_trials(31, -0.5, 0.1, 15)
_WEIGHTED_TRIALS_Q2 = affine_trials(3, -0.9, 0.05, 36)
_WEIGHTED_TRIALS_Q4 = affine_trials(15, -0.9, 0.05, 36)
_WEIGHTED_TRIALS_Q5 = affine_trials(31, -0.9, 0.05, 36)
_SCALE_TRIALS_4 = nonnegative_trials(15)
_SCALE_TRIALS_6 = nonnegative_trials(63)


class _Work(NamedTuple):
    """Working memory for sixteen super-blocks; tiles are [elements or groups, lanes].

    Per group: `scales` and `mins` from the search, `sums` of its weights, and `s` and `m`, the rounded bytes;
    per super-block: `d` and `dmin` as stored.
    """

    starts: np.ndarray
    x: np.ndarray
    w: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    mins: np.ndarray
    sums: np.ndarray
    s: np.ndarray
    m: np.ndarray
    d: np.ndarray
    dmin: np.ndarray


@routine
def _new_work(groups: int) -> Any:
    starts = np.empty(LANES, np.intp)
    s, m = np.empty(groups * LANES, np.uint8), np.empty(groups * LANES, np.uint8)
    scales, mins, sums = tile(groups), tile(groups), tile(groups)
    return _Work(
        starts, tile(BLOCK), tile(BLOCK // groups), tile(BLOCK), scales, mins, sums, s, m, tile(1), tile(1)
    )


@kernel
def encode_affine(bits: int, rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q2_K, Q4_K or Q5_K (`bits` 2, 4 or 5) of the flat array of whole rows to the flat `out`."""
    groups = 16 if bits == 2 else 8
    n, top = BLOCK // groups, np.float32((1 << bits) - 1)
    trials = _TRIALS_Q2 if bits == 2 else _TRIALS_Q4 if bits == 4 else _TRIALS_Q5
    work = _new_work(groups)
    count = rows.size // BLOCK
    for block in range(0, count, LANES):
        consecutive(work.starts, block, count, BLOCK)
        gather(rows, work.starts, BLOCK, work.x)
        for group in range(groups):
            x = _part(work.x, group, n)
            if bits == 2:
                weigh_by_magnitude(x, work.w, n)
            else:
                weigh_by_size(x, work.w, n)
            scale, low = fit_affine(x, work.w, _part(work.codes, group, n), n, top, trials, bits == 2)
            store(work.scales, group * LANES, scale)
            store(work.mins, group * LANES, -low)
        scale_top = np.float32(15 if bits == 2 else 63)
        store(work.d, 0, _round_scales(work.scales, work.s, groups, scale_top))
        store(work.dmin, 0, _round_scales(work.mins, work.m, groups, scale_top))
        _finish(work, out, bits, groups, top, True)


@kernel
def encode_affine_weighted(bits: int, rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    groups = 16 if bits == 2 else 8
    n, top = BLOCK // groups, np.float32((1 << bits) - 1)
    trials = _WEIGHTED_TRIALS_Q2 if bits == 2 else _WEIGHTED_TRIALS_Q4 if bits == 4 else _WEIGHTED_TRIALS_Q5
    scale_top = np.float32(15 if bits == 2 else 63)
    scale_trials = _SCALE_TRIALS_4 if bits == 2 else _SCALE_TRIALS_6
    spread = np.float32(1 if bits == 2 else 2)
    work = _new_work(groups)
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(work.starts, row, count, width, column)
            gather(rows, work.starts, BLOCK, work.x)
            variance = spread * add_squares(splat(_ZERO), work.x, BLOCK) / np.float32(BLOCK)
            for group in range(groups):
                x = _part(work.x, group, n)
                weigh_by_importance(x, work.w, importance, column + group * n, n, variance)
                scale, low = fit_affine(x, work.w, _part(work.codes, group, n), n, top, trials, False)
                store(work.scales, group * LANES, scale)
                store(work.mins, group * LANES, -low)
                store(work.sums, group * LANES, sum_of(work.w, n))
            d = fit_nonnegative(work.scales, work.sums, work.s, groups, scale_top, scale_trials)
            dmin = fit_nonnegative(work.mins, work.sums, work.m, groups, scale_top, scale_trials)
            store(work.d, 0, d)
            store(work.dmin, 0, dmin)
            _finish(work, out, bits, groups, top, bits == 5)


@routine
def _part(elements: np.ndarray, group: int, n: int) -> np.ndarray:
    return elements[group * n * LANES : (group + 1) * n * LANES]


@routine
def _round_scales(scales: np.ndarray, codes: np.ndarray, groups: int, top: np.float32) -> Any:
    """Rounds scales to bytes with the largest at `top`; returns the unit of those bytes."""
    high = splat(_ZERO)
    for at in range(0, groups * LANES, LANES):
        high = where(load(scales, at) > high, load(scales, at), high)
    steps = where(high > _ZERO, top / high, splat(_ZERO))
    for at in range(0, groups * LANES, LANES):
        store(codes, at, nearest(steps * load(scales, at)))
    return high / top


@routine
def _finish(work: Any, out: np.ndarray, bits: int, groups: int, top: np.float32, capped: bool) -> None:
    """Stores the scales of sixteen super-blocks, then the codes computed for the stored scales."""
    size = 84 if bits == 2 else 144 if bits == 4 else 176
    halves = 80 if bits == 2 else 0
    for k in range(LANES):
        at = work.starts[k] // BLOCK * size
        work.d[k] = put_half(out, at + halves, work.d[k])
        work.dmin[k] = put_half(out, at + halves + 2, work.dmin[k])
        if bits == 2:
            put_scales_4(work.s, work.m, k, out, at)
        else:
            put_scales_6(work.s, work.m, k, out, at + 4, capped)
    _recode(work, groups, BLOCK // groups, top)
    scatter(work.codes, BLOCK, work.x)
    for k in range(LANES):
        at = work.starts[k] // BLOCK * size
        codes = work.x[k * BLOCK : (k + 1) * BLOCK]
        if bits == 2:
            put_pairs(codes, out, at + 16)
        elif bits == 4:
            put_nibbles(codes, out, at + 16)
        else:
            put_top_bits(codes, _FIFTH_BIT, out, at + 16)
            put_nibbles(codes, out, at + 48)


@routine
def _recode(work: Any, groups: int, n: int, top: np.float32) -> None:
    """Recomputes codes for the stored scales; a group whose scale rounded to 0 keeps those of its search."""
    for group in range(groups):
        scale = load(work.d, 0) * load(work.s, group * LANES)
        shift = load(work.dmin, 0) * load(work.m, group * LANES)
        gone = scale == _ZERO
        for at in range(group * n * LANES, (group + 1) * n * LANES, LANES):
            code = clamp(nearest((load(work.x, at) + shift) / scale), _ZERO, top)
            store(work.codes, at, where(gone, load(work.codes, at), code))
