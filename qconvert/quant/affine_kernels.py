"""Quantizes and dequantizes rows in groups, compiled by numba: the inner loops of `affine`.

Groups are independent, so a weight may be split into any blocks of rows. A group is copied into scratch
memory padded with zeros to whole lanes: zeros quantize without error in every group.

Axes: R rows, G groups, S columns of a group, P columns of a group padded to whole lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.group_scales import stored_scale
from qconvert.quant.scale_search import best_scale, make_scratch
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
# Larger magnitudes get no code: they would overflow when dequantized to bfloat16, whose maximum this is.
_FARTHEST = np.float32((2 - 2.0**-7) * 2.0**127)


@kernel
def quantize_rows(
    weights_RGS: Any,
    first: Any,
    spec: Any,
    search: Any,
    importance_GP: Any,
    codes_RGS: Any,
    scales_RG: Any,
    zeros_RG: Any,
    tallies_T6: Any,
) -> None:
    """Fills the codes, scales (as stored, in float32) and zero points of some rows, from the `first` on.

    The weights are float32; importances are padded as the groups are. All rows are those of T tensors of
    equal size, one below the other; to each one's tally are added: sum of squared errors, sum of squared
    weights, largest error, largest error in steps, the number of scales above their type's maximum, and the
    number of non-finite groups (quantized as zeros).
    """
    rows, groups, size = weights_RGS.shape
    padded = importance_GP.shape[1]
    w_P, codes_P = np.zeros(padded, np.float32), np.empty(padded, np.uint8)
    scratch = make_scratch(padded)
    each = max(1, len(scales_RG) // len(tallies_T6))
    for row in range(first, first + rows):
        tally_6 = tallies_T6[row // each]
        losses = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for group in range(groups):
            for i in range(size):
                w_P[i] = weights_RGS[row - first, group, i]
            low, high, finite = _span(w_P)
            wanted, zero = _min_max_scale(low, high, spec)
            scale = stored_scale(wanted, spec)
            tally_6[4] += wanted > spec.largest
            tally_6[5] += not finite
            if search and low < high:
                zeros = _zeros_to_try(low, scale, zero, spec)
                scale, zero = best_scale(
                    w_P, size, importance_GP[group], (low, high), scale, zeros, spec, scratch
                )
            losses = _encode(w_P, scale, zero, spec, codes_P, losses)
            for i in range(size):
                codes_RGS[row, group, i] = codes_P[i]
            scales_RG[row, group], zeros_RG[row, group] = scale, np.uint8(zero)
        _add_up(losses, tally_6)


@routine
def _span(w_P: Any) -> Any:
    """Returns a group's minimum and maximum, 0 included, and whether it is finite; else it becomes zeros."""
    lows = highs = flaws = splat(_ZERO)
    for i in range(0, w_P.size, LANES):
        w = load(w_P, i)
        lows = where(w < lows, w, lows)
        highs = _larger(highs, w)
        flaws = flaws + (w - w)  # NaN where w is not finite
    finite = peak(flaws) == _ZERO
    if not finite:
        w_P[:] = _ZERO
        return _ZERO, _ZERO, finite
    return -peak(lows), peak(highs), finite


@routine
def _min_max_scale(low: Any, high: Any, spec: Any) -> Any:
    """Returns the scale before rounding, and the zero point, of min-max (see `affine.quantize`)."""
    if spec.symmetric:
        return max(-low, high) / (spec.middle - _HALF), spec.middle
    # Each end is halved first: their difference may overflow float32.
    scale = (_HALF * high - _HALF * low) / (_HALF * spec.top)
    return scale, _code(np.rint(-low / stored_scale(scale, spec)), spec)


@routine
def _zeros_to_try(low: Any, scale: Any, zero: Any, spec: Any) -> Any:
    """Returns the first and the last zero point for the search: the integers around the exact one."""
    if spec.symmetric:
        return zero, zero
    exact = -low / scale
    return _code(np.floor(exact), spec), _code(np.ceil(exact), spec)


@routine
def _code(number: Any, spec: Any) -> Any:
    return min(max(number, _ZERO), spec.top)


@routine
def _encode(w_P: Any, scale: Any, zero: Any, spec: Any, codes_P: Any, losses: Any) -> Any:
    """Writes the codes nearest to the weights; returns the losses (see `_add_up`) with theirs added."""
    errors, squares, worst, most = losses
    reach = np.floor(_FARTHEST / scale)
    least, largest = max(-zero, -reach), min(spec.top - zero, reach)
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
def _add_up(losses: Any, tally_6: Any) -> None:
    """Adds a row's losses to the tally: squared errors, squared weights, largest error, largest in steps."""
    errors, squares, worst, most = losses
    for k in range(LANES):
        tally_6[0] += lane(errors, k)
        tally_6[1] += lane(squares, k)
    tally_6[2] = max(tally_6[2], peak(worst))
    tally_6[3] = max(tally_6[3], peak(most))


@kernel
def decode_rows(codes_RGS: Any, scales_RG: Any, zeros_RG: Any, weights_RGS: Any) -> None:
    """Writes `(code - zero) * scale`, float32, of every code."""
    rows, groups, size = codes_RGS.shape
    for row in range(rows):
        for group in range(groups):
            scale, zero = scales_RG[row, group], np.float32(zeros_RG[row, group])
            for i in range(size):
                weights_RGS[row, group, i] = (np.float32(codes_RGS[row, group, i]) - zero) * scale


@kernel
def decode_rows_to_bfloat16(codes_RGS: Any, scales_RG: Any, zeros_RG: Any, bfloat16_RGS: Any) -> None:
    """Writes `(code - zero) * scale`, float32 rounded to bfloat16 (half to even), of every code."""
    rows, groups, size = codes_RGS.shape
    weight_S = np.empty(size, np.float32)
    bits_S = weight_S.view(np.uint32)
    for row in range(rows):
        for group in range(groups):
            scale, zero = scales_RG[row, group], np.float32(zeros_RG[row, group])
            for i in range(size):
                weight_S[i] = (np.float32(codes_RGS[row, group, i]) - zero) * scale
            if scale - scale != _ZERO:  # rounding the bits of a NaN could carry into its sign
                for i in range(size):
                    upper = np.uint32(bits_S[i] >> np.uint32(16))
                    quiet = np.uint32(0x40 if np.isnan(weight_S[i]) else 0)
                    bfloat16_RGS[row, group, i] = upper | quiet
                continue
            for i in range(size):
                odd = np.uint32(np.uint32(bits_S[i] >> np.uint32(16)) & np.uint32(1))
                bfloat16_RGS[row, group, i] = np.uint32(bits_S[i] + odd + np.uint32(0x7FFF)) >> np.uint32(16)
