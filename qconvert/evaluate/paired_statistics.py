"""Computes estimates with standard errors for models scored on the same tokens.

Tokens of one chunk are correlated, so every standard error here is clustered by chunk. Comparing a
model with its reference token by token removes the spread of the text itself: the error of a
perplexity ratio comes out 20 to 70 times smaller than that of either perplexity. Pure numpy.
Legend: N tokens, C chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

_BODY = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80)
CURVE_PERCENTILES = (*_BODY, 85, 90, 93, 95, 97, 98, 99, 99.5, 99.8, 99.9, 99.95, 100)
"""Denser towards the tail, where quantizations differ."""
_ROUNDING = 4 * float(np.finfo(np.float64).eps)
"""The most, relative to the largest number, that rounding the sums of chunks adds to a standard error."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its standard error, None where one chunk leaves no spread to judge by."""

    value: float
    se: float | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mean and upper tail of a per-token KL divergence, in nats.

    `curve` holds the percentiles of CURVE_PERCENTILES, for drawing.
    """

    mean: Estimate
    median: float
    p90: float
    p99: float
    p999: float
    max: float
    curve: tuple[float, ...]


def mean(x_N: Array, chunk_N: Array) -> Estimate:
    """The mean over tokens, its error clustered by chunk.

    SE = sqrt(C / (C - 1) * sum over chunks of (sum over its tokens of (x - mean))^2) / N, the
    cluster-robust (sandwich) variance of a mean with the usual small-sample factor. Chunks with the same
    sum leave the rounding of these sums, which is no error: it becomes 0.
    """
    value = float(x_N.mean())
    _, chunk_N = np.unique(chunk_N, return_inverse=True)
    excess_C = np.bincount(chunk_N, weights=x_N - value)
    chunks = len(excess_C)
    if chunks < 2:
        return Estimate(value, None)
    se = math.sqrt(chunks / (chunks - 1) * float(excess_C @ excess_C)) / len(x_N)
    return Estimate(value, se if se > _ROUNDING * float(np.abs(x_N).max()) else 0.0)


def exp_mean(x_N: Array, chunk_N: Array) -> Estimate:
    """exp of the mean, by the delta method: a perplexity of losses, a ratio of loss differences."""
    log = mean(x_N, chunk_N)
    value = math.exp(log.value)
    return Estimate(value, None if log.se is None else value * log.se)


def root_mean_square(x_N: Array, chunk_N: Array) -> Estimate:
    """sqrt of the mean square, by the delta method: SE(rms) = SE(mean square) / (2 rms)."""
    square = mean(x_N**2, chunk_N)
    value = math.sqrt(square.value)
    return Estimate(value, None if square.se is None or value == 0 else square.se / (2 * value))


def divergence(kl_N: Array, chunk_N: Array) -> Divergence:
    """Summarise per-token divergences; percentiles interpolate linearly."""
    median, p90, p99, p999, top = (float(q) for q in np.percentile(kl_N, (50, 90, 99, 99.9, 100)))
    curve = tuple(float(q) for q in np.percentile(kl_N, CURVE_PERCENTILES))
    return Divergence(mean(kl_N, chunk_N), median, p90, p99, p999, top, curve)
