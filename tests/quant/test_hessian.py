"""Hessians: their factors, the target shift, and the losses of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qconvert.calibrate.input_sums import InputSums, row_basis
from qconvert.core.statistics import InputHessian
from qconvert.quant.hessian import (
    NotPositiveDefinite,
    factor,
    row_errors,
    target_shift,
)
from qconvert.runtime.storage import DenseWeight


def correlated(width: int, tokens: int, seed: int = 0, rank: int = 8) -> np.ndarray:
    """Inputs [tokens, width] with common factors and columns of unequal size."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, rank)) @ np.random.default_rng(7).standard_normal((rank, width))
    sizes = np.exp(np.random.default_rng(8).standard_normal(width))
    return np.asarray((mixed + rng.standard_normal((tokens, width))) * sizes, np.float32)


def moments(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(x.astype(np.float64).T @ y / len(x), np.float32)


@pytest.mark.parametrize("width", [1, 7, 256, 300, 700])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_factor_gives_back_the_damped_hessian(width, dtype):
    x = correlated(width, 4 * width)
    h_II = moments(x, x)
    order_I, factor_II, used = factor(h_II, 0.01, dtype=dtype)
    assert used == 0.01
    assert sorted(order_I) == list(range(width))
    assert (np.diff(h_II.diagonal()[order_I]) <= 0).all()
    assert factor_II.dtype == np.float32
    m = factor_II.astype(np.float64)
    assert np.array_equal(np.triu(m, 1) + np.eye(width), m)
    damped = h_II.astype(np.float64)[np.ix_(order_I, order_I)]
    damped[np.diag_indices(width)] += 0.01 * h_II.diagonal().mean(dtype=np.float64)
    inverse = np.linalg.inv(m)
    diagonal = inverse @ damped @ inverse.T
    scale = np.sqrt(np.outer(diagonal.diagonal(), diagonal.diagonal()))
    assert np.abs(diagonal / scale - np.eye(width)).max() < (2e-5 if dtype is np.float64 else 2e-3)


def test_equal_columns_keep_their_order():
    order_I, factor_II, _ = factor(np.eye(40, dtype=np.float32))
    assert np.array_equal(order_I, np.arange(40))
    assert np.array_equal(factor_II, np.eye(40))


def test_dead_inputs_are_last_and_alone():
    x = correlated(50, 200)
    x[:, [3, 20]] = 0
    order_I, factor_II, _ = factor(moments(x, x))
    assert list(order_I[-2:]) == [3, 20]
    live = np.setdiff1d(np.arange(50), [3, 20])
    assert np.array_equal(factor(moments(x[:, live], x[:, live]))[1], factor_II[:-2, :-2])
    assert np.array_equal(factor_II[:, -2:], np.eye(50)[:, -2:])
    assert np.array_equal(factor(np.zeros((5, 5), np.float32))[1], np.eye(5))


def test_singular_hessians_are_damped_until_they_have_a_factor():
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    singular = moments(x, x)
    assert factor(singular)[2] == 0.01
    singular -= np.float32(5e-4 * singular.diagonal().mean()) * np.eye(64, dtype=np.float32)
    _, factor_II, used = factor(singular, 1e-5)
    assert used == pytest.approx(1e-3)
    assert np.isfinite(factor_II).all()


@pytest.mark.parametrize("place", [(2, 2), (1, 5)])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_hessian_that_is_not_finite_is_refused(place, number):
    h_II = np.eye(8, dtype=np.float32)
    h_II[place] = h_II[place[::-1]] = number
    with pytest.raises(NotPositiveDefinite):
        factor(h_II)
    with pytest.raises(NotPositiveDefinite):
        target_shift(h_II, np.zeros_like(h_II))


def test_a_hessian_that_is_indefinite_is_refused():
    h_II = np.array([[1, 30], [30, 1]], np.float32)
    with pytest.raises(NotPositiveDefinite, match=r"0\.01"):
        factor(h_II)
    with pytest.raises(NotPositiveDefinite):
        factor(-np.eye(2, dtype=np.float32))


@pytest.mark.parametrize("width", [5, 256, 600])
def test_the_shift_solves_for_the_original_outputs(width):
    x = correlated(width, 6 * width)
    quantized = x + np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * x.std(0) * 0.2
    h_II, mismatch_II = moments(quantized, quantized), moments(x - quantized, quantized)
    shift_II = np.eye(width) + target_shift(h_II, mismatch_II, 0.01, 0.5)
    damped = h_II + 0.01 * h_II.diagonal().mean() * np.eye(width)
    expected = np.eye(width) + 0.5 * mismatch_II @ np.linalg.inv(damped.astype(np.float64))
    assert np.abs(shift_II - expected).max() < 1e-4
    assert not target_shift(h_II, mismatch_II, 0.01, 0.0).any()


def test_the_shift_lowers_the_error_and_leaves_dead_inputs():
    x = correlated(40, 400)
    quantized = x + np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * x.std(0) * 0.3
    quantized[:, 9] = 0
    h_II, mismatch_II = moments(quantized, quantized), moments(x - quantized, quantized)
    shift_II = (np.eye(40) + target_shift(h_II, mismatch_II)).astype(np.float32)
    assert np.array_equal(shift_II[:, 9] == 0, np.arange(40) != 9)
    w_RI = np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32)
    plain = np.square(x @ w_RI.T - quantized @ w_RI.T).mean(0)
    moved = np.square(x @ w_RI.T - quantized @ (w_RI @ shift_II).T).mean(0)
    assert (moved < 0.9 * plain).all()


