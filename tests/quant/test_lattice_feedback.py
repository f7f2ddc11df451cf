"""Error feedback on lattices: the laws of choosing eight columns of IQ1, IQ2 and IQ3 at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from qconvert.core.dtypes import DType
from qconvert.core.ggml_types import GGMLType
from qconvert.core.values import DenseRows, GgmlRows
from qconvert.quant.cell_feedback import round_cells, sweep_cells
from qconvert.quant.ggml.encode import encode_rows
from qconvert.quant.ggml.lattice_fields import LATTICES, LatticeCodes
from qconvert.quant.hessian import factor_eights, mean_square, row_errors
from qconvert.quant.lattice_grid import (
    LatticeGrid,
    has_lattice,
    lattice_codes,
    lattice_grid,
    lattice_of,
    with_lattice_codes,
)
from tests.support.rounding import rounding_case
from tests.support.values import blocks

NAMES = sorted(LATTICES)
WIDTH = 512


def encoded(w_RI: np.ndarray, h_II: np.ndarray, name: str) -> GgmlRows:
    """Rows with the nearest codes, as llama-quantize writes them with an imatrix."""
    importance_I = np.ascontiguousarray(h_II.diagonal())
    return GgmlRows(encode_rows(DenseRows(w_RI, DType.F32), name, importance_I=importance_I), blocks(name))


@cache
def case(name: str, rows: int = 40) -> tuple[np.ndarray, np.ndarray, GgmlRows]:
    w_RI, h_II, _ = rounding_case(rows, WIDTH)
    return w_RI, h_II, encoded(w_RI, h_II, name)


def decoded(value: GgmlRows, codes: LatticeCodes | None = None) -> np.ndarray:
    """What the gguf package makes of rows, with other codes than they have if there are any."""
    value = value if codes is None else with_lattice_codes(value, codes)
    return np.asarray(dequantize(value.bytes_RB, GGMLQuantizationType(GGMLType[value.encoding.type].number)))


def numbers_of(grid: LatticeGrid, codes: LatticeCodes) -> np.ndarray:
    """(number + shift) * step of every element, float32."""
    lattice = grid.lattice
    points_PE = lattice.numbers_L[lattice.digits.reshape(-1, lattice.elements)]
    numbers_RI = points_PE[codes.indices_NC].reshape(len(codes.indices_NC), -1)
    if lattice.signed:
        bits_RI = np.unpackbits(codes.signs_NE, axis=1, bitorder="little")
        numbers_RI = np.where(bits_RI, -numbers_RI, numbers_RI)
    else:
        numbers_RI = numbers_RI + np.repeat(np.where(codes.signs_NE, -0.125, 0.125), 8, axis=1)
    return np.asarray(numbers_RI.astype(np.float32) * np.repeat(grid.steps_RG, grid.size, axis=1))


def rows_of(grid: LatticeGrid, rows: slice) -> LatticeGrid:
    return LatticeGrid(grid.lattice, grid.steps_RG[rows], grid.size, grid.fixed_RE[rows])


def damped(h_II: np.ndarray) -> np.ndarray:
    return h_II + np.float32(0.01 * mean_square(h_II)) * np.eye(len(h_II), dtype=np.float32)


def choices(grid: LatticeGrid, row: int, eight: int) -> np.ndarray:
    """Every number that eight columns of a row can be: float64 [choices, 8], step by step as decoded."""
    lattice = grid.lattice
    points_PE = lattice.numbers_L[lattice.digits.reshape(-1, lattice.elements)].astype(np.float64)
    step = float(grid.steps_RG[row, eight * 8 // grid.size])
    if not lattice.signed:
        own = -0.125 if grid.fixed_RE[row, eight] else 0.125
        shifts = (0.125, -0.125) if lattice.free else (own,)
        return np.concatenate([points_PE + shift for shift in shifts]) * step
    signs = np.array(list(product((1, -1), repeat=lattice.elements)))
    return (points_PE[:, None] * signs).reshape(-1, lattice.elements) * step


def least_cost(grid: LatticeGrid, row: int, eight: int, wanted: np.ndarray, weights: np.ndarray) -> float:
    """The least weighted squared error of eight columns, by trying everything."""
    lattice, every = grid.lattice, choices(grid, row, eight)
    size, halves = lattice.elements, range(0, 8, lattice.elements)
    costs = [np.square(every - wanted[h : h + size]) @ weights[h : h + size] for h in halves]
    if not lattice.even:
        return float(sum(cost.min() for cost in costs))
    odd = (every < 0).sum(axis=1) % 2
    least = [[float(cost[odd == parity].min()) for parity in (0, 1)] for cost in costs]
    return least[0][0] if size == 8 else min(least[0][0] + least[1][0], least[0][1] + least[1][1])


def test_which_encodings_are_lattices() -> None:
    assert {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"} == LATTICES
    assert all(has_lattice(blocks(name)) for name in NAMES)
    assert not has_lattice(blocks("IQ4_XS")) and not has_lattice(blocks("Q2_K"))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_bytes_are_the_numbers_that_gguf_decodes(name: str) -> None:
    kind, rng = GGMLType[name], np.random.default_rng(1)
    value = GgmlRows(rng.integers(0, 256, (3, 4 * kind.block_bytes), dtype=np.uint8), blocks(name))
    with np.errstate(invalid="ignore"):
        grid, codes = lattice_grid(value), lattice_codes(value)
        assert np.array_equal(numbers_of(grid, codes), decoded(value), equal_nan=True)
    empty = with_lattice_codes(value, LatticeCodes(*(np.zeros_like(part) for part in codes)))
    assert not np.array_equal(empty.bytes_RB, value.bytes_RB)
    assert np.array_equal(with_lattice_codes(empty, codes).bytes_RB, value.bytes_RB)


@pytest.mark.parametrize("name", NAMES)
def test_a_lattice_is_a_tree_of_all_its_points(name: str) -> None:
    lattice = lattice_of(name)
    digits_PE = lattice.digits.reshape(-1, lattice.elements)
    path, seen = np.zeros(lattice.elements, int), {}
    for node, (depth, after) in enumerate(zip(lattice.depths_N, lattice.after_N, strict=True)):
        path[depth] = lattice.levels_N[node]
        assert (lattice.depths_N[node + 1 : after] > depth).all()
        assert after == len(lattice.after_N) or lattice.depths_N[after] <= depth
        if lattice.points_N[node] >= 0:
            seen[int(lattice.points_N[node])] = path.tolist()
    assert [seen[point] for point in range(len(digits_PE))] == digits_PE.tolist()
    levels = len(lattice.numbers_L)
    every_KE = np.arange(len(lattice.starts_K))[:, None] // levels ** np.arange(lattice.elements) % levels
    some_KE = every_KE[::97]
    squares_KP = np.square(some_KE[:, None] - digits_PE[None].astype(int)).sum(axis=2)
    found_K = np.take_along_axis(squares_KP, lattice.starts_K[::97, None].astype(int), axis=1)[:, 0]
    assert np.array_equal(found_K, squares_KP.min(axis=1))


@pytest.mark.parametrize("name", NAMES)
def test_without_correlations_feedback_is_nearest(name: str) -> None:
    """Trying every point with all signs and shifts that can be stored finds nothing nearer."""
    w_RI, _, value = case(name)
    grid = lattice_grid(value)
    diagonal_I = np.random.default_rng(1).uniform(0.1, 3, WIDTH).astype(np.float32)
    order_I, factor_II, costs_I = factor_eights(np.diag(diagonal_I))
    codes = round_cells(w_RI, order_I, factor_II, costs_I, grid)
    made_RI, weights_I = decoded(value, codes), np.empty(WIDTH)
    weights_I[order_I] = costs_I
    spent_RE = (np.square(w_RI - made_RI, dtype=np.float64) * weights_I).reshape(len(w_RI), -1, 8).sum(axis=2)
    for row, eight in ((0, 0), (3, 17), (17, 40), (33, 63)):
        own = slice(eight * 8, eight * 8 + 8)
        least = least_cost(grid, row, eight, w_RI[row, own].astype(np.float64), weights_I[own])
        assert spent_RE[row, eight] == pytest.approx(least, rel=1e-5)
    swept = sweep_cells(w_RI, codes, np.diag(diagonal_I), order_I, grid, 2)
    swept_RI = np.square(w_RI - decoded(value, swept), dtype=np.float64) * weights_I
    np.testing.assert_allclose(swept_RI.sum(axis=1), spent_RE.sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS"])
def test_brute_force_on_eight_columns(name: str) -> None:
    """What is chosen costs little more than the best of all choices, and less than the nearest."""
    rng, lattice = np.random.default_rng(2), lattice_of(name)
    rows, losses = 48, np.zeros(3)
    scale = np.float32(0.4 / lattice.numbers_L[lattice.numbers_L > 0][0])
    grid = LatticeGrid(lattice, np.full((rows, 1), scale), 8, np.zeros((rows, 1), np.uint8))
    every_Q8 = choices(grid, 0, 0)
    if lattice.even:
        every_Q8 = every_Q8[(every_Q8 < 0).sum(axis=1) % 2 == 0]
    for _ in range(3):
        x = rng.standard_normal((40, 3)) @ rng.standard_normal((3, 8)) + 0.6 * rng.standard_normal((40, 8))
        h_88 = (x.T @ x / 40).astype(np.float32)
        w_R8 = rng.standard_normal((rows, 8)).astype(np.float32)
        order_I, factor_II, costs_I = factor_eights(h_88, 1e-6)
        made_R8 = numbers_of(grid, round_cells(w_R8, order_I, factor_II, costs_I, grid))
        errors_RQ8 = w_R8[:, None] - every_Q8
        nearest_R8 = every_Q8[np.square(errors_RQ8).sum(axis=2).argmin(axis=1)]
        least_R = ((errors_RQ8 @ h_88) * errors_RQ8).sum(axis=2).min(axis=1)
        made_R, nearest_R = (row_errors(w_R8, q_R8, h_88) for q_R8 in (made_R8, nearest_R8))
        assert (made_R >= least_R * (1 - 1e-4)).all()
        losses += least_R.sum(), made_R.sum(), nearest_R.sum()
    assert losses[1] < 1.15 * losses[0]
    assert losses[1] < 0.85 * losses[2]


def reference_eights(
    w_RI: np.ndarray, order_I: np.ndarray, factor_II: np.ndarray, costs_I: np.ndarray, grid: LatticeGrid
) -> np.ndarray:
    """Every point of IQ2_S in turn, each sign that of what is wanted: float64, formula by formula."""
    w, m = w_RI[:, order_I].astype(np.float64), factor_II.astype(np.float64)
    points_PE = grid.lattice.numbers_L[grid.lattice.digits.reshape(-1, 8)].astype(np.float64)
    delta_RI, stored_RI = np.zeros_like(w), np.zeros_like(w)
    for start in range(0, w.shape[1], 8):
        own = slice(start, start + 8)
        before_R8 = delta_RI[:, :start] @ m[:start, own]
        for row in range(len(w)):
            step = float(grid.steps_RG[row, order_I[start] // grid.size])
            q_P8, costs_P = np.empty((len(points_PE), 8)), np.zeros(len(points_PE))
            for j in range(8):
                errors_P8 = w[row, own][:j] - q_P8[:, :j]
                wanted_P = w[row, start + j] + before_R8[row, j] + errors_P8 @ m[own, own][:j, j]
                q_P8[:, j] = np.where(wanted_P < 0, -1, 1) * points_PE[:, j] * step
                costs_P += costs_I[start + j] * np.square(wanted_P - q_P8[:, j])
            stored_RI[row, own] = q_P8[costs_P.argmin()]
        delta_RI[:, own] = w[:, own] - stored_RI[:, own]
    out = np.empty_like(stored_RI)
    out[:, order_I] = stored_RI
    return out


def test_feedback_is_the_formula() -> None:
    w_RI, h_II, value = case("IQ2_S")
    w_RI, value = w_RI[:6], GgmlRows(value.bytes_RB[:6], value.encoding)
    grid, factored = lattice_grid(value), factor_eights(h_II)
    made_RI = decoded(value, round_cells(w_RI, *factored, grid))
    expected_RI = reference_eights(w_RI, *factored, grid)
    assert (
        np.isclose(made_RI, expected_RI, atol=1e-5).all(axis=1).sum() >= 5
    )  # a tie changes all that follows


@pytest.mark.parametrize("name", NAMES)
def test_feedback_beats_nearest_and_sweeps_never_lose(name: str) -> None:
    w_RI, h_II, value = case(name)
    grid, (order_I, factor_II, costs_I) = lattice_grid(value), factor_eights(h_II)
    codes = round_cells(w_RI, order_I, factor_II, costs_I, grid)
    found = [decoded(value), decoded(value, codes)]
    found += [decoded(value, sweep_cells(w_RI, codes, h_II, order_I, grid, sweeps)) for sweeps in (1, 3)]
    found += [decoded(value, sweep_cells(w_RI, lattice_codes(value), h_II, order_I, grid, 1))]
    nearest, feedback, once, thrice, alone = (row_errors(w_RI, q_RI, damped(h_II)) for q_RI in found)
    assert feedback.sum() < 0.3 * nearest.sum()
    assert (feedback < nearest).all()
    assert (once <= feedback * (1 + 1e-5)).all() and once.sum() < feedback.sum()
    assert (thrice <= once * (1 + 1e-5)).all() and thrice.sum() < once.sum()
    assert (alone <= nearest * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["IQ1_M", "IQ3_XXS"])
def test_rows_may_be_cut_anywhere(name: str) -> None:
    w_RI, h_II, value = case(name, 150)
    grid, (order_I, factor_II, costs_I) = lattice_grid(value), factor_eights(h_II)

    def codes(rows: slice) -> tuple[LatticeCodes, LatticeCodes]:
        rounded = round_cells(w_RI[rows], order_I, factor_II, costs_I, rows_of(grid, rows))
        return rounded, sweep_cells(w_RI[rows], rounded, h_II, order_I, rows_of(grid, rows), 2)

    whole = codes(slice(0, 150))
    with ThreadPoolExecutor(4) as pool:
        cut = list(pool.map(codes, [slice(a, b) for a, b in pairwise([0, 1, 2, 33, 97, 100, 150])]))
    for step in range(2):
        for part in range(2):
            assert np.array_equal(np.concatenate([each[step][part] for each in cut]), whole[step][part])


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_zero_and_weights_that_are_no_numbers_spoil_nothing(name: str) -> None:
    w_RI, h_II, value = case(name)
    order_I, factor_II, costs_I = factor_eights(h_II)
    grid = lattice_grid(value)
    expected = round_cells(w_RI, order_I, factor_II, costs_I, grid)
    spoilt_RI, steps_RG = w_RI.copy(), grid.steps_RG.copy()
    spoilt_RI[7, 3], spoilt_RI[9, 60] = np.nan, np.inf
    steps_RG[11, : len(steps_RG[0]) // 2] = 0
    spoilt = LatticeGrid(grid.lattice, steps_RG, grid.size, grid.fixed_RE)
    codes = round_cells(spoilt_RI, order_I, factor_II, costs_I, spoilt)
    swept = sweep_cells(spoilt_RI, codes, h_II, order_I, spoilt, 1)
    others = np.setdiff1d(np.arange(len(w_RI)), [7, 9, 11])
    for part in range(2):
        assert np.array_equal(codes[part][others], expected[part][others])
    points = len(grid.lattice.digits) // grid.lattice.elements
    for made in (codes, swept):
        assert (made.indices_NC < points).all()
        half = made.indices_NC.shape[1] // 2
        assert (made.indices_NC[11, :half] == 0).all() and (made.indices_NC[11, half:] > 0).any()
        assert np.isfinite(numbers_of(spoilt, made)).all()


def test_columns_stay_together_in_a_factor_of_eights() -> None:
    _, h_II, _ = rounding_case(1, 200)
    h_II[[5, 80]] = h_II[:, [5, 80]] = 0
    order_I, factor_II, costs_I = factor_eights(h_II)
    eights_E8 = order_I.reshape(-1, 8)
    assert (eights_E8 == eights_E8[:, :1] + np.arange(8)).all() and (eights_E8[:, 0] % 8 == 0).all()
    sums_E = h_II.diagonal()[eights_E8].sum(axis=1)
    assert (np.diff(sums_E) <= 1e-4).all() and sorted(order_I) == list(range(200))
    assert np.array_equal(np.tril(factor_II, -1), np.zeros_like(factor_II))
    mean, m_II = mean_square(h_II), factor_II.astype(np.float64)
    whole_II = h_II + 0.01 * mean * np.eye(200)
    whole_II[[5, 80], [5, 80]] += mean
    made_II = (m_II * costs_I) @ m_II.T
    np.testing.assert_allclose(made_II, whole_II[np.ix_(order_I, order_I)], atol=1e-4 * mean)
