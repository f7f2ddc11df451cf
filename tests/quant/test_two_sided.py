"""Two-sided rounding: its formula, and what it is where rows do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest

from qconvert.quant.feedback import nearest_codes, round_with_feedback
from qconvert.quant.hessian import factor
from qconvert.quant.point_grid import PointGrid
from qconvert.quant.two_sided import factor_row_blocks, round_row_blocks, round_two_sided
from tests.support.rounding import LEVELS, rounding_case, rows_of, stored


def output_hessian(rows: int, seed: int = 3) -> np.ndarray:
    """Second moments of correlated gradients of outputs."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((3 * rows, 4)) @ rng.standard_normal((4, rows))
    g += rng.standard_normal(g.shape)
    return np.asarray(g.T @ g / len(g) * np.exp(rng.standard_normal()), np.float32)


def loss(w_NI, grid, codes_NI, h_II, h_NN):
    delta = w_NI.astype(np.float64) - stored(grid, codes_NI)
    return np.sum(h_NN * (delta @ h_II @ delta.T))


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("rows,width", [(1, 1), (5, 33), (150, 200)])
def test_equal_outputs_make_it_feedback(levels, rows, width):
    w_NI, h_II, grid = rounding_case(rows, width, levels)
    order_I, factor_II, _ = factor(h_II)
    order_N, factor_NN, _ = factor(2 * np.eye(rows, dtype=np.float32), 0.1)
    two_sided_NI = round_two_sided(w_NI, order_I, factor_II, order_N, factor_NN, grid)
    assert np.array_equal(two_sided_NI, round_with_feedback(w_NI, order_I, factor_II, grid))
    order_N = np.random.default_rng(0).permutation(rows)
    assert np.array_equal(round_two_sided(w_NI, order_I, factor_II, order_N, factor_NN, grid), two_sided_NI)


def reference(w_NI, order_I, m_II, order_N, m_NN, grid):
    """Formula by formula, in float64."""
    groups = order_I // grid.size
    w = w_NI[np.ix_(order_N, order_I)].astype(np.float64)
    steps, shifts = (x[order_N].astype(np.float64)[:, groups] for x in (grid.steps_RG, grid.shifts_RG))
    delta, e, codes = np.zeros_like(w), np.zeros_like(w), np.zeros(w.shape, np.uint8)
    for i, j in np.ndindex(w.shape):
        left = delta[i, :j] @ m_II[:j, j]
        wanted = w[i, j] + left + m_NN[:i, i] @ e[:i, j]
        points = grid.levels_T * steps[i, j] + shifts[i, j]
        codes[i, j] = np.abs(points - wanted).argmin()
        delta[i, j] = w[i, j] - points[codes[i, j]]
        e[i, j] = delta[i, j] + left
    out = np.empty_like(codes)
    out[np.ix_(order_N, order_I)] = codes
    return out


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("rows,width", [(3, 5), (17, 40), (40, 17), (150, 70), (50, 150)])
def test_it_is_the_formula(levels, rows, width):
    w_NI, h_II, grid = rounding_case(rows, width, levels)
    order_I, factor_II, _ = factor(h_II)
    order_N, factor_NN, _ = factor(output_hessian(rows), 0.1)
    codes_NI = round_two_sided(w_NI, order_I, factor_II, order_N, factor_NN, grid)
    expected_NI = reference(
        w_NI, order_I, factor_II.astype(np.float64), order_N, factor_NN.astype(np.float64), grid
    )
    one_sided_NI = round_with_feedback(w_NI, order_I, factor_II, grid)
    assert rows == 3 or not np.array_equal(codes_NI, one_sided_NI)
    # A half that goes the other way changes much of what comes after it, and nothing before.
    same = (codes_NI == expected_NI)[np.ix_(order_N, order_I)]
    assert same.mean() > 0.97


@pytest.mark.parametrize("levels", ["signed", "table"])
def test_two_sides_beat_one_and_blocks_lie_between(levels):
    rows, width = 160, 192
    w_NI, h_II, grid = rounding_case(rows, width, levels)
    h_NN = output_hessian(rows)
    order_I, factor_II, _ = factor(h_II)
    blocks = [h_NN[i : i + 40, i : i + 40] for i in range(0, rows, 40)]
    chosen = [
        nearest_codes(w_NI, grid),
        round_with_feedback(w_NI, order_I, factor_II, grid),
        round_row_blocks(w_NI, order_I, factor_II, *factor_row_blocks(np.stack(blocks)), grid),
        round_two_sided(w_NI, order_I, factor_II, *factor(h_NN, 0.1)[:2], grid),
    ]
    losses = [loss(w_NI, grid, codes_NI, h_II, h_NN) for codes_NI in chosen]
    assert losses[3] < 0.9 * losses[2] < 0.81 * losses[1] < 0.5 * losses[0]


def test_blocks_of_rows_are_linears_of_their_own():
    w_NI, h_II, grid = rounding_case(83, 130)  # the last block has 19 rows
    order_I, factor_II, _ = factor(h_II)
    h_BRR = np.stack([output_hessian(32, seed) for seed in range(3)])
    h_BRR[2, 19:] = h_BRR[2, :, 19:] = 0
    order_BR, factor_BRR = factor_row_blocks(h_BRR)
    codes_NI = round_row_blocks(w_NI, order_I, factor_II, order_BR, factor_BRR, grid)
    for block in range(3):
        rows = slice(32 * block, 32 * block + 32)
        order_N, factor_NN, _ = factor(h_BRR[block, : len(w_NI[rows]), : len(w_NI[rows])], 0.1)
        own = round_two_sided(w_NI[rows], order_I, factor_II, order_N, factor_NN, rows_of(grid, rows))
        assert np.array_equal(codes_NI[rows], own)


def test_weights_that_are_not_finite_spoil_no_other():
    w_NI, h_II, grid = rounding_case(40, 64)
    order_I, factor_II, _ = factor(h_II)
    order_N, factor_NN, _ = factor(output_hessian(40), 0.1)
    w_NI[7, 3], w_NI[9, 60] = np.nan, -np.inf
    codes_NI = round_two_sided(w_NI, order_I, factor_II, order_N, factor_NN, grid)
    near = w_NI.copy()
    near[7, 3] = near[9, 60] = 0
    delta = np.where(np.isfinite(w_NI), near - stored(grid, codes_NI), 0)
    assert (codes_NI < 8).all()
    assert codes_NI[9, 60] == 0
    assert np.sum(delta * (delta @ h_II)) < np.sum(near * (near @ h_II))


def test_zero_steps_have_the_code_nearest_to_zero():
    w_NI, h_II, grid = rounding_case(20, 96)
    steps_RG = grid.steps_RG.copy()
    steps_RG[::2, 1] = 0
    steps_RG[1::2, 0] *= -1
    grid = PointGrid(grid.levels_T, steps_RG, grid.shifts_RG, 32)
    codes_NI = round_two_sided(w_NI, *factor(h_II)[:2], *factor(output_hessian(20), 0.1)[:2], grid)
    assert (codes_NI[::2, 32:64] == 4).all()
    assert (codes_NI < 8).all()