def test_row_errors_are_those_of_outputs():
    x = correlated(300, 1000)
    rng = np.random.default_rng(3)
    w_RI = rng.standard_normal((37, 300)).astype(np.float32)
    q_RI = np.round(w_RI * 4) / 4
    h_II = moments(x, x)
    errors = row_errors(w_RI, q_RI, h_II)
    np.testing.assert_allclose(errors, np.square((w_RI - q_RI) @ x.T.astype(np.float64)).mean(1), rtol=1e-5)
    cut = [row_errors(w_RI[s], q_RI[s], h_II) for s in (slice(0, 1), slice(1, 30), slice(30, 37))]
    assert np.array_equal(np.concatenate(cut), errors)


def test_the_shift_of_few_rows_is_that_of_a_basis_of_them():
    """Sums of what the rows see of x - x~ move them as sums of all of it do, in a quarter of the numbers."""
    width, tokens = 96, 700
    x = torch.from_numpy(correlated(width, tokens))
    moved = x + 0.2 * x.std(0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    w_OI = torch.randn(24, width, generator=torch.Generator().manual_seed(2))
    basis_IB = row_basis(DenseWeight(w_OI))
    assert basis_IB is not None and basis_IB.shape == (width, 24)
    shifted = []
    for basis in (None, basis_IB):
        sums = InputSums(width, torch.device("cpu"), pairs=True, basis_IB=basis)
        sums.add(moved[:500], x[:500])
        sums.hold(moved[500:], x[500:])
        given = sums.hessian(0.01)
        assert isinstance(given, InputHessian) and given.shift is not None
        shift_II = given.shift.solved_BI
        if given.shift.basis_IB is not None:
            assert shift_II.shape == (24, width)
            shift_II = given.shift.basis_IB @ shift_II
        shifted.append(w_OI.numpy() @ shift_II)
    whole, few = shifted
    scale = float((few * whole).sum() / (whole * whole).sum())  # the shares that are applied may differ
    assert 0.8 < scale < 1.25 and np.abs(whole).max() > 0.01
    assert np.abs(few - scale * whole).max() < 1e-4 * np.abs(whole).max()


def test_many_rows_have_no_basis():
    assert row_basis(DenseWeight(torch.randn(33, 96))) is None
