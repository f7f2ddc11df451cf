"""Error feedback and sweeps: the laws of rounding with a Hessian."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import numpy as np
import pytest

from qconvert.quant.feedback import nearest_codes, round_with_feedback, sweep
from qconvert.quant.hessian import factor, row_errors
from qconvert.quant.point_grid import PointGrid
from tests.support.rounding import LEVELS, rounding_case, rows_of, stored


@pytest.mark.parametrize("levels", LEVELS)
def test_nearest_codes_are_nearest(levels):
    w_RI, _, grid = rounding_case(9, 70, levels)
    codes_RI = nearest_codes(w_RI, grid)
    all_codes = np.arange(len(grid.levels_T), dtype=np.uint8)
    every_TRI = np.stack([stored(grid, np.full_like(codes_RI, code)) for code in all_codes])
    least_RI = np.abs(every_TRI - w_RI).min(axis=0)
    np.testing.assert_allclose(np.abs(stored(grid, codes_RI) - w_RI), least_RI, atol=1e-6)


def test_halves_go_to_even_codes_and_far_numbers_to_the_ends():
    grid = PointGrid(np.arange(-8, 8, dtype=np.float32), np.ones((1, 1), "f"), np.zeros((1, 1), "f"), 8)
    w_RI = np.array([[0.5, 1.5, -0.5, -1.5, 99, -99, np.inf, -np.inf]], np.float32)
    assert (grid.levels_T[nearest_codes(w_RI, grid)] == [[0, 2, 0, -2, 7, -8, 7, -8]]).all()


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("ordered", [True, False])
def test_without_correlations_feedback_is_nearest(levels, ordered):
    w_RI, _, grid = rounding_case(21, 200, levels)
    diagonal_I = np.random.default_rng(1).uniform(0.1, 3, 200).astype(np.float32)
    order_I, factor_II, _ = factor(np.diag(diagonal_I if ordered else np.ones(200, np.float32)))
    assert ordered == (not np.array_equal(order_I, np.arange(200)))
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    assert np.array_equal(codes_RI, nearest_codes(w_RI, grid))
    assert np.array_equal(sweep(w_RI, codes_RI, np.diag(diagonal_I), order_I, grid, 2), codes_RI)


def reference_feedback(w_RI, order_I, factor_II, grid):
    """Formula by formula, in float64."""
    w, m = w_RI[:, order_I].astype(np.float64), factor_II.astype(np.float64)
    groups = order_I // grid.size
    delta, codes = np.zeros_like(w), np.zeros(w.shape, np.uint8)
    for j in range(w.shape[1]):
        points = (
            grid.levels_T[:, None].astype(np.float64) * grid.steps_RG[:, groups[j]]
            + grid.shifts_RG[:, groups[j]]
        )
        codes[:, j] = np.abs(points - (w[:, j] + delta[:, :j] @ m[:j, j])).argmin(0)
        delta[:, j] = w[:, j] - points[codes[:, j], np.arange(len(w))]
    out = np.empty_like(codes)
    out[:, order_I] = codes
    return out


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("width", [1, 7, 130, 530])
def test_feedback_is_the_formula(levels, width):
    w_RI, h_II, grid = rounding_case(37, width, levels)
    order_I, factor_II, _ = factor(h_II)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    expected_RI = reference_feedback(w_RI, order_I, factor_II, grid)
    same_rows = (codes_RI == expected_RI).all(axis=1)  # but for halves, which change all that follows
    assert same_rows.mean() > 0.9


def test_the_terms_of_feedback_add_up_to_the_loss():
    w_RI, h_II, grid = rounding_case(8, 300)
    order_I, factor_II, used = factor(h_II)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    delta = (w_RI - stored(grid, codes_RI))[:, order_I].astype(np.float64)
    damped = h_II.astype(np.float64) + used * h_II.diagonal().mean(dtype=np.float64) * np.eye(300)
    m = factor_II.astype(np.float64)
    inverse = np.linalg.inv(m)
    d = (inverse @ damped[np.ix_(order_I, order_I)] @ inverse.T).diagonal()
    loss = row_errors(w_RI, stored(grid, codes_RI), damped.astype(np.float32))
    np.testing.assert_allclose(np.square(delta @ m) @ d, loss, rtol=1e-5)


@pytest.mark.parametrize("levels", LEVELS)
def test_feedback_beats_nearest_and_sweeps_never_lose(levels):
    w_RI, h_II, grid = rounding_case(40, 256, levels)
    order_I, factor_II, used = factor(h_II)
    damped_II = h_II + np.float32(used * h_II.diagonal().mean()) * np.eye(256, dtype=np.float32)
    codes = [nearest_codes(w_RI, grid), round_with_feedback(w_RI, order_I, factor_II, grid)]
    codes.append(sweep(w_RI, codes[-1], h_II, order_I, grid, 1))
    codes.append(sweep(w_RI, codes[-2], h_II, order_I, grid, 3))
    nearest, feedback, once, thrice = (row_errors(w_RI, stored(grid, c), damped_II) for c in codes)
    assert feedback.sum() < 0.6 * nearest.sum()
    assert (once <= feedback * (1 + 1e-5)).all()
    assert once.sum() < feedback.sum()
    assert (thrice <= once * (1 + 1e-5)).all()
    swept_nearest = sweep(w_RI, codes[0], h_II, order_I, grid, 1)
    assert (row_errors(w_RI, stored(grid, swept_nearest), damped_II) <= nearest * (1 + 1e-5)).all()


def test_a_sweep_is_the_formula():
    w_RI, h_II, grid = rounding_case(12, 150)
    order_I, factor_II, _ = factor(h_II)
    start_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    h = h_II + 0.01 * h_II.diagonal().mean(dtype=np.float64) * np.eye(150)
    expected = start_RI.copy()
    for j in np.tile(order_I, 2):
        q = stored(grid, expected).astype(np.float64)
        gradient = (w_RI - q) @ h[:, j]
        wanted = q.copy()
        wanted[:, j] += gradient / h[j, j]
        expected[:, j] = nearest_codes(wanted.astype(np.float32), grid)[:, j]
    codes_RI = sweep(w_RI, start_RI, h_II, order_I, grid, 2)
    assert (codes_RI != start_RI).any()
    assert (codes_RI == expected).all(axis=1).mean() > 0.9


@pytest.mark.parametrize("levels", ["signed", "table"])
def test_rows_may_be_cut_anywhere(levels):
    w_RI, h_II, grid = rounding_case(200, 300, levels)
    order_I, factor_II, _ = factor(h_II)

    def codes(rows):
        rounded = round_with_feedback(w_RI[rows], order_I, factor_II, rows_of(grid, rows))
        return rounded, sweep(w_RI[rows], rounded, h_II, order_I, rows_of(grid, rows), 2)

    whole = codes(slice(0, 200))
    cuts = [0, 1, 2, 33, 97, 100, 164, 200]
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    with ThreadPoolExecutor(4) as pool:
        cut = list(pool.map(codes, parts))
    for i in range(2):
        assert np.array_equal(np.concatenate([part[i] for part in cut]), whole[i])


def test_processors_without_fused_instructions_choose_the_same_codes(tmp_path):
    w_RI, h_II, grid = rounding_case(33, 140)
    order_I, factor_II, _ = factor(h_II)
    arrays = {
        "w": w_RI,
        "order": order_I,
        "factor": factor_II,
        "steps": grid.steps_RG,
        "shifts": grid.shifts_RG,
    }
    np.savez(tmp_path / "case.npz", levels=grid.levels_T, **arrays)
    script = f"""
