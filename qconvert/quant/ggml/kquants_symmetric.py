"""Encodes rows as Q3_K and Q6_K: super-blocks of 256 with sixteen signed scales.

v = d * s * (code - half). Every group of 16 elements gets the symmetric scale of least error; the scales are
then rounded to 6 or 8 bits, d to half precision, and the codes are recomputed for the rounded scales. Sixteen
super-blocks are encoded at a time. Source: quantize_row_q{3,6}_K_ref (plain) and _impl (weighted) in
ggml-quants.c.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.ggml.pack import put_pairs, put_signed_scales_6, put_six_bits, put_top_bits
from qconvert.quant.ggml.scalars import put_half
from qconvert.quant.ggml.search import NOTHING, fit_by_descent, fit_symmetric, peaks, symmetric_trials
from qconvert.quant.ggml.tiles import (
    add_squares,
    consecutive,
    gather,
    scatter,
    stacked,
    sum_of,
    tile,
    weigh_by_column,
    weigh_by_importance,
    weigh_by_square,
)
from qconvert.quant.simd.lanes import LANES, clamp, kernel, load, nearest, routine, splat, store, where

BLOCK = 256
GROUPS = 16
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_ELEMENTS = np.float32(BLOCK)
_TRIALS_Q3 = symmetric_trials(4)
_TRIALS_Q6 = symmetric_trials(32)
_HALF_3, _HALF_6 = np.float32(4), np.float32(32)
_Q6_STEPS, _Q6_TOP = np.float32(-128), np.float32(127)


class _Work(NamedTuple):
    """Working memory for sixteen super-blocks; tiles are [elements or groups, lanes].

    Per group: `scales` from the search, `sums` of its weights, `s`, the rounded scales, and `s_bytes`, the
    stored bytes; per super-block: `d`, as stored.
    """

    starts: np.ndarray
    x: np.ndarray
    w: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    sums: np.ndarray
    s: np.ndarray
    s_bytes: np.ndarray
    d: np.ndarray


@routine
def _new_work() -> Any:
    starts, s_bytes = np.empty(LANES, np.intp), np.empty(GROUPS * LANES, np.uint8)
    w, scales, sums, s = tile(GROUPS), tile(GROUPS), tile(GROUPS), tile(GROUPS)
    return _Work(starts, tile(BLOCK), w, tile(BLOCK), scales, sums, s, s_bytes, tile(1))


@kernel
def encode_q6_k(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q6_K blocks of the flat array of whole rows to the flat `out`."""
    work = _new_work()
    count = rows.size // BLOCK
    for block in range(0, count, LANES):
        consecutive(work.starts, block, count, BLOCK)
        gather(rows, work.starts, BLOCK, work.x)
        for group in range(GROUPS):
            weigh_by_square(_group(work.x, group), work.w, GROUPS)
            _fit_q6(work, group)
        _finish_q6(work, out)


@kernel
def encode_q6_k_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    work = _new_work()
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(work.starts, row, count, width, column)
            gather(rows, work.starts, BLOCK, work.x)
            for group in range(GROUPS):
                weigh_by_column(work.w, importance, column + group * GROUPS, GROUPS)
                _fit_q6(work, group)
            _finish_q6(work, out)


@routine
def _fit_q6(work: Any, group: int) -> None:
    x, codes = _group(work.x, group), _group(work.codes, group)
    store(work.scales, group * LANES, fit_symmetric(x, work.w, codes, GROUPS, _HALF_6, _TRIALS_Q6))


