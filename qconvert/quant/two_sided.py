"""Chooses codes so that later columns and later rows compensate the errors of those before (YAQA).

The loss of a whole model is, to second order, tr(H_O Delta H Delta^T) for the errors Delta of one linear's
weights: H = E[x x^T] of its inputs, H_O = E[g g^T] of the gradients at its outputs. With H = M D M^T and
H_O = M_O D_O M_O^T of `hessian.factor`, both M unit upper triangular, and E = Delta M, weight ij is rounded
from

    w_ij + sum_{b<j} Delta_ib M_bj + sum_{a<i} (M_O)_ai E_aj

(Tseng et al., "Model-preserving adaptive rounding", arXiv 2505.22988). Where H_O is a multiple of the
identity, that is `feedback`, to the bit.

A tile of rows is finished before the next begins. Within it, corners of 16 rows and 32 columns are slanted:
lane l is l columns behind, so that what it needs of the rows above and the columns before is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.hessian import factor
from qconvert.quant.nearest_points import finite, nearest_point
from qconvert.quant.point_grid import PointGrid
from qconvert.quant.row_tiles import BLOCK, add_columns_of_block, grid_rows, make_tile, sum_columns_before
from qconvert.quant.simd.lanes import LANES, kernel, load, routine, store
from qconvert.quant.simd.products import COLUMNS, PANEL, add_product, fused, pack

_WIDTH = 32  # columns of a corner: a whole number of the products' rows, as columns are lanes for rows above
_STEPS = _WIDTH + LANES - 1
_ZERO = np.float32(0)


def round_two_sided(
    w_NI: np.ndarray,
    order_I: np.ndarray,
    factor_II: np.ndarray,
    order_N: np.ndarray,
    factor_NN: np.ndarray,
    grid: PointGrid,
) -> np.ndarray:
    """Chooses the codes of all rows of a linear.

    `w_NI` float32 [N, I]; `order_I`, `factor_II` and `order_N`, `factor_NN` as `hessian.factor` returns them
    for the inputs and for the outputs. Returns uint8 [N, I]: indices into `grid.levels_T`. Takes 4 N I bytes
    of working memory.
    """
    codes_NI = np.empty(w_NI.shape, np.uint8)
    factor_II, factor_NN = (np.ascontiguousarray(m, np.float32) for m in (factor_II, factor_NN))
    _round_rows(grid_rows(w_NI, codes_NI, grid), order_I, factor_II, order_N, factor_NN)
    return codes_NI


def round_row_blocks(
    w_NI: np.ndarray,
    order_I: np.ndarray,
    factor_II: np.ndarray,
    order_BR: np.ndarray,
    factor_BRR: np.ndarray,
    grid: PointGrid,
) -> np.ndarray:
    """Chooses the codes of rows of which only R consecutive ones compensate each other's errors.

    `order_BR` and `factor_BRR`: as `factor_row_blocks` returns them; the last block may have fewer rows.
    Blocks are independent: any may be rounded by themselves. Otherwise as `round_two_sided`, in 4 R I bytes
    of working memory.
    """
    codes_NI = np.empty(w_NI.shape, np.uint8)
    for first, order_R, factor_RR in zip(
        range(0, len(w_NI), order_BR.shape[1]), order_BR, factor_BRR, strict=True
    ):
        rows = slice(first, first + len(order_R))
        count = len(w_NI[rows])
        assert (order_R[:count] < count).all()
        own = PointGrid(grid.levels_T, grid.steps_RG[rows], grid.shifts_RG[rows], grid.size)
        codes_NI[rows] = round_two_sided(
            w_NI[rows], order_I, factor_II, order_R[:count], factor_RR[:count, :count], own
        )
    return codes_NI


def factor_row_blocks(h_BRR: np.ndarray, damping: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Factors the Hessians of the outputs of blocks of rows: float32 [B, R, R] to int64 [B, R] and [B, R, R].

    Rows that are missing in the last block have moments of 0, which are last in its order. Raises
    `NotPositiveDefinite`.
    """
    factors = [factor(h_RR, damping)[:2] for h_RR in h_BRR]
    return np.stack([order_R for order_R, _ in factors]), np.stack([factor_RR for _, factor_RR in factors])


