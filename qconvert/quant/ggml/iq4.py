"""Encodes rows as IQ4_NL and IQ4_XS, whose 4-bit codes index sixteen non-uniform values.

v = d * value (NL, blocks of 32) or d * (s - 32) * value (XS, super-blocks of 256, a scale per 32). The scale
of 32 elements is that of the highest weighted correlation among sixteen candidates; the codes are those for
the scale before its rounding to half precision. Sixteen blocks are encoded at a time. Source:
quantize_row_iq4_nl_impl in ggml-quants.c, with 7 tries in either direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.decode import IQ4_VALUES
from qconvert.quant.ggml.scalars import put_half
from qconvert.quant.ggml.search import NOTHING, peaks
from qconvert.quant.ggml.tiles import (
    add_squares,
    consecutive,
    gather,
    scatter,
    stacked,
    tile,
    weigh_by_importance,
    weigh_by_square,
)
from qconvert.quant.simd.lanes import LANES, clamp, kernel, load, nearest, routine, splat, store, where

BLOCK = 32
SUPER_BLOCK = 256
_GROUPS = SUPER_BLOCK // BLOCK
_ZERO, _ONE, _TWO, _SIXTEEN, _THIRTY_TWO = (np.float32(number) for number in (0, 1, 2, 16, 32))
_MIDDLES = (IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2
_CODES = np.arange(16, dtype=np.float32)
_LOWEST = IQ4_VALUES[0]
_TRIALS = np.arange(-7, 8, dtype=np.float32) + _LOWEST


@kernel
def encode_iq4_nl(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ4_NL blocks of the flat array of whole rows to the flat `out`."""
    starts = np.empty(LANES, np.intp)
    x, w, d = tile(BLOCK), tile(BLOCK), tile(1)
    count = rows.size // BLOCK
    for block in range(0, count, LANES):
        consecutive(starts, block, count, BLOCK)
        gather(rows, starts, BLOCK, x)
        weigh_by_square(x, w, BLOCK)
        store(d, 0, _fit(x, w))
        _finish_nl(starts, x, d, w, out)


@kernel
def encode_iq4_nl_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    starts = np.empty(LANES, np.intp)
    x, w, d = tile(BLOCK), tile(BLOCK), tile(1)
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, x)
            variance = add_squares(splat(_ZERO), x, BLOCK) * (_TWO / np.float32(BLOCK))
            weigh_by_importance(x, w, importance, column, BLOCK, variance)
            store(d, 0, _fit(x, w))
            _finish_nl(starts, x, d, w, out)