@routine
def _finish_q6(work: Any, out: np.ndarray) -> None:
    """Rounds the scales to 8 bits, and stores the super-blocks."""
    size, peak = peaks(work.scales, GROUPS)
    nothing = size < NOTHING
    steps = _Q6_STEPS / peak
    for at in range(0, GROUPS * LANES, LANES):
        s = nearest(steps * load(work.scales, at))
        s = where(s < _Q6_TOP, s, splat(_Q6_TOP))
        store(work.s, at, where(nothing, splat(_ZERO), s))
        store(work.s_bytes, at, load(work.s, at))
    for at in range(0, BLOCK * LANES, LANES):
        store(work.codes, at, where(nothing, splat(_ZERO), load(work.codes, at)))
    store(work.d, 0, where(nothing, splat(_ZERO), _ONE / steps))
    for k in range(LANES):
        at = work.starts[k] // BLOCK * 210
        work.d[k] = put_half(out, at + 208, work.d[k])
        for group in range(GROUPS):
            out[at + 192 + group] = work.s_bytes[group * LANES + k]
    _recode(work, _HALF_6)
    for k in range(LANES):
        put_six_bits(work.x[k * BLOCK : (k + 1) * BLOCK], out, work.starts[k] // BLOCK * 210)


@kernel
def encode_q3_k(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q3_K blocks of the flat array of whole rows to the flat `out`."""
    work = _new_work()
    count = rows.size // BLOCK
    for block in range(0, count, LANES):
        consecutive(work.starts, block, count, BLOCK)
        gather(rows, work.starts, BLOCK, work.x)
        for group in range(GROUPS):
            x, codes = _group(work.x, group), _group(work.codes, group)
            weigh_by_square(x, work.w, GROUPS)
            store(work.scales, group * LANES, fit_by_descent(x, work.w, codes, GROUPS, _HALF_3))
        _round_scales_q3(work)
        _finish_q3(work, out)


@kernel
def encode_q3_k_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    work = _new_work()
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(work.starts, row, count, width, column)
            gather(rows, work.starts, BLOCK, work.x)
            variance = _TWO * add_squares(splat(_ZERO), work.x, BLOCK) / _ELEMENTS
            for group in range(GROUPS):
                x, codes = _group(work.x, group), _group(work.codes, group)
                weigh_by_importance(x, work.w, importance, column + group * GROUPS, GROUPS, variance)
                scale = fit_symmetric(x, work.w, codes, GROUPS, _HALF_3, _TRIALS_Q3)
                store(work.scales, group * LANES, scale)
                store(work.sums, group * LANES, sum_of(work.w, GROUPS))
            d = fit_symmetric(work.scales, work.sums, work.s, GROUPS, _HALF_6, _TRIALS_Q6)
            store(work.d, 0, d)
            _finish_q3(work, out)


@routine
def _round_scales_q3(work: Any) -> None:
    """Rounds the scales to 6 bits with the one farthest from 0 at -32."""
    _, peak = peaks(work.scales, GROUPS)
    nothing = peak == _ZERO
    steps = -_HALF_6 / peak
    for at in range(0, GROUPS * LANES, LANES):
        s = clamp(nearest(steps * load(work.scales, at)), -_HALF_6, _HALF_6 - _ONE) + _HALF_6
        store(work.s, at, where(nothing, splat(_ZERO), s))
    store(work.d, 0, where(nothing, splat(_ZERO), _ONE / steps))


@routine
def _finish_q3(work: Any, out: np.ndarray) -> None:
    """Stores the scales, plus 32, and the codes."""
    for at in range(0, GROUPS * LANES, LANES):
        store(work.s_bytes, at, load(work.s, at))
        store(work.s, at, load(work.s, at) - _HALF_6)
    for k in range(LANES):
        at = work.starts[k] // BLOCK * 110
        work.d[k] = put_half(out, at + 108, work.d[k])
        put_signed_scales_6(work.s_bytes, k, out, at + 96)
    _recode(work, _HALF_3)
    for k in range(LANES):
        at = work.starts[k] // BLOCK * 110
        codes = work.x[k * BLOCK : (k + 1) * BLOCK]
        put_top_bits(codes, _HALF_3, out, at)
        put_pairs(codes, out, at + 32)


@routine
def _recode(work: Any, half: np.float32) -> None:
    """Recomputes the codes for the stored scales, block by block in `work.x`.

    A group whose scale rounded to 0 keeps the codes of its search.
    """
    for group in range(GROUPS):
        scale = load(work.d, 0) * load(work.s, group * LANES)
        gone = scale == _ZERO
        for at in range(group * GROUPS * LANES, (group + 1) * GROUPS * LANES, LANES):
            code = clamp(nearest(load(work.x, at) / scale), -half, half - _ONE) + half
            store(work.codes, at, where(gone, load(work.codes, at), code))
    scatter(work.codes, BLOCK, work.x)


@routine
def _group(elements: np.ndarray, group: int) -> np.ndarray:
    return elements[group * GROUPS * LANES : (group + 1) * GROUPS * LANES]