class _Sheet(NamedTuple):
    """Working memory with columns as lanes, flat arrays [rows, `line`].

    `errors`: E of all rows, in their order; `above`: what a tile's rows get from the rows above.
    """

    line: int
    errors: np.ndarray
    above: np.ndarray


class _Corner(NamedTuple):
    """A corner, slanted: place (step, lane) is row `lane`, column step - lane; flat arrays [_STEPS, LANES].

    `factor` [_STEPS, _WIDTH, LANES]: M from the column at a place to the one so many columns further;
    `factor_above` [LANES, LANES]: M_O from so many rows above to row `lane`; `raised`: E after sixteen zeros.
    """

    factor: np.ndarray
    factor_above: np.ndarray
    w: np.ndarray
    steps: np.ndarray
    shifts: np.ndarray
    left: np.ndarray
    above: np.ndarray
    delta: np.ndarray
    errors: np.ndarray
    codes: np.ndarray
    raised: np.ndarray


@routine
def _make_sheet(height: Any, width: Any, tile: Any) -> Any:
    parts = (width + _WIDTH - 1) // _WIDTH
    line = (parts + 1 - parts % 2) * _WIDTH  # odd, or rows would compete for the same lines of the cache
    return _Sheet(line, np.zeros(height * line, np.float32), np.zeros(tile * line, np.float32))


@routine
def _make_corner() -> Any:
    size = _STEPS * LANES
    return _Corner(
        np.zeros(size * _WIDTH, np.float32),
        np.zeros(LANES * LANES, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.uint8),
        np.zeros(2 * LANES, np.float32),
    )


@kernel
def _round_rows(rows: Any, order_I: Any, factor_II: Any, order_N: Any, factor_NN: Any) -> None:
    height, width = rows.w_RI.shape
    tile, corner = make_tile(height, width, 0), _make_corner()
    sheet = _make_sheet(height, width, tile.size)
    for first in range(0, height, tile.size):
        order = order_N[first : first + tile.size]
        _sum_rows_above(factor_NN, first, order.size, sheet, tile)
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            sum_columns_before(factor_II, start, stop, tile)
            for column in range(start, stop, _WIDTH):
                columns = order_I[column : min(column + _WIDTH, stop)]
                add_columns_of_block(factor_II, start, column, column + columns.size, tile)
                _slant_factor(factor_II, column, columns.size, corner)
                for row in range(0, order.size, LANES):
                    lanes = order[row : row + LANES]
                    _add_rows_of_tile(factor_NN, first, row, lanes.size, column, sheet, tile)
                    _load_corner(rows, lanes, columns, row, column, column - start, sheet, tile, corner)
                    _slant_factor_above(factor_NN, first + row, lanes.size, corner)
                    _round_corner(rows.points, columns.size, tile.scratch, corner)
                    _store_corner(rows, lanes, columns, first, row, column, sheet, tile, corner)