import numpy as np
from qconvert.quant.feedback import round_with_feedback
from qconvert.quant.point_grid import PointGrid
case = np.load({str(tmp_path / "case.npz")!r})
grid = PointGrid(case["levels"], case["steps"], case["shifts"], {grid.size})
codes = round_with_feedback(case["w"], case["order"], case["factor"], grid)
np.save({str(tmp_path / "codes.npy")!r}, codes)
"""
    plainest = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=os.environ | plainest, check=True)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    assert np.array_equal(np.load(tmp_path / "codes.npy"), codes_RI)


def test_dead_inputs_are_rounded_to_the_nearest():
    w_RI, h_II, grid = rounding_case(10, 96)
    dead = [4, 50, 95]
    h_II[dead] = h_II[:, dead] = 0
    live = np.setdiff1d(np.arange(96), dead)
    order_I, factor_II, _ = factor(h_II)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    swept_RI = sweep(w_RI, codes_RI, h_II, order_I, grid, 2)
    nearest_RI = nearest_codes(w_RI, grid)
    assert np.array_equal(codes_RI[:, dead], nearest_RI[:, dead])
    assert np.array_equal(swept_RI[:, dead], nearest_RI[:, dead])
    assert not np.array_equal(codes_RI, nearest_RI)
    w_RI[:, dead] += 1.7
    assert np.array_equal(round_with_feedback(w_RI, order_I, factor_II, grid)[:, live], codes_RI[:, live])


@pytest.mark.parametrize("levels", LEVELS)
def test_steps_of_zero_and_below_have_valid_codes(levels):
    w_RI, h_II, grid = rounding_case(20, 96, levels)
    grid.steps_RG[::3] *= -1
    grid.shifts_RG[::3] *= -1
    grid.steps_RG[1::3, 1] = 0
    order_I, factor_II, _ = factor(h_II)
    nearest_RI = nearest_codes(w_RI, grid)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    swept_RI = sweep(w_RI, codes_RI, h_II, order_I, grid, 2)
    middle = np.abs(grid.levels_T).argmin()
    for codes in (nearest_RI, codes_RI, swept_RI):
        assert (codes < len(grid.levels_T)).all()
        assert (codes[1::3, 32:64] == middle).all()
    flipped = PointGrid(grid.levels_T, grid.steps_RG[::3], grid.shifts_RG[::3], 32)
    error = np.abs(stored(flipped, nearest_RI[::3]) - w_RI[::3])
    assert error.mean() < 0.3 * np.abs(w_RI[::3]).mean()
    losses = [row_errors(w_RI, stored(grid, c), h_II).sum() for c in (nearest_RI, codes_RI, swept_RI)]
    assert losses[0] > losses[1] > losses[2]


def test_weights_that_are_not_finite_spoil_no_other():
    w_RI, h_II, grid = rounding_case(40, 64)
    order_I, factor_II, _ = factor(h_II)
    codes_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    w_RI[7, 3], w_RI[9, 60] = np.nan, np.inf
    spoilt_RI = round_with_feedback(w_RI, order_I, factor_II, grid)
    swept_RI = sweep(w_RI, spoilt_RI, h_II, order_I, grid, 1)
    others = np.setdiff1d(np.arange(40), [7, 9])
    assert np.array_equal(spoilt_RI[others], codes_RI[others])
    for codes in (spoilt_RI, swept_RI):
        assert (codes < 8).all()
        assert codes[9, 60] == 7
        delta = np.where(np.isfinite(w_RI), w_RI - stored(grid, codes), 0)
        assert np.abs(delta[[7, 9]]).max() < 4


@pytest.mark.parametrize("width", [2, 4, 6])
def test_brute_force_confirms_the_bound_of_feedback(width):
    """Babai: every term of the loss is at most D_j (step / 2)^2 where nothing is clipped."""
    rng = np.random.default_rng(width)
    grid = PointGrid(np.arange(-1, 3, dtype=np.float32), np.ones((1, 1), "f"), np.zeros((1, 1), "f"), 8)
    every = np.array(list(product(range(4), repeat=width)), np.uint8)
    losses = np.zeros(3)
    for _ in range(60):
        x = rng.standard_normal((3 * width, width)) @ rng.standard_normal((width, width))
        h = x.T @ x
        w_RI = rng.uniform(-0.5, 1.5, (1, width)).astype(np.float32)
        order_I, factor_II, _ = factor(h, 1e-9)
        m = factor_II.astype(np.float64)
        inverse = np.linalg.inv(m)
        d = (inverse @ h[np.ix_(order_I, order_I)] @ inverse.T).diagonal()
        best = min(delta @ h @ delta for delta in (w_RI[0] - (every.astype(np.float64) - 1)))
        found = []
        for codes_RI in (round_with_feedback(w_RI, order_I, factor_II, grid), nearest_codes(w_RI, grid)):
            delta = w_RI[0].astype(np.float64) - (codes_RI[0].astype(np.float64) - 1)
            found.append(delta @ h @ delta)
            if len(found) == 1 and not np.isin(codes_RI, (0, 3)).any():
                assert found[0] <= d.sum() / 4 * (1 + 1e-5)
        assert found[0] >= best * (1 - 1e-6)
        losses += found[0], found[1], best
    assert losses[2] <= losses[0] <= losses[1]