@kernel
def encode_iq4_xs(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ4_XS blocks of the flat array of whole rows to the flat `out`."""
    starts, s_bytes = np.empty(LANES, np.intp), np.empty(_GROUPS * LANES, np.uint8)
    x, w, scales, d = tile(SUPER_BLOCK), tile(BLOCK), tile(_GROUPS), tile(1)
    codes = tile(SUPER_BLOCK)
    count = rows.size // SUPER_BLOCK
    for block in range(0, count, LANES):
        consecutive(starts, block, count, SUPER_BLOCK)
        gather(rows, starts, SUPER_BLOCK, x)
        for group in range(_GROUPS):
            weigh_by_square(_group(x, group), w, BLOCK)
            store(scales, group * LANES, _fit(_group(x, group), w))
        _finish_xs(starts, x, scales, d, s_bytes, codes, out)


@kernel
def encode_iq4_xs_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    starts, s_bytes = np.empty(LANES, np.intp), np.empty(_GROUPS * LANES, np.uint8)
    x, w, scales, d = tile(SUPER_BLOCK), tile(BLOCK), tile(_GROUPS), tile(1)
    codes = tile(SUPER_BLOCK)
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, SUPER_BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, SUPER_BLOCK, x)
            variance = add_squares(splat(_ZERO), x, SUPER_BLOCK) * (_TWO / np.float32(SUPER_BLOCK))
            for group in range(_GROUPS):
                weigh_by_importance(_group(x, group), w, importance, column + group * BLOCK, BLOCK, variance)
                store(scales, group * LANES, _fit(_group(x, group), w))
            _finish_xs(starts, x, scales, d, s_bytes, codes, out)


@routine
def _group(x: np.ndarray, group: int) -> np.ndarray:
    return x[group * BLOCK * LANES : (group + 1) * BLOCK * LANES]


@routine
def _fit(x: np.ndarray, w: np.ndarray) -> Any:
    """Returns the scale of highest weighted correlation of 32 elements, 0 where all are 0."""
    size, peak = peaks(x, BLOCK)
    sum_wqx, sum_wqq = _correlation(x, w, _ONE / (-peak / _LOWEST))
    scale = where(sum_wqq > _ZERO, sum_wqx / sum_wqq, splat(_ZERO))
    best = scale * sum_wqx
    for trial in _TRIALS:
        sum_wqx, sum_wqq = _correlation(x, w, trial / peak)
        better = (sum_wqq > _ZERO) & (sum_wqx * sum_wqx > best * sum_wqq)
        scale = where(better, sum_wqx / sum_wqq, scale)
        best = where(better, scale * sum_wqx, best)
    return where(size < NOTHING, splat(_ZERO), scale)


@routine
def _correlation(x: np.ndarray, w: np.ndarray, spread: Any) -> Any:
    sum_wqx, sum_wqq = splat(_ZERO), splat(_ZERO)
    for at in range(0, BLOCK * LANES, LANES):
        quantized = _nearest_entry(spread * load(x, at), IQ4_VALUES)
        wq = load(w, at) * quantized
        sum_wqx = sum_wqx + wq * load(x, at)
        sum_wqq = sum_wqq + wq * quantized
    return sum_wqx, sum_wqq


@routine
def _nearest_entry(x: Any, table: np.ndarray) -> Any:
    """Returns the table's entry for the nearest of the sixteen values; ties go to the upper one."""
    found = splat(table[15])
    for code in range(14, -1, -1):
        found = where(x < _MIDDLES[code], splat(table[code]), found)
    return found


@routine
def _inverse(value: Any) -> Any:
    return where(value == _ZERO, splat(_ZERO), _ONE / value)


@routine
def _finish_nl(starts: np.ndarray, x: np.ndarray, d: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    spread = _inverse(load(d, 0))
    for at in range(0, BLOCK * LANES, LANES):
        store(codes, at, _nearest_entry(spread * load(x, at), _CODES))
    scatter(codes, BLOCK, x)
    for k in range(LANES):
        at = starts[k] // BLOCK * 18
        put_half(out, at, d[k])
        _put_nibbles(x, k * BLOCK, out, at + 2)


@routine
def _finish_xs(
    starts: np.ndarray,
    x: np.ndarray,
    scales: np.ndarray,
    d: np.ndarray,
    s_bytes: np.ndarray,
    codes: np.ndarray,
    out: np.ndarray,
) -> None:
    _, peak = peaks(scales, _GROUPS)
    step = -peak / _THIRTY_TWO
    store(d, 0, step)
    for group in range(_GROUPS):
        s = clamp(nearest(_inverse(step) * load(scales, group * LANES)), -_THIRTY_TWO, _THIRTY_TWO - _ONE)
        store(s_bytes, group * LANES, s + _THIRTY_TWO)
        spread = _inverse(step * s)
        for at in range(group * BLOCK * LANES, (group + 1) * BLOCK * LANES, LANES):
            store(codes, at, _nearest_entry(spread * load(x, at), _CODES))
    scatter(codes, SUPER_BLOCK, x)
    for k in range(LANES):
        at = starts[k] // SUPER_BLOCK * 136
        put_half(out, at, d[k])
        _put_scales(s_bytes, k, out, at + 2)
        for group in range(_GROUPS):
            _put_nibbles(x, k * SUPER_BLOCK + group * BLOCK, out, at + 8 + group * LANES)


@routine
def _put_scales(s: np.ndarray, k: int, out: np.ndarray, at: int) -> None:
    """Writes scales + 32: two bytes of top bits, two bits per scale, then four bytes of nibbles."""
    high = 0
    for group in range(_GROUPS):
        high |= s[group * LANES + k] >> 4 << 2 * group
    out[at], out[at + 1] = high & 0xFF, high >> 8
    for pair in range(4):
        low = s[2 * pair * LANES + k] & 15
        out[at + 2 + pair] = low | (s[(2 * pair + 1) * LANES + k] & 15) << 4


@routine
def _put_nibbles(codes: np.ndarray, first: int, out: np.ndarray, at: int) -> None:
    store(out, at, load(codes, first) + load(codes, first + LANES) * _SIXTEEN)
