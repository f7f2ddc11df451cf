"""What sums of inputs and samples of rows say that errors of weights cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qconvert.calibrate.measure_sensitivity import SecondMomentSums
from qconvert.calibrate.row_samples import RowSampler
from qconvert.calibrate.sensitivity import (
    Change,
    RowSamples,
    SecondMoments,
    Sensitivity,
    word_frequencies,
)
from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.observers import InputKey


def test_the_cost_is_the_quadratic_form() -> None:
    draw = np.random.default_rng(0)
    x_NI, delta_RI = (draw.standard_normal((rows, 6)).astype(np.float32) for rows in (40, 3))
    squares_R = np.array([1.0, 0.25, 4.0], np.float32)
    sums = SecondMomentSums()
    sums(InputKey(("mlp.gate", "mlp.up"), 2), torch.from_numpy(x_NI[:15]))
    sums(InputKey(("mlp.gate", "mlp.up"), 2), torch.from_numpy(x_NI[15:]))
    found = Sensitivity(2, {}, sums.moments())
    outputs_NR = x_NI @ delta_RI.T
    want = (np.square(outputs_NR).mean(0) * squares_R).sum() / 2
    assert found.cost(delta_RI, squares_R, "mlp.up") == pytest.approx(want, rel=1e-5)
    light = replace(found, inputs={"mlp.up": SecondMoments(found.inputs["mlp.up"].second_moments_I)})
    diagonal = (np.square(delta_RI) @ np.square(x_NI).mean(0) * squares_R).sum() / 2
    assert light.cost(delta_RI, squares_R, "mlp.up") == pytest.approx(diagonal, rel=1e-5)


def test_a_hessian_without_room_is_its_diagonal_and_experts_share_one() -> None:
    draw, sums = np.random.default_rng(0), SecondMomentSums(most_bytes=4 * 6 * 6)
    x_NI = torch.from_numpy(draw.standard_normal((8, 6)).astype(np.float32))
    sums(InputKey(("mlp.experts.down",), 0, 3), x_NI[:2])
    sums(InputKey(("mlp.experts.down",), 0, 5), x_NI[2:])
    sums(InputKey(("attn.o",), 0), x_NI)
    found = sums.moments()
    assert found["mlp.experts.down"].hessian_II is not None and found["attn.o"].hessian_II is None
    for each in found.values():
        np.testing.assert_allclose(each.second_moments_I, x_NI.square().mean(0), rtol=1e-5)


def test_rows_that_are_held_out_are_in_no_sum_and_price_errors() -> None:
    draw = np.random.default_rng(0)
    x_NI = draw.standard_normal((64, 6)).astype(np.float32)
    sums = SecondMomentSums(sampler=RowSampler(8), holds=True)
    for batch in np.split(x_NI, 2):
        sums(InputKey(("attn.o",), 0), torch.from_numpy(batch))
    found = sums.moments()["attn.o"]
    assert found.held_NI is not None and found.hessian_II is not None
    held_N = (x_NI[:, None] == found.held_NI).all(-1).any(1)
    assert held_N.reshape(8, 8).sum(1).tolist() == [1] * 8  # one of every eight, wherever it is
    kept_NI = x_NI[~held_N]
    np.testing.assert_allclose(found.hessian_II, kept_NI.T @ kept_NI / 56, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.second_moments_I, np.square(kept_NI).mean(0), rtol=1e-5)
    delta_RI = draw.standard_normal((3, 6)).astype(np.float32)
    want_R = np.square(found.held_NI @ delta_RI.T).mean(0)
    np.testing.assert_allclose(found.row_errors(delta_RI), want_R, rtol=1e-5)


def sampled(rows: int, every: int) -> tuple[RowSamples, np.ndarray, np.ndarray]:
    """Samples of a linear of 6 columns and 5 rows, and all the rows that they are of."""
    draw, sampler = np.random.default_rng(1), RowSampler(every)
    x_NI, g_NO = (draw.standard_normal((rows, width)).astype(np.float32) for width in (6, 5))
    for batch in (slice(0, 24), slice(24, rows)):
        sampler.take(InputKey(("attn.q", "attn.k"), 3), torch.from_numpy(x_NI[batch]))
        sampler(StatisticsKey("attn.k", 3), torch.from_numpy(g_NO[batch]))
    return sampler.samples(3, rows)[StatisticsKey("attn.k", 3)], x_NI, g_NO


def test_errors_of_rows_that_go_together_count_together() -> None:
    samples, x_NI, g_NO = sampled(64, 1)
    delta_RI = np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32)
    row_R = np.array([4, 0, 1])
    key, squares_R = StatisticsKey("attn.k", 3), np.ones(3, np.float32)
    found = Sensitivity(3, {}, {}, {key: samples})
    want_N = np.einsum("ni,ri,nr->n", x_NI.astype(float), delta_RI, g_NO[:, row_R])
    change = found.change(key, delta_RI, row_R, squares_R)
    assert change.cost == pytest.approx(np.square(want_N).mean() / 2, rel=1e-5)
    parts = [found.change(key, delta_RI[r : r + 1], row_R[r : r + 1], squares_R[:1]) for r in range(3)]
    assert sum(parts, Change()).cost == pytest.approx(change.cost, rel=1e-5)  # not the sum of their costs
    assert sum(part.cost for part in parts) != pytest.approx(change.cost, rel=1e-2)
    assert Change(unsampled=2.5).cost == 2.5


def test_a_sample_is_the_same_token_at_every_input_and_stands_for_many() -> None:
    samples, x_NI, g_NO = sampled(64, 4)
    at_N = [int((x_NI == row_I).all(1).argmax()) for row_I in samples.x_NI]
    assert [number // 4 for number in at_N] == list(range(16)) and len({n % 4 for n in at_N}) > 1
    np.testing.assert_array_equal(samples.g_NO, g_NO[at_N])
    assert samples.weight == 4 / 64


def test_some_rows_stand_for_all_without_bias() -> None:
    """Over all choices of one row of three, the mean is the cost of all rows."""
    samples, _, _ = sampled(64, 1)
    key, draw = StatisticsKey("attn.k", 3), np.random.default_rng(3)
    found = Sensitivity(3, {}, {}, {key: samples})
    delta_RI = draw.standard_normal((5, 6)).astype(np.float32) + 1
    whole = found.change(key, delta_RI, np.arange(5), np.ones(5, np.float32)).cost
    # Each row drawn or not, all by itself, with a chance of 1 / 2: 32 subsets, each as likely.
    subsets = [np.array([r for r in range(5) if bits >> r & 1], np.int64) for bits in range(32)]
    changes = [found.change(key, delta_RI[R], R, np.ones(len(R), np.float32), 2.0) for R in subsets]
    squares = [sum(w * m @ m / 2 for m, w in c.moved.values()) - c.surplus for c in changes]
    assert np.mean(squares) == pytest.approx(whole, rel=1e-5)


def test_words_that_were_not_there_are_expected_as_often_as_words_that_were_there_once() -> None:
    found = word_frequencies(np.array([5, 1, 1, 0, 0, 3]))
    assert found.sum() == pytest.approx(1) and found[3] == found[4] == pytest.approx(2 / 6 / 12)
    assert found[0] == pytest.approx((5 + 2 / 6) / 12)
