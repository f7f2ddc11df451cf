"""Holds a tile of rows as lanes while the codes of its columns are chosen one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.nearest_points import Points, as_points
from qconvert.quant.point_grid import PointGrid
from qconvert.quant.simd.lanes import LANES, routine
from qconvert.quant.simd.products import COLUMNS, PANEL, ROWS, add_product, pack, packed_starts, rows_as_lanes

BLOCK = 128
"""Columns between two products with all columns before."""
_ROWS = 128  # rows that share what is read of a matrix


class GridRows(NamedTuple):
    """Rows of weights, their codes, and the points that the codes can be, for kernels.

    `w_RI`, `steps_RG`, `shifts_RG` float32, `codes_RI` uint8, all contiguous; `group` columns have one step.
    """

    w_RI: np.ndarray
    codes_RI: np.ndarray
    steps_RG: np.ndarray
    shifts_RG: np.ndarray
    group: int
    points: Points


def grid_rows(w_RI: np.ndarray, codes_RI: np.ndarray, grid: PointGrid) -> GridRows:
    """Holds rows, contiguous codes that are changed in place, and their grid."""
    rows, width = w_RI.shape
    assert grid.steps_RG.shape == grid.shifts_RG.shape == (rows, -(-width // grid.size))
    w_RI, steps_RG, shifts_RG = (
        np.ascontiguousarray(numbers, np.float32) for numbers in (w_RI, grid.steps_RG, grid.shifts_RG)
    )
    return GridRows(w_RI, codes_RI, steps_RG, shifts_RG, grid.size, as_points(grid))


class Tile(NamedTuple):
    """Working memory for `size` rows as lanes, flat arrays [..., size].

    `delta` has the errors of all columns, `sums` and `changes` numbers of the columns of a block, `steps` and
    `shifts` those of all groups, `w` and `codes` those of one column. `packed`, `starts`: for `pack`.
    """

    size: int
    delta: np.ndarray
    sums: np.ndarray
    changes: np.ndarray
    steps: np.ndarray
    shifts: np.ndarray
    w: np.ndarray
    codes: np.ndarray
    packed: np.ndarray
    starts: np.ndarray
    scratch: np.ndarray


@routine
def make_tile(rows: Any, width: Any, groups: Any) -> Any:
    """Allocates a tile for up to this many rows of this width and number of groups."""
    size = min(_ROWS, (rows + ROWS - 1) // ROWS * ROWS)
    return Tile(
        size,
        np.empty(width * size, np.float32),
        np.empty(BLOCK * size, np.float32),
        np.empty(BLOCK * size, np.float32),
        np.empty(groups * size, np.float32),
        np.empty(groups * size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.uint8),
        np.empty(BLOCK * PANEL, np.float32),
        np.empty(BLOCK, np.intp),
        np.empty(2 * LANES, np.float32),
    )


@routine
def load_scales(rows: Any, first: Any, tile: Any) -> None:
    """Fills the steps and shifts of the rows from `first` on; those of rows that are not there are 0."""
    rows_as_lanes(rows.steps_RG, first, tile.size, tile.steps)
    rows_as_lanes(rows.shifts_RG, first, tile.size, tile.shifts)


@routine
def load_column(rows: Any, first: Any, k: Any, tile: Any) -> None:
    """Reads the weights and codes of one column."""
    for row in range(min(tile.size, rows.w_RI.shape[0] - first)):
        tile.w[row], tile.codes[row] = rows.w_RI[first + row, k], rows.codes_RI[first + row, k]


@routine
def store_column(rows: Any, first: Any, k: Any, tile: Any) -> None:
    """Writes the codes of one column."""
    for row in range(min(tile.size, rows.w_RI.shape[0] - first)):
        rows.codes_RI[first + row, k] = tile.codes[row]


@routine
def add_to_sums(
    column: Any, x: Any, first: Any, m: Any, starts: Any, step: Any, count: Any, tile: Any
) -> None:
    """Adds `count` columns of x from `first` on, times m, to the tile's sums from `column` on."""
    at, x_at = column * tile.size, first * tile.size
    add_product(tile.sums, at, x, x_at, tile.size, tile.size, m, starts, step, count)


@routine
def sum_columns_before(factor_II: Any, start: Any, stop: Any, tile: Any) -> None:
    """Makes the sums of columns [start, stop) the errors of all columns before `start`, times the factor."""
    tile.sums[:] = 0
    starts = tile.starts[: (stop - start + COLUMNS - 1) // COLUMNS * COLUMNS]
    for panel in range(0, start, PANEL):
        count = min(PANEL, start - panel)
        pack(factor_II, panel, count, start, stop, tile.packed, starts)
        add_to_sums(0, tile.delta, panel, tile.packed, starts, COLUMNS, count, tile)


@routine
def add_columns_of_block(factor_II: Any, start: Any, column: Any, stop: Any, tile: Any) -> None:
    """Adds the errors of columns [start, column), times the factor, to the sums of [column, stop).

    The sums are those of a block that begins at `start`.
    """
    count = column - start
    starts = tile.starts[: (stop - column + COLUMNS - 1) // COLUMNS * COLUMNS]
    pack(factor_II, start, count, column, stop, tile.packed, starts)
    add_to_sums(count, tile.delta, start, tile.packed, starts, COLUMNS, count, tile)


@routine
def sum_all_columns(h_II: Any, order: Any, tile: Any) -> None:
    """Makes the sums of a block of columns the errors of all columns, times H: a row of H is its column."""
    tile.sums[:] = 0
    width = h_II.shape[0]
    starts = tile.starts[: (order.size + COLUMNS - 1) // COLUMNS * COLUMNS]
    for panel in range(0, width, PANEL):
        for c in range(starts.size):  # sums beyond the last column are not used
            starts[c] = order[min(c, order.size - 1)] * width + panel
        count = min(PANEL, width - panel)
        add_to_sums(0, tile.delta, panel, h_II.ravel(), starts, 1, count, tile)


@routine
def add_changes(h_II: Any, order: Any, column: Any, end: Any, tile: Any) -> None:
    """Adds what changed in the columns of the block before, times H, to the sums of [column, end)."""
    starts = tile.starts[:COLUMNS]
    packed_starts(column, starts)
    for k in range(column):
        for c in range(COLUMNS):
            tile.packed[k * COLUMNS + c] = h_II[order[k], order[min(column + c, end - 1)]]
    add_to_sums(column, tile.changes, 0, tile.packed, starts, COLUMNS, column, tile)