@routine
def _sum_rows_above(factor_NN: Any, first: Any, count: Any, sheet: Any, tile: Any) -> None:
    """Makes what a tile's rows get from above the errors of all rows before `first`, times the factor."""
    sheet.above[:] = 0
    starts = tile.starts[: (count + COLUMNS - 1) // COLUMNS * COLUMNS]
    for panel in range(0, first, PANEL):
        depth = min(PANEL, first - panel)
        pack(factor_NN, panel, depth, first, first + count, tile.packed, starts)
        at, line = panel * sheet.line, sheet.line
        add_product(sheet.above, 0, sheet.errors, at, line, line, tile.packed, starts, COLUMNS, depth)


@routine
def _add_rows_of_tile(
    factor_NN: Any, first: Any, row: Any, count: Any, column: Any, sheet: Any, tile: Any
) -> None:
    """Adds the errors of the tile's first `row` rows to what the next ones get, in a corner's columns."""
    starts = tile.starts[: (count + COLUMNS - 1) // COLUMNS * COLUMNS]
    pack(factor_NN, first, row, first + row, first + row + count, tile.packed, starts)
    at, x_at = row * sheet.line + column, first * sheet.line + column
    add_product(sheet.above, at, sheet.errors, x_at, sheet.line, _WIDTH, tile.packed, starts, COLUMNS, row)


@routine
def _slant_factor(factor_II: Any, column: Any, wide: Any, corner: Any) -> None:
    for step in range(wide + LANES - 1):
        for further in range(1, wide):
            for lane in range(LANES):
                c = step - lane
                inside = c >= 0 and c + further < wide
                corner.factor[(step * _WIDTH + further) * LANES + lane] = (
                    factor_II[column + c, column + c + further] if inside else _ZERO
                )


@routine
def _slant_factor_above(factor_NN: Any, first: Any, count: Any, corner: Any) -> None:
    for higher in range(1, LANES):
        for lane in range(LANES):
            inside = higher <= lane < count
            corner.factor_above[higher * LANES + lane] = (
                factor_NN[first + lane - higher, first + lane] if inside else _ZERO
            )


@routine
def _load_corner(
    rows: Any,
    lanes: Any,
    columns: Any,
    row: Any,
    column: Any,
    in_block: Any,
    sheet: Any,
    tile: Any,
    corner: Any,
) -> None:
    """Gathers a corner; where a lane is not in its columns yet or any more, everything is 0 and stays so."""
    for step in range(columns.size + LANES - 1):
        for lane in range(LANES):
            c, at = step - lane, step * LANES + lane
            if lane < lanes.size and c >= 0 and c < columns.size:
                n, k = lanes[lane], columns[c]
                corner.w[at] = rows.w_RI[n, k]
                corner.steps[at] = rows.steps_RG[n, k // rows.group]
                corner.shifts[at] = rows.shifts_RG[n, k // rows.group]
                corner.left[at] = tile.sums[(in_block + c) * tile.size + row + lane]
                corner.above[at] = sheet.above[(row + lane) * sheet.line + column + c]
            else:
                corner.w[at] = corner.steps[at] = corner.shifts[at] = _ZERO
                corner.left[at] = corner.above[at] = _ZERO


@routine
def _round_corner(points: Any, wide: Any, scratch: Any, corner: Any) -> None:
    last = wide + LANES - 1
    for step in range(last):
        at = step * LANES
        w, left = load(corner.w, at), load(corner.left, at)
        wanted = w + left + load(corner.above, at)
        code, stored = nearest_point(wanted, load(corner.steps, at), load(corner.shifts, at), points, scratch)
        delta = finite(w - stored)
        store(corner.codes, at, code)
        store(corner.delta, at, delta)
        store(corner.errors, at, delta + left)
        store(corner.raised, LANES, delta + left)
        for further in range(1, min(wide, last - step)):
            later, factor_at = at + further * LANES, (step * _WIDTH + further) * LANES
            store(corner.left, later, fused(delta, load(corner.factor, factor_at), load(corner.left, later)))
        for higher in range(1, min(LANES, last - step)):
            later, above = at + higher * LANES, load(corner.raised, LANES - higher)
            factor_above = load(corner.factor_above, higher * LANES)
            store(corner.above, later, fused(above, factor_above, load(corner.above, later)))


@routine
def _store_corner(
    rows: Any,
    lanes: Any,
    columns: Any,
    first: Any,
    row: Any,
    column: Any,
    sheet: Any,
    tile: Any,
    corner: Any,
) -> None:
    for lane in range(lanes.size):
        for c in range(columns.size):
            at = (c + lane) * LANES + lane
            rows.codes_RI[lanes[lane], columns[c]] = corner.codes[at]
            tile.delta[(column + c) * tile.size + row + lane] = corner.delta[at]
            sheet.errors[(first + row + lane) * sheet.line + column + c] = corner.errors[at]
