"""Searches the scale and zero point of least error for a group: two rounds of sixteen candidates in SIMD.

The first round tries a ladder of scales downwards from just above the one that clips nothing, and fits each
by least squares to the codes it leads to. The second tries stored scales around the best of them. Lanes are
candidates, not columns: a candidate's sums run in column order whatever the group size and the processor, so
every machine finds the same scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.group_scales import stored_scale
from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    clamp,
    first,
    lane,
    load,
    lowest,
    rounded_even,
    routine,
    splat,
    store,
    where,
)

# Ladders start at 1.05 times the scale that clips nothing and end at these fractions of it. All have sixteen
# scales in geometric progression, so a ladder that ends early is finer.
_TOP = 1.05
_ENDS = np.array([0.7, 0.5, 0.35, 0.25, 0.15])
_RATIOS = (_ENDS / _TOP) ** (1 / (LANES - 1))
_LADDERS = (_TOP * _RATIOS[:, None] ** np.arange(LANES)).astype(np.float32).ravel()
# Neighbours of a scale reach to the next one of the ladder on both sides, densest around it (lane 8).
_AWAY = np.arange(LANES) / 8 - 1
_NEIGHBOURS = (1 + (1 - _RATIOS[:, None]) * np.sign(_AWAY) * _AWAY**2).astype(np.float32).ravel()
# The step of the best uniform quantizer of a normal distribution of unit variance, by bits (J. Max,
# "Quantizing for minimum distortion", 1960, for 2 to 5). Heavier tails need longer steps; no trained weight
# was seen to need less than three quarters of these.
_NORMAL_STEP = np.array([0, 0, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308])
_SHORTEST = (0.75 * _NORMAL_STEP).astype(np.float32)
# Least squares moves a scale further only where nearly all codes are zero; another scale is better there.
_MOST_SHIFT = np.float32(0.5)

_ZERO, _ONE, _TWO, _INFINITE = np.float32(0), np.float32(1), np.float32(2), np.float32(np.inf)


class Scratch(NamedTuple):
    """Working memory of a search: the rescaled numbers of a group, and the scales of the second round."""

    numbers_P: np.ndarray
    scales: np.ndarray


@routine
def make_scratch(padded: Any) -> Any:
    """Returns scratch memory for groups of this many numbers."""
    return Scratch(np.empty(padded, np.float32), np.empty(LANES, np.float32))


@routine
def best_scale(
    w_P: Any, size: Any, importance_P: Any, span: Any, plain: Any, zeros: Any, spec: Any, scratch: Any
) -> Any:
    """Returns the scale and zero point of the least squared error found for a group, weighted by importance.

    `w_P` and its `importance_P` hold `size` float32 numbers, zero-padded to whole lanes; `span` is the
    minimum and the maximum, 0 included; `plain` is a stored scale of the right size, the unit of all
    arithmetic, so that nothing overflows; `zeros` are the first and the last zero point to try. Where errors
    are still not finite, returns `plain` and the first zero point.
    """
    numbers_P, unit = scratch.numbers_P, _ONE / plain
    energy = _rescale(w_P, importance_P, unit, numbers_P)
    shortest = _SHORTEST[spec.bits] * np.float32(np.sqrt(energy / np.float32(size)))
    middle, ladder, zero, least = _ONE, 0, zeros[0], _INFINITE
    for tried in range(int(zeros[0]), int(zeros[1]) + 1):
        z = np.float32(tried)
        cover = _covering_scale(span, z, spec) * unit
        ladder_of_zero = _ladder(shortest / cover, spec)
        scales = load(_LADDERS, ladder_of_zero * LANES) * cover
        errors, fitted = _fit(scales, numbers_P, importance_P, size, z, spec, energy)
        k = _least(errors)
        if lane(errors, k) < least:
            least, middle, ladder, zero = lane(errors, k), lane(fitted, k), ladder_of_zero, z
    for k in range(LANES):
        scratch.scales[k] = stored_scale(_NEIGHBOURS[ladder * LANES + k] * middle * plain, spec)
    scales = load(scratch.scales, 0) * unit
    squares, _ = _try(_ONE / scales, numbers_P, importance_P, size, zero, spec)
    errors = scales * scales * squares
    k = _least(errors)
    if lane(errors, k) < _INFINITE:
        return scratch.scales[k], zero
    return plain, zero


@routine
def _rescale(w_P: Any, importance_P: Any, factor: Any, numbers_P: Any) -> Any:
    """Writes w * factor to `numbers_P`; returns the weighted sum of their squares."""
    sums = splat(_ZERO)
    for i in range(0, w_P.size, LANES):
        number = load(w_P, i) * factor
        store(numbers_P, i, number)
        sums = sums + load(importance_P, i) * number * number
    total = _ZERO
    for k in range(LANES // 2):
        total += lane(sums, k) + lane(sums, k + LANES // 2)
    return total


@routine
def _covering_scale(span: Any, zero: Any, spec: Any) -> Any:
    """Returns the smallest scale whose codes reach both ends of the span; an end without codes is ignored."""
    above = spec.top - zero
    scale = _ZERO
    if above > _ZERO:
        scale = span[1] / above
    if zero > _ZERO:
        scale = max(scale, -span[0] / zero)
    return scale


@routine
def _ladder(shortest: Any, spec: Any) -> Any:
    """Returns the finest ladder that goes down to `shortest` (in units of the covering scale).

    With more codes less is won by clipping: at 7 bits no more than the first ladder covers.
    """
    ladder = 0
    for end in range(_ENDS.size - 1):
        ladder += _ENDS[end] > shortest
    return min(ladder, max(0, 7 - spec.bits))


@routine
def _fit(scales: Any, numbers_P: Any, importance_P: Any, size: Any, zero: Any, spec: Any, energy: Any) -> Any:
    """Returns the errors of the scales, each fitted to the codes it leads to, and the fitted scales.

    With t = w / scale, code q and e = t - q, the scale (1 + d) * scale has the error scale^2 * (sum e^2 - 2 d
    sum e q + d^2 sum q^2), least for d = sum e q / sum q^2.
    """
    inverse = _ONE / scales
    squares, products = _try(inverse, numbers_P, importance_P, size, zero, spec)
    # sum t^2 = sum q^2 + 2 sum e q + sum e^2 saves a third sum.
    codes = energy * inverse * inverse - _TWO * products - squares
    shift = clamp(products / codes, -_MOST_SHIFT, _MOST_SHIFT)
    errors = scales * scales * (squares - shift * (_TWO * products - shift * codes))
    return errors, scales * (shift + _ONE)


@routine
def _try(inverse: Any, numbers_P: Any, importance_P: Any, size: Any, zero: Any, spec: Any) -> Any:
    """Returns the weighted sums of e^2 and e q (see `_fit`) for the inverses of sixteen scales."""
    low, high = -zero, spec.top - zero
    squares = products = splat(_ZERO)
    for i in range(size):
        t = numbers_P[i] * inverse
        q = rounded_even(clamp(t, low, high))
        e = t - q
        weighted = importance_P[i] * e
        squares = squares + weighted * e
        products = products + weighted * q
    return squares, products


@routine
def _least(errors: Any) -> Any:
    """Returns the lane of the smallest finite error; any lane when there is none."""
    finite = where(absolute(errors) < _INFINITE, errors, splat(_INFINITE))
    return first(finite == splat(lowest(finite)))
