"""Searches the scale of least error of a block, as ggml-quants.c does, sixteen blocks at a time.

A tile is a flat float32 array [elements, lanes]: element e of the block in lane k is `tile[16 * e + k]`.
Every search takes a tile `x` of numbers and a tile `w` of weights, fills the tile `codes` with the chosen
codes, and returns the scales as lanes. Each lane's float32 operations are those of the C function named, in
its order; that is what makes the codes equal to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    clamp,
    load,
    mask_bits,
    nearest,
    routine,
    splat,
    store,
    where,
)

ZERO = np.float32(0)
_ONE = np.float32(1)
_INFINITY = np.float32(np.inf)
NOTHING = np.float32(1e-15)  # GROUP_MAX_EPS: a block without a larger number is all zero


def affine_trials(top: int, low: float, step: float, last: int) -> Any:
    """Returns the trial scales of `fit_affine`, in units of 1 / (max - min): `top + low` and up by steps."""
    steps = np.float32(low) + np.float32(step) * np.arange(last + 1, dtype=np.float32)
    return steps + np.float32(top)


def symmetric_trials(half: int) -> Any:
    """Returns the trial scales of `fit_symmetric`, in units of 1 / peak: -half first, then its neighbours."""
    around = np.array([0, *range(-9, 0), *range(1, 10)], np.float32)
    return -(np.float32(half) + np.float32(0.1) * around)


def nonnegative_trials(top: int) -> Any:
    """Returns the trial scales of `fit_nonnegative`, in units of 1 / max: `top`, then its neighbours."""
    around = np.array([0, *range(-4, 0), *range(1, 5)], np.float32)
    return np.float32(0.1) * around + np.float32(top)


@routine
def fit_affine(
    x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, top: np.float32, trials: np.ndarray, l1: bool
) -> Any:
    """Fits codes 0 to `top` of `w = scale * code + low`, low at most 0; returns (scale, low) as lanes.

    Minimises the weighted squared error, or absolute error with `l1`. Source: make_qkx2_quants and
    make_qkx3_quants, which return -low. The next trials start from the `low` of the best fit.
    """
    low, high, sum_w, sum_wx = _moments(x, w, n)
    flat = high == low
    spread = top / (high - low)
    scale = _ONE / spread
    best_low, best_spread = low, spread
    least = _starting_error(x, w, n, top, spread, low, l1)
    for trial in trials:
        spread = trial / (high - low)
        sum_wq, sum_wqq, sum_wqx = _coded_sums(x, w, codes, n, top, spread, low)
        determinant = sum_w * sum_wqq - sum_wq * sum_wq
        slope = (sum_w * sum_wqx - sum_wx * sum_wq) / determinant
        start = (sum_wqq * sum_wx - sum_wq * sum_wqx) / determinant
        slope = where(start > ZERO, sum_wqx / sum_wqq, slope)
        start = where(start > ZERO, splat(ZERO), start)
        error = _error(x, w, codes, n, slope, start, l1)
        better = (error < least) & (determinant > ZERO)
        least = where(better, error, least)
        scale = where(better, slope, scale)
        best_low, best_spread = where(better, low, best_low), where(better, spread, best_spread)
        low = where(better, start, low)
    best_spread = where(flat, splat(ZERO), best_spread)
    for at in range(0, n * LANES, LANES):
        store(codes, at, clamp(nearest(best_spread * (load(x, at) - best_low)), ZERO, top))
    return where(flat, splat(ZERO), scale), where(flat, best_low, low)


@routine
def _moments(x: np.ndarray, w: np.ndarray, n: int) -> Any:
    low = high = load(x, 0)
    sum_w = load(w, 0)
    sum_wx = sum_w * low
    for at in range(LANES, n * LANES, LANES):
        value, weight = load(x, at), load(w, at)
        low, high = where(value < low, value, low), where(value > high, value, high)
        sum_w = sum_w + weight
        sum_wx = sum_wx + weight * value
    return where(low > ZERO, splat(ZERO), low), high, sum_w, sum_wx


@routine
def _coded_sums(
    x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, top: np.float32, spread: Any, low: Any
) -> Any:
    sum_wq, sum_wqq, sum_wqx = splat(ZERO), splat(ZERO), splat(ZERO)
    for at in range(0, n * LANES, LANES):
        value = load(x, at)
        code = clamp(nearest(spread * (value - low)), ZERO, top)
        store(codes, at, code)
        wq = load(w, at) * code
        sum_wq = sum_wq + wq
        sum_wqq = sum_wqq + wq * code
        sum_wqx = sum_wqx + wq * value
    return sum_wq, sum_wqq, sum_wqx


@routine
def _starting_error(
    x: np.ndarray, w: np.ndarray, n: int, top: np.float32, spread: Any, low: Any, l1: bool
) -> Any:
    scale = _ONE / spread
    error = splat(ZERO)
    for at in range(0, n * LANES, LANES):
        value = load(x, at)
        code = clamp(nearest(spread * (value - low)), ZERO, top)
        error = error + load(w, at) * _loss(scale * code + low - value, l1)
    return error


@routine
def _error(x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, scale: Any, low: Any, l1: bool) -> Any:
    error = splat(ZERO)
    for at in range(0, n * LANES, LANES):
        error = error + load(w, at) * _loss(scale * load(codes, at) + low - load(x, at), l1)
    return error


@routine
def _loss(difference: Any, l1: bool) -> Any:
    return absolute(difference) if l1 else difference * difference


@routine
def peaks(x: np.ndarray, n: int) -> Any:
    """Returns the largest magnitude in every lane, and the first number that has it."""
    size, value = splat(ZERO), splat(ZERO)
    for at in range(0, n * LANES, LANES):
        candidate = load(x, at)
        larger = absolute(candidate) > size
        size, value = where(larger, absolute(candidate), size), where(larger, candidate, value)
    return size, value


@routine
def fit_symmetric(
    x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, half: np.float32, trials: np.ndarray
) -> Any:
    """Fits codes 0 to 2 * half - 1 of `w = scale * (code - half)`; returns the scale as lanes.

    Maximises the weighted correlation. An all-zero block has scale 0 and codes 0 (not half). Source:
    make_qx_quants with rmse_type 1.
    """
    size, peak = peaks(x, n)
    spread = best_spread = scale = best = splat(ZERO)
    for number, trial in enumerate(trials):
        spread = trial / peak
        sum_wxq, sum_wqq = splat(ZERO), splat(ZERO)
        for at in range(0, n * LANES, LANES):
            value, weight = load(x, at), load(w, at)
            code = clamp(nearest(spread * value), -half, half - _ONE)
            sum_wxq = sum_wxq + weight * value * code
            sum_wqq = sum_wqq + weight * code * code
        if number == 0:
            scale = where(sum_wqq == ZERO, splat(ZERO), sum_wxq / sum_wqq)
            best, best_spread = scale * sum_wxq, spread
        better = (sum_wqq > ZERO) & (sum_wxq * sum_wxq > best * sum_wqq)
        scale = where(better, sum_wxq / sum_wqq, scale)
        best = where(better, scale * sum_wxq, best)
        best_spread = where(better, spread, best_spread)
    nothing = size < NOTHING
    for at in range(0, n * LANES, LANES):
        code = clamp(nearest(best_spread * load(x, at)), -half, half - _ONE) + half
        store(codes, at, where(nothing, splat(ZERO), code))
    return where(nothing, splat(ZERO), scale)


@routine
def fit_nonnegative(
    x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, top: np.float32, trials: np.ndarray
) -> Any:
    """Fits codes 0 to `top` of `w = scale * code`, for scales and minimums; returns the scale as lanes.

    `codes` is a tile of bytes: a negative scale, which a search may return, has the code of C's uint8_t.
    Source: make_qp_quants.
    """
    high = splat(ZERO)
    for at in range(0, n * LANES, LANES):
        value = load(x, at)
        high = where(high > value, high, value)
    best_spread = top / high
    least = splat(ZERO)
    for number, trial in enumerate(trials):
        spread = trial / high
        scale = _ONE / spread
        error = splat(ZERO)
        for at in range(0, n * LANES, LANES):
            code = nearest(spread * load(x, at))
            store(codes, at, code)
            code = load(codes, at) if number == 0 else where(code < top, code, splat(top))
            difference = load(x, at) - scale * code
            error = error + load(w, at) * difference * difference
        better = error < least
        least = error if number == 0 else where(better, error, least)
        best_spread = where(better, spread, best_spread)
    sum_wxq, sum_wqq = splat(ZERO), splat(ZERO)
    for at in range(0, n * LANES, LANES):
        code = nearest(best_spread * load(x, at))
        code = where(code < top, code, splat(top))
        store(codes, at, code)
        sum_wxq = sum_wxq + load(w, at) * load(x, at) * code
        sum_wqq = sum_wqq + load(w, at) * code * code
    scale = descend(x, w, codes, n, -_INFINITY, top, sum_wxq, sum_wqq, True)
    nothing = high < NOTHING
    for at in range(0, n * LANES, LANES):
        store(codes, at, where(nothing, splat(ZERO), load(codes, at)))
    return where(nothing, splat(ZERO), scale)


@routine
def fit_by_descent(x: np.ndarray, w: np.ndarray, codes: np.ndarray, n: int, half: np.float32) -> Any:
    """Fits as `fit_symmetric`, but from one starting scale and by changing one code at a time.

    Source: make_q3_quants.
    """
    size, peak = peaks(x, n)
    spread = -half / peak
    sum_wxq, sum_wqq = splat(ZERO), splat(ZERO)
    for at in range(0, n * LANES, LANES):
        code = clamp(nearest(spread * load(x, at)), -half, half - _ONE)
        store(codes, at, code)
        sum_wxq = sum_wxq + load(w, at) * load(x, at) * code
        sum_wqq = sum_wqq + load(w, at) * code * code
    scale = descend(x, w, codes, n, -half, half - _ONE, sum_wxq, sum_wqq, False)
    nothing = size < NOTHING
    for at in range(0, n * LANES, LANES):
        store(codes, at, where(nothing, splat(ZERO), load(codes, at) + half))
    return where(nothing, splat(ZERO), scale)


@routine
def descend(
    x: np.ndarray,
    w: np.ndarray,
    codes: np.ndarray,
    n: int,
    low: np.float32,
    high: np.float32,
    sum_wxq: Any,
    sum_wqq: Any,
    strict: bool,
) -> Any:
    """Sweeps coordinate descent over the codes up to five times; returns the least-squares scale as lanes.

    A code becomes the best one for the scale of all other codes when that raises the correlation. With
    `strict` the other codes must not all be zero. Source: the loops that end make_q3_quants and
    make_qp_quants; they stop at the first sweep that changes nothing, which further ones would not.
    """
    for _ in range(5):
        changed = False
        for at in range(0, n * LANES, LANES):
            value, weight, code = load(x, at), load(w, at), load(codes, at)
            wxq = sum_wxq - weight * value * code
            wqq = sum_wqq - weight * code * code
            allowed = wxq > ZERO
            if strict:
                allowed = allowed & (wqq > ZERO)
            new = clamp(nearest(value * wqq / wxq), low, high)
            wxq = wxq + weight * value * new
            wqq = wqq + weight * new * new
            better = allowed & (new != code) & (wqq > ZERO)
            better = better & (wxq * wxq * sum_wqq > sum_wxq * sum_wxq * wqq)
            store(codes, at, where(better, new, code))
            sum_wxq, sum_wqq = where(better, wxq, sum_wxq), where(better, wqq, sum_wqq)
            changed = changed or mask_bits(better) != 0
        if not changed:
            break
    return where(sum_wqq > ZERO, sum_wxq / sum_wqq, splat(ZERO))
