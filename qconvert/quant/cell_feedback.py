"""Chooses the codes of lattices with error feedback: eight columns at once, then those after them.

With H = M D M^T as in `feedback`, the loss of a row is a sum over blocks of eight columns J, each of

    |(w_J + s_J (M_JJ)^-1 - q_J) M_JJ|^2 in the metric D_J,  s_J = sum_{k before J} (w_k - q_k) M_kJ

and every block takes the points that make its own term small, given those before. This is LDLQ with blocks
(QuIP#: Tseng et al., arXiv 2402.04396), on the lattices and signs that IQ1, IQ2 and IQ3 store. `sweep_cells`
then chooses eight columns of a row again at a time, given all others, while that lowers its loss.

Rows are lanes: codes do not depend on how rows are cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.cell_search import choose_points, make_cell, set_metric
from qconvert.quant.ggml.lattice_fields import LatticeCodes
from qconvert.quant.hessian import mean_square
from qconvert.quant.lattice_grid import EIGHT, Lattice, LatticeGrid
from qconvert.quant.nearest_points import finite
from qconvert.quant.row_tiles import (
    BLOCK,
    add_changes,
    add_columns_of_block,
    make_tile,
    sum_all_columns,
    sum_columns_before,
)
from qconvert.quant.simd.lanes import LANES, kernel, load, routine, splat, store, where
from qconvert.quant.simd.products import fused, rows_as_lanes

_ZERO, _ONE = np.float32(0), np.float32(1)
_INFINITE = np.float32(np.inf)


class _Rows(NamedTuple):
    """Rows of weights, their codes (changed in place), and the points that these can be, for kernels."""

    w_RI: np.ndarray
    indices_RC: np.ndarray
    signs_RE: np.ndarray
    steps_RG: np.ndarray
    size: int
    lattice: Lattice


def round_cells(
    w_RI: np.ndarray, order_I: np.ndarray, factor_II: np.ndarray, costs_I: np.ndarray, grid: LatticeGrid
) -> LatticeCodes:
    """Chooses the codes of rows, eight columns after eight in the given order.

    `w_RI` float32 [R, I]; `order_I`, `factor_II` and `costs_I` as `hessian.factor_eights` returns them.
    """
    cells = w_RI.shape[1] // grid.lattice.elements
    codes = LatticeCodes(np.zeros((len(w_RI), cells), np.uint16), grid.fixed_RE.copy())
    factor_II = np.ascontiguousarray(factor_II, np.float32)
    _round_rows(_rows(w_RI, codes, grid), order_I, factor_II, costs_I)
    return codes


def sweep_cells(
    w_RI: np.ndarray,
    codes: LatticeCodes,
    h_II: np.ndarray,
    order_I: np.ndarray,
    grid: LatticeGrid,
    sweeps: int,
    damping: float = 0.01,
) -> LatticeCodes:
    """Improves the codes of rows, eight columns after eight in the given order, `sweeps` times.

    `h_II` float32 [I, I], symmetric, in the order of the weights' columns; it is damped as in
    `feedback.sweep`. A row's delta (H + lambda I) delta^T never rises.
    """
    swept = LatticeCodes(*(np.array(part, order="C") for part in codes))
    h_II = np.ascontiguousarray(h_II, np.float32)
    damped = np.float32(damping * mean_square(h_II))
    _sweep_rows(_rows(w_RI, swept, grid), order_I, h_II, damped, *_metrics(h_II, damped), sweeps)
    return swept


def _rows(w_RI: np.ndarray, codes: LatticeCodes, grid: LatticeGrid) -> _Rows:
    assert w_RI.shape[1] % EIGHT == 0 and grid.steps_RG.shape == (len(w_RI), w_RI.shape[1] // grid.size)
    w_RI, steps_RG = (np.ascontiguousarray(numbers, np.float32) for numbers in (w_RI, grid.steps_RG))
    return _Rows(w_RI, *codes, steps_RG, grid.size, grid.lattice)


def _metrics(h_II: np.ndarray, damped: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """M [E, 8, 8] and D [E, 8] of every eight columns by themselves, and M^-T D^-1 [E, 8, 8], float32."""
    eights = len(h_II) // EIGHT
    own = h_II.reshape(eights, EIGHT, eights, EIGHT)[np.arange(eights), :, np.arange(eights)]
    own_E88 = own.astype(np.float64) + np.float64(damped) * np.eye(EIGHT)
    # An input that was always 0 where all damping is 0, too.
    own_E88[:, range(EIGHT), range(EIGHT)] += np.finfo(np.float32).tiny
    upper_E88 = np.linalg.cholesky(own_E88[:, ::-1, ::-1])[:, ::-1, ::-1]
    diagonal_E8 = np.diagonal(upper_E88, axis1=1, axis2=2)
    unit_E88 = upper_E88 / diagonal_E8[:, None, :]
    back_E88 = np.linalg.inv(unit_E88).transpose(0, 2, 1) / np.square(diagonal_E8)[:, None, :]
    m_E88, d_E8, back_E88 = (
        np.ascontiguousarray(each, np.float32) for each in (unit_E88, np.square(diagonal_E8), back_E88)
    )
    return m_E88, d_E8, back_E88


@kernel
def _round_rows(rows: Any, order_I: Any, factor_II: Any, costs_I: Any) -> None:
    height, width = rows.w_RI.shape
    tile, cell = make_tile(height, width, rows.steps_RG.shape[1]), make_cell()
    for first in range(0, height, tile.size):
        rows_as_lanes(rows.steps_RG, first, tile.size, tile.steps)
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            sum_columns_before(factor_II, start, stop, tile)
            for column in range(start, stop, EIGHT):
                end = column + EIGHT
                add_columns_of_block(factor_II, start, column, end, tile)
                set_metric(
                    factor_II[column:end, column:end], costs_I[column:end], rows.lattice.elements, cell
                )
                for row in range(0, tile.size, LANES):
                    _round_cell(rows, first, row, order_I[column], column, start, tile, cell)


@routine
def _round_cell(
    rows: Any, first: Any, row: Any, k: Any, column: Any, start: Any, tile: Any, cell: Any
) -> None:
    """Chooses the codes of eight columns from k on, those at `column` in order, of sixteen rows."""
    shift = _load_cell(rows, first + row, k, cell)
    for e in range(EIGHT):
        w = load(cell.w, e * LANES)
        store(cell.base, e * LANES, w + load(tile.sums, (column - start + e) * tile.size + row))
        store(cell.delta, e * LANES, w)  # what a step of 0 leaves
    step = load(tile.steps, k // rows.size * tile.size + row)
    choose_points(rows.lattice, step, shift, splat(_INFINITE), cell)
    for e in range(EIGHT):
        store(tile.delta, (column + e) * tile.size + row, finite(load(cell.delta, e * LANES)))
    _store_cell(rows, first + row, k, cell)


@routine
def _load_cell(rows: Any, first: Any, k: Any, cell: Any) -> Any:
    """Reads the weights and codes of eight columns; returns the shifts, as lanes."""
    per = EIGHT // rows.lattice.elements
    cell.signs[:] = 0
    for lane in range(min(LANES, rows.w_RI.shape[0] - first)):
        for e in range(EIGHT):
            cell.w[e * LANES + lane] = rows.w_RI[first + lane, k + e]
        for part in range(per):
            cell.indices[part * LANES + lane] = rows.indices_RC[first + lane, k // EIGHT * per + part]
        cell.signs[lane] = rows.signs_RE[first + lane, k // EIGHT]
    if rows.lattice.signed:
        return splat(_ZERO)
    return where(load(cell.signs, 0) > _ZERO, splat(-rows.lattice.shift), splat(rows.lattice.shift))


@routine
def _store_cell(rows: Any, first: Any, k: Any, cell: Any) -> None:
    """Writes the codes of eight columns."""
    per = EIGHT // rows.lattice.elements
    for lane in range(min(LANES, rows.w_RI.shape[0] - first)):
        for part in range(per):
            rows.indices_RC[first + lane, k // EIGHT * per + part] = cell.indices[part * LANES + lane]
        rows.signs_RE[first + lane, k // EIGHT] = cell.signs[lane]


@kernel
def _sweep_rows(
    rows: Any, order_I: Any, h_II: Any, damped: Any, m_E88: Any, d_E8: Any, back_E88: Any, sweeps: Any
) -> None:
    height, width = rows.w_RI.shape
    tile, cell = make_tile(height, width, rows.steps_RG.shape[1]), make_cell()
    for first in range(0, height, tile.size):
        rows_as_lanes(rows.steps_RG, first, tile.size, tile.steps)
        for k in range(0, width, EIGHT):
            for row in range(0, tile.size, LANES):
                _find_errors(rows, first, row, k, tile, cell)
        for _ in range(sweeps):
            for start in range(0, width, BLOCK):
                order = order_I[start : min(start + BLOCK, width)]
                sum_all_columns(h_II, order, tile)
                for j in range(0, order.size, EIGHT):
                    eight = order[j] // EIGHT
                    add_changes(h_II, order, j, j + EIGHT, tile)
                    set_metric(m_E88[eight], d_E8[eight], rows.lattice.elements, cell)
                    for row in range(0, tile.size, LANES):
                        _improve_cell(rows, first, row, order[j], j, damped, back_E88[eight], tile, cell)


@routine
def _find_errors(rows: Any, first: Any, row: Any, k: Any, tile: Any, cell: Any) -> None:
    """Fills in the errors of the codes of eight columns."""
    lattice = rows.lattice
    shift = _load_cell(rows, first + row, k, cell)
    store(cell.lanes, 0, shift)
    scale = k // rows.size * tile.size + row
    for e in range(EIGHT):
        for lane in range(LANES):
            point = np.int64(cell.indices[e // lattice.elements * LANES + lane])
            level = lattice.digits[point * lattice.elements + e % lattice.elements]
            number = (lattice.numbers_L[level] + cell.lanes[lane]) * tile.steps[scale + lane]
            if lattice.signed and np.int64(cell.signs[lane]) >> e & 1:
                number = -number
            cell.q[e * LANES + lane] = number
        at = (k + e) * tile.size + row
        store(tile.delta, at, finite(load(cell.w, e * LANES) - load(cell.q, e * LANES)))


@routine
def _improve_cell(
    rows: Any, first: Any, row: Any, k: Any, j: Any, damped: Any, back_88: Any, tile: Any, cell: Any
) -> None:
    """Chooses the codes of eight columns from k on, those at j of a block, given all others."""
    shift = _load_cell(rows, first + row, k, cell)
    for e in range(EIGHT):
        before = load(tile.delta, (k + e) * tile.size + row)
        gradient = fused(before, splat(damped), load(tile.sums, (j + e) * tile.size + row))
        store(cell.delta, e * LANES, before)
        store(cell.q, e * LANES, gradient)
    limit = splat(_ZERO)
    for e in range(EIGHT):
        # In the metric of the eight, `rest` is how far the errors are from the least loss there is.
        rest, moved = splat(_ZERO), splat(_ZERO)
        for i in range(e, EIGHT):
            rest = fused(load(cell.q, i * LANES), splat(back_88[i, e]), rest)
        for i in range(e + 1):
            moved = fused(load(cell.delta, i * LANES), splat(cell.corner[i * EIGHT + e]), moved)
        store(cell.base, e * LANES, load(cell.w, e * LANES) + rest - moved)
        limit = fused(rest * cell.costs_of[e], rest, limit)
    step = load(tile.steps, k // rows.size * tile.size + row)
    choose_points(rows.lattice, step, shift, limit, cell)
    for e in range(EIGHT):
        at, after = (k + e) * tile.size + row, finite(load(cell.delta, e * LANES))
        store(tile.changes, (j + e) * tile.size + row, after - load(tile.delta, at))
        store(tile.delta, at, after)
    _store_cell(rows, first + row, k, cell)
