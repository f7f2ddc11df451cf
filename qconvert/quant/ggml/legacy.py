"""Encodes rows as blocks of 32 with one scale each: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

`rows` is the flat array of whole rows, `out` the flat array of their blocks. Without importance a block is
scaled to its extremes (quantize_row_*_ref in ggml-quants.c): codes are x times 1/d in float32, and d is
rounded for storage only. With importance its scale is searched (quantize_row_*_impl), and the codes of the
search are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.scalars import inverse, put_half
from qconvert.quant.ggml.search import affine_trials, fit_affine, fit_symmetric, symmetric_trials
from qconvert.quant.ggml.tiles import gather, row_variance, scatter, stacked, tile, weigh_by_importance
from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    first,
    highest,
    kernel,
    lane,
    load,
    lowest,
    mask_bits,
    peak,
    rounded_away,
    routine,
    splat,
    store,
    truncated,
    where,
)

BLOCK = 32
_ZERO, _HALF, _SIXTEEN = np.float32(0), np.float32(0.5), np.float32(16)
_TOP_4, _TOP_5, _Q8_TOP = np.float32(15), np.float32(31), np.float32(127)
_SYMMETRIC_TRIALS = (symmetric_trials(8), symmetric_trials(16))
_AFFINE_TRIALS = (affine_trials(15, -0.9, 0.05, 36), affine_trials(31, -0.9, 0.05, 36))


@kernel
def encode_q8_0(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q8_0 blocks of 34 bytes: d, 32 signed codes; v = d * code."""
    for block in range(rows.size // BLOCK):
        a, b = load(rows, block * BLOCK), load(rows, block * BLOCK + LANES)
        d = max(peak(a), peak(b)) / _Q8_TOP
        put_half(out, block * 34, d)
        store(out, block * 34 + 2, truncated(rounded_away(a * inverse(d))))
        store(out, block * 34 + 18, truncated(rounded_away(b * inverse(d))))


@kernel
def encode_symmetric(five: bool, rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q4_0 or Q5_0: d, codes; v = d * (code - half), d from the number farthest from 0."""
    half = np.float32(16 if five else 8)
    size = 22 if five else 18
    for block in range(rows.size // BLOCK):
        a, b = load(rows, block * BLOCK), load(rows, block * BLOCK + LANES)
        d = _signed_peak(a, b) / -half
        put_half(out, block * size, d)
        a = truncated(a * inverse(d) + (half + _HALF))
        b = truncated(b * inverse(d) + (half + _HALF))
        _put_codes(out, block * size + 2, a, b, five)


@kernel
def encode_affine(five: bool, rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q4_1 or Q5_1: d, m, codes; v = d * code + m, from the smallest and the largest number."""
    top = _TOP_5 if five else _TOP_4
    size = 24 if five else 20
    for block in range(rows.size // BLOCK):
        a, b = load(rows, block * BLOCK), load(rows, block * BLOCK + LANES)
        low, high = min(lowest(a), lowest(b)), max(highest(a), highest(b))
        # Zeros of both signs are equal; the first one's sign is stored.
        low, high = _at(a, b, a == low, b == low), _at(a, b, a == high, b == high)
        d = (high - low) / top
        put_half(out, block * size, d)
        put_half(out, block * size + 2, low)
        a = truncated((a - low) * inverse(d) + _HALF)
        b = truncated((b - low) * inverse(d) + _HALF)
        _put_codes(out, block * size + 4, a, b, five)


@kernel
def encode_symmetric_weighted(five: bool, rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Writes Q4_0 or Q5_0 with the scale of least weighted error; `importance` has one number per column."""
    half = np.float32(16 if five else 8)
    trials = _SYMMETRIC_TRIALS[1] if five else _SYMMETRIC_TRIALS[0]
    size = 22 if five else 18
    width = importance.size
    count = rows.size // width
    starts = np.empty(LANES, np.intp)
    x, w, codes, d = tile(BLOCK), tile(BLOCK), tile(BLOCK), tile(1)
    for row in range(0, count, LANES):
        stacked(starts, row, count, width, 0)
        variance = row_variance(rows, starts, width)
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, x)
            weigh_by_importance(x, w, importance, column, BLOCK, variance)
            store(d, 0, fit_symmetric(x, w, codes, BLOCK, half, trials))
            scatter(codes, BLOCK, x)
            for k in range(LANES):
                at = starts[k] // BLOCK * size
                put_half(out, at, d[k])
                _put_codes(out, at + 2, load(x, BLOCK * k), load(x, BLOCK * k + LANES), five)


@kernel
def encode_affine_weighted(five: bool, rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Writes Q4_1 or Q5_1 with the scale and minimum of least weighted error."""
    top = _TOP_5 if five else _TOP_4
    trials = _AFFINE_TRIALS[1] if five else _AFFINE_TRIALS[0]
    size = 24 if five else 20
    width = importance.size
    count = rows.size // width
    starts = np.empty(LANES, np.intp)
    x, w, codes, d, m = tile(BLOCK), tile(BLOCK), tile(BLOCK), tile(1), tile(1)
    for row in range(0, count, LANES):
        stacked(starts, row, count, width, 0)
        variance = row_variance(rows, starts, width)
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, x)
            weigh_by_importance(x, w, importance, column, BLOCK, variance)
            scale, low = fit_affine(x, w, codes, BLOCK, top, trials, False)
            store(d, 0, scale)
            store(m, 0, low)
            scatter(codes, BLOCK, x)
            for k in range(LANES):
                at = starts[k] // BLOCK * size
                put_half(out, at, d[k])
                put_half(out, at + 2, m[k])
                _put_codes(out, at + 4, load(x, BLOCK * k), load(x, BLOCK * k + LANES), five)


@routine
def _signed_peak(a: Any, b: Any) -> Any:
    """Returns the first number of the largest magnitude, 0 when all are zeros of either sign."""
    size = max(peak(a), peak(b))
    if size == 0:
        return _ZERO
    return _at(a, b, absolute(a) == size, absolute(b) == size)


@routine
def _at(a: Any, b: Any, in_a: Any, in_b: Any) -> Any:
    """Returns the number at the first marked position."""
    parameter = first(in_a)
    return lane(a, parameter) if parameter < LANES else lane(b, first(in_b))


@routine
def _put_codes(out: np.ndarray, at: int, a: Any, b: Any, five: bool) -> None:
    """Packs the codes of elements 0-15 and 16-31: their fifth bits, if any, then nibbles."""
    top = _TOP_5 if five else _TOP_4
    a, b = where(a < top, a, splat(top)), where(b < top, b, splat(top))
    if five:
        fifth_a, fifth_b = a > _TOP_4, b > _TOP_4
        bits = mask_bits(fifth_a) | mask_bits(fifth_b) << LANES
        for byte in range(4):
            out[at + byte] = bits >> 8 * byte & 0xFF
        at += 4
        a, b = where(fifth_a, a - _SIXTEEN, a), where(fifth_b, b - _SIXTEEN, b)
    store(out, at, a + b * _SIXTEEN)
