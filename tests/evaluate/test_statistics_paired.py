"""Estimates against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qconvert.evaluate.paired_statistics import divergence, exp_mean, mean, root_mean_square
from qconvert.report.page import number

RNG = np.random.default_rng(5)
X = RNG.normal(1.0, 0.3, 60)


def test_one_token_per_chunk_gives_the_textbook_error() -> None:
    estimate = mean(X, np.arange(60))
    assert estimate.value == pytest.approx(X.mean())
    assert estimate.se == pytest.approx(X.std(ddof=1) / math.sqrt(60))


def test_equal_chunks_give_the_error_of_their_means() -> None:
    chunks = np.repeat(np.arange(12), 5)
    means = X.reshape(12, 5).mean(1)
    assert mean(X, chunks).se == pytest.approx(means.std(ddof=1) / math.sqrt(12))


def test_repeating_tokens_within_their_chunk_adds_no_certainty() -> None:
    once = mean(X, np.arange(60))
    twice = mean(np.repeat(X, 2), np.repeat(np.arange(60), 2))
    assert twice.se == pytest.approx(once.se)
    assert mean(np.repeat(X, 2), np.arange(120)).se < 0.72 * once.se


def test_chunk_numbers_are_only_names() -> None:
    chunks = np.repeat([7, 3, 1000], 20)
    assert mean(X, chunks).se == pytest.approx(mean(X, np.repeat([0, 1, 2], 20)).se)


def test_one_chunk_has_no_error() -> None:
    for estimate in (mean, exp_mean, root_mean_square):
        assert estimate(X, np.zeros(60, int)).se is None


def test_equal_chunks_have_no_error_from_rounding() -> None:
    agrees_T = np.random.default_rng(0).permutation([1.0] * 1948 + [0.0] * 99)
    estimate = mean(np.concatenate([agrees_T, agrees_T[::-1]]), np.repeat([0, 1], 2047))
    assert estimate.se == 0.0
    assert number(100 * estimate.value, estimate.se) == "95.164"


def test_exp_mean_is_the_delta_method() -> None:
    log, estimate = mean(X, np.arange(60)), exp_mean(X, np.arange(60))
    assert estimate.value == pytest.approx(math.exp(X.mean()))
    assert estimate.se == pytest.approx(estimate.value * log.se)


def test_pairing_cancels_what_the_texts_share() -> None:
    chunks = np.arange(60)
    harder = X + RNG.normal(0.02, 0.001, 60)
    ratio = exp_mean(harder - X, chunks)
    assert ratio.value == pytest.approx(math.exp(0.02), abs=1e-3)
    assert ratio.se < exp_mean(X, chunks).se / 100


def test_root_mean_square() -> None:
    alternating = np.tile([0.5, -0.5], 30)
    assert root_mean_square(alternating, np.arange(60)).value == 0.5
    assert root_mean_square(alternating, np.arange(60)).se == pytest.approx(0, abs=1e-9)
    assert root_mean_square(np.zeros(60), np.arange(60)).se is None
    square = mean(X**2, np.arange(60))
    assert root_mean_square(X, np.arange(60)).se == pytest.approx(0.5 * square.se / math.sqrt(square.value))


def test_divergence_percentiles() -> None:
    kl = divergence(RNG.permutation(np.arange(1001.0)), np.arange(1001))
    assert (kl.median, kl.p90, kl.p99, kl.p999, kl.max) == pytest.approx((500, 900, 990, 999, 1000))
    assert kl.mean.value == 500
