"""Group quantization and decoding of rows, compiled: the inner loops behind `affine`.

Groups do not know of each other, so a weight may be cut into any blocks of rows. A group is widened
into scratch that zeros pad to whole lanes: zeros are on every grid and lose nothing.

Axes: R rows, G groups, S columns of a group, P the same in whole lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.group_scales import stored_scale
from qconvert.quant.scale_search import best_grid, make_scratch
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

_ZERO, _HALF = np.float32(0), np.float32(0.5)
# No code stands for a number beyond the largest bfloat16, as which it might be decoded.
_FARTHEST = np.float32((2 - 2.0**-7) * 2.0**127)


@kernel
def quantize_rows(
    words_RGS: Any, grid: Any, search: Any, importance_GP: Any, codes_RGS: Any, scales_RG: Any, zeros_RG: Any
) -> Any:
    """Fill the codes, the scales (stored numbers, as float32) and the zeros of a block of rows.

    The words are floats as `lanes.load` reads them; importances are padded as the groups are. Returns
    a tally [4]: sums of squared errors and of squared weights, the largest error, the largest one in
    steps; and the numbers of scales that were too large and of groups that were not finite (and taken
    for zeros).
    """
    rows, groups, size = words_RGS.shape
    padded = importance_GP.shape[1]
    words_P, w_P = np.zeros(padded, words_RGS.dtype), np.empty(padded, np.float32)
    codes_P, scratch = np.empty(padded, np.uint8), make_scratch(padded)
    tally_4 = np.zeros(4, np.float64)
    too_large = not_finite = 0
    for row in range(rows):
        losses = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for group in range(groups):
            for i in range(size):
                words_P[i] = words_RGS[row, group, i]
            low, high, finite = _widen(words_P, w_P)
            wanted, zero = _plain_grid(low, high, grid)
            scale = stored_scale(wanted, grid)
            too_large += wanted > grid.largest
            not_finite += not finite
            if search and low < high:
                zeros = _zeros_to_try(low, scale, zero, grid)
                scale, zero = best_grid(
                    w_P, size, importance_GP[group], (low, high), scale, zeros, grid, scratch
                )
            losses = _encode(w_P, scale, zero, grid, codes_P, losses)
            for i in range(size):
                codes_RGS[row, group, i] = codes_P[i]
            scales_RG[row, group], zeros_RG[row, group] = scale, np.uint8(zero)
        _add_up(losses, tally_4)
    return tally_4, too_large, not_finite


@routine
def _widen(words_P: Any, w_P: Any) -> Any:
    """Write a group's words as float32; return its ends, 0 included, and whether all of it is finite.

    Zeros are written instead of a group that is not finite.
    """
    lows = highs = flaws = splat(_ZERO)
    for i in range(0, w_P.size, LANES):
        w = load(words_P, i)
        store(w_P, i, w)
        lows = where(w < lows, w, lows)
        highs = _larger(highs, w)
        flaws = flaws + (w - w)  # NaN where w is not finite
    finite = peak(flaws) == _ZERO
    if not finite:
        w_P[:] = _ZERO
        return _ZERO, _ZERO, finite
    return -peak(lows), peak(highs), finite


@routine
def _plain_grid(low: Any, high: Any, grid: Any) -> Any:
    """The scale, not yet rounded, and the zero of min-max (see `affine.quantize`)."""
    if grid.symmetric:
        return max(-low, high) / (grid.middle - _HALF), grid.middle
    # Halves, because the difference of the ends may be beyond float32.
    scale = (_HALF * high - _HALF * low) / (_HALF * grid.top)
    return scale, _code(np.rint(-low / stored_scale(scale, grid)), grid)


@routine
def _zeros_to_try(low: Any, scale: Any, zero: Any, grid: Any) -> Any:
    """The first and the last zero of a search: the whole numbers around the exact one."""
    if grid.symmetric:
        return zero, zero
    exact = -low / scale
    return _code(np.floor(exact), grid), _code(np.ceil(exact), grid)


@routine
def _code(number: Any, grid: Any) -> Any:
    return min(max(number, _ZERO), grid.top)


@routine
def _encode(w_P: Any, scale: Any, zero: Any, grid: Any, codes_P: Any, losses: Any) -> Any:
    """Write the codes nearest to the weights; return the losses (see `_add_up`) with theirs."""
    errors, squares, worst, most = losses
    reach = np.floor(_FARTHEST / scale)
    least, largest = max(-zero, -reach), min(grid.top - zero, reach)
    for i in range(0, w_P.size, LANES):
        w = load(w_P, i)
        t = w / scale
        q = rounded_even(clamp(t, least, largest))
        store(codes_P, i, q + zero)
        error = w - q * scale
        errors = errors + error * error
        squares = squares + w * w
        worst = _larger(worst, absolute(error))
        most = _larger(most, absolute(t - q))
    return errors, squares, worst, most


@routine
def _larger(a: Any, b: Any) -> Any:
    return where(a > b, a, b)


@routine
def _add_up(losses: Any, tally_4: Any) -> None:
    """Add a row's losses: squared errors, squared weights, largest errors, largest errors in steps."""
    errors, squares, worst, most = losses
    for k in range(LANES):
        tally_4[0] += lane(errors, k)
        tally_4[1] += lane(squares, k)
    tally_4[2] = max(tally_4[2], peak(worst))
    tally_4[3] = max(tally_4[3], peak(most))


@kernel
def decode_rows(codes_RGS: Any, scales_RG: Any, zeros_RG: Any, numbers_RGS: Any) -> None:
    """Write `(code - zero) * scale`, float32, of every code."""
    rows, groups, size = codes_RGS.shape
    for row in range(rows):
        for group in range(groups):
            scale, zero = scales_RG[row, group], np.float32(zeros_RG[row, group])
            for i in range(size):
                numbers_RGS[row, group, i] = (np.float32(codes_RGS[row, group, i]) - zero) * scale


@kernel
def decode_rows_to_bfloat16(codes_RGS: Any, scales_RG: Any, zeros_RG: Any, halves_RGS: Any) -> None:
    """Write `(code - zero) * scale`, float32 rounded to bfloat16, half to even, of every code."""
    rows, groups, size = codes_RGS.shape
    number_S = np.empty(size, np.float32)
    bits_S = number_S.view(np.uint32)
    for row in range(rows):
        for group in range(groups):
            scale, zero = scales_RG[row, group], np.float32(zeros_RG[row, group])
            for i in range(size):
                number_S[i] = (np.float32(codes_RGS[row, group, i]) - zero) * scale
            if scale - scale != _ZERO:  # rounding a NaN's bits could carry them into its sign
                for i in range(size):
                    upper = np.uint32(bits_S[i] >> np.uint32(16))
                    quiet = np.uint32(0x40 if np.isnan(number_S[i]) else 0)
                    halves_RGS[row, group, i] = upper | quiet
                continue
            for i in range(size):
                odd = np.uint32(np.uint32(bits_S[i] >> np.uint32(16)) & np.uint32(1))
                halves_RGS[row, group, i] = np.uint32(bits_S[i] + odd + np.uint32(0x7FFF)) >> np.uint32(16)
