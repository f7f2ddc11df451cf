"""Chooses codes one column after another, each making up for the errors of those before (GPTQ).

With H = M D M^T of `hessian.factor` (M unit upper triangular) and errors delta = w - q, the loss of a row is

    delta H delta^T = sum_j D_j (delta_j + sum_{k<j} delta_k M_kj)^2

and rounding w_j + sum_{k<j} delta_k M_kj makes every term as small as it can be given those before. That is
GPTQ (Frantar et al., arXiv 2210.17323) and LDLQ (Chee et al., arXiv 2307.13304), or Babai's nearest plane
(Chen et al., arXiv 2507.18553); W itself is never changed, and nothing is inverted. `sweep` then changes one
code of a row at a time while that lowers its loss (coordinate descent: CDQuant, arXiv 2406.17542).

Rows are lanes and a sum is one chain over k (`simd.products`): codes do not depend on how rows are cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.nearest_points import as_points, nearest_point, point, spread_groups
from qconvert.quant.point_grid import PointGrid
from qconvert.quant.simd.lanes import LANES, absolute, kernel, load, routine, splat, store, where
from qconvert.quant.simd.products import COLUMNS, PANEL, ROWS, add_product, fused, pack, packed_starts

_BLOCK = 128  # columns between two products with all columns before
_TILE = 128  # rows that share what is read of the factor
_ZERO = np.float32(0)


def round_with_feedback(
    w_RI: np.ndarray, order_I: np.ndarray, factor_II: np.ndarray, grid: PointGrid
) -> np.ndarray:
    """Chooses the codes of rows, column after column in the given order.

    `w_RI` float32 [R, I]; `order_I` and `factor_II` as `hessian.factor` returns them (the factor is in that
    order, weights and codes are not). Returns uint8 [R, I]: indices into `grid.levels_T`.
    """
    codes_RI = np.empty(w_RI.shape, np.uint8)
    w_RI, factor_II = np.ascontiguousarray(w_RI, np.float32), np.ascontiguousarray(factor_II, np.float32)
    _round_rows(w_RI, order_I, factor_II, as_points(grid), *_scales(grid, w_RI.shape), grid.size, codes_RI)
    return codes_RI


def sweep(
    w_RI: np.ndarray,
    codes_RI: np.ndarray,
    h_II: np.ndarray,
    order_I: np.ndarray,
    grid: PointGrid,
    sweeps: int,
    damping: float = 0.01,
) -> np.ndarray:
    """Improves the codes of rows, one column after another in the given order, `sweeps` times.

    `w_RI` float32 [R, I], `codes_RI` uint8 [R, I]; `h_II` float32 [I, I], symmetric, in the order of the
    weights' columns. `damping` times the mean of its diagonal is added to it, as `hessian.factor` does, so that
    sweeps go on lowering what feedback lowered, delta (H + lambda I) delta^T; they never raise it. Returns
    uint8 [R, I].
    """
    swept_RI = np.array(codes_RI, np.uint8, order="C")
    w_RI, h_II = np.ascontiguousarray(w_RI, np.float32), np.ascontiguousarray(h_II, np.float32)
    damped = np.float32(damping * h_II.diagonal().mean(dtype=np.float64))
    _sweep_rows(
        w_RI,
        order_I,
        h_II.reshape(-1),
        damped,
        as_points(grid),
        *_scales(grid, w_RI.shape),
        grid.size,
        sweeps,
        swept_RI,
    )
    return swept_RI


def nearest_codes(w_RI: np.ndarray, grid: PointGrid) -> np.ndarray:
    """Chooses the code nearest to every weight: float32 [R, I] to uint8 [R, I]."""
    codes_RI = np.empty(w_RI.shape, np.uint8)
    w_RI = np.ascontiguousarray(w_RI, np.float32)
    _round_nearest(w_RI, as_points(grid), *_scales(grid, w_RI.shape), grid.size, codes_RI)
    return codes_RI


def _scales(grid: PointGrid, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rows, width = shape
    assert grid.steps_RG.shape == grid.shifts_RG.shape == (rows, -(-width // grid.size))
    steps_RG = np.ascontiguousarray(grid.steps_RG, np.float32)
    return steps_RG, np.ascontiguousarray(grid.shifts_RG, np.float32)


class _Tile(NamedTuple):
    """Working memory for `size` rows as lanes: flat arrays [columns or groups, size].

    `delta` has all columns, `sums` and `changes` those of a block.
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
def _make_tile(rows: Any, width: Any, groups: Any) -> Any:
    size = min(_TILE, (rows + ROWS - 1) // ROWS * ROWS)
    return _Tile(
        size,
        np.empty(width * size, np.float32),
        np.empty(_BLOCK * size, np.float32),
        np.empty(_BLOCK * size, np.float32),
        np.empty(groups * size, np.float32),
        np.empty(groups * size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.uint8),
        np.empty(_BLOCK * PANEL, np.float32),
        np.empty(_BLOCK, np.intp),
        np.empty(2 * LANES, np.float32),
    )


@kernel
def _round_rows(
    w_RI: Any,
    order_I: Any,
    factor_II: Any,
    points: Any,
    steps_RG: Any,
    shifts_RG: Any,
    group: Any,
    codes_RI: Any,
) -> None:
    rows, width = w_RI.shape
    tile = _make_tile(rows, width, steps_RG.shape[1])
    for first in range(0, rows, tile.size):
        spread_groups(steps_RG, first, tile.size, tile.steps)
        spread_groups(shifts_RG, first, tile.size, tile.shifts)
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            _add_columns_before(factor_II, start, stop, tile)
            for column in range(start, stop, COLUMNS):
                end, count = min(column + COLUMNS, stop), column - start
                pack(factor_II, start, count, column, end, tile.packed)
                starts = tile.starts[:COLUMNS]
                packed_starts(count, starts)
                at = start * tile.size
                add_product(
                    tile.sums,
                    count * tile.size,
                    tile.size,
                    tile.delta,
                    at,
                    tile.packed,
                    starts,
                    COLUMNS,
                    count,
                )
                for j in range(column, end):
                    _round_column(w_RI, first, order_I[j], j, start, group, points, tile, codes_RI)
                    _pass_on(factor_II[j], j, end, start, tile)


@routine
def _add_columns_before(factor_II: Any, start: Any, stop: Any, tile: Any) -> None:
    """Fills the sums of columns [start, stop) with the errors of all columns before, times the factor."""
    tile.sums[:] = 0
    for panel in range(0, start, PANEL):
        count = min(PANEL, start - panel)
        pack(factor_II, panel, count, start, stop, tile.packed)
        packed_starts(count, tile.starts)
        at = panel * tile.size
        add_product(tile.sums, 0, tile.size, tile.delta, at, tile.packed, tile.starts, COLUMNS, count)


@routine
def _load_column(w_RI: Any, codes_RI: Any, first: Any, k: Any, tile: Any) -> None:
    for row in range(min(tile.size, w_RI.shape[0] - first)):
        tile.w[row], tile.codes[row] = w_RI[first + row, k], codes_RI[first + row, k]


@routine
def _store_column(codes_RI: Any, first: Any, k: Any, tile: Any) -> None:
    for row in range(min(tile.size, codes_RI.shape[0] - first)):
        codes_RI[first + row, k] = tile.codes[row]


@routine
def _round_column(
    w_RI: Any, first: Any, k: Any, j: Any, start: Any, group: Any, points: Any, tile: Any, codes_RI: Any
) -> None:
    """Chooses the codes of column k of the weights, the j-th in order."""
    for row in range(min(tile.size, w_RI.shape[0] - first)):
        tile.w[row] = w_RI[first + row, k]
    scale, at = k // group * tile.size, (j - start) * tile.size
    for row in range(0, tile.size, LANES):
        step, shift = load(tile.steps, scale + row), load(tile.shifts, scale + row)
        w = load(tile.w, row)
        code, stored = nearest_point(w + load(tile.sums, at + row), step, shift, points, tile.scratch)
        store(tile.codes, row, code)
        store(tile.delta, j * tile.size + row, w - stored)
    _store_column(codes_RI, first, k, tile)


@routine
def _pass_on(factor_I: Any, j: Any, end: Any, start: Any, tile: Any) -> None:
    """Adds the error of column j to the sums of the next ones before `end`."""
    for row in range(0, tile.size, LANES):
        error = load(tile.delta, j * tile.size + row)
        for later in range(j + 1, end):
            at = (later - start) * tile.size + row
            store(tile.sums, at, fused(error, splat(factor_I[later]), load(tile.sums, at)))


@kernel
def _sweep_rows(
    w_RI: Any,
    order_I: Any,
    h: Any,
    damped: Any,
    points: Any,
    steps_RG: Any,
    shifts_RG: Any,
    group: Any,
    sweeps: Any,
    codes_RI: Any,
) -> None:
    rows, width = w_RI.shape
    tile = _make_tile(rows, width, steps_RG.shape[1])
    for first in range(0, rows, tile.size):
        spread_groups(steps_RG, first, tile.size, tile.steps)
        spread_groups(shifts_RG, first, tile.size, tile.shifts)
        for k in range(width):
            _start_error(w_RI, first, k, group, points, tile, codes_RI)
        for _ in range(sweeps):
            for start in range(0, width, _BLOCK):
                order = order_I[start : min(start + _BLOCK, width)]
                _add_all_columns(h, order, tile)
                for at in range(0, order.size, COLUMNS):
                    _add_changes(h, order, at, tile)
                    end = min(at + COLUMNS, order.size)
                    for j in range(at, end):
                        k = order[j]
                        _improve_column(
                            w_RI, first, k, j, h[k * width + k], damped, group, points, tile, codes_RI
                        )
                        _pass_change_on(h, order, j, end, tile)


@routine
def _start_error(w_RI: Any, first: Any, k: Any, group: Any, points: Any, tile: Any, codes_RI: Any) -> None:
    _load_column(w_RI, codes_RI, first, k, tile)
    scale = k // group * tile.size
    for row in range(0, tile.size, LANES):
        step, shift = load(tile.steps, scale + row), load(tile.shifts, scale + row)
        stored = point(load(tile.codes, row), step, shift, points, tile.scratch)
        store(tile.delta, k * tile.size + row, load(tile.w, row) - stored)


@routine
def _fill_starts(order: Any, at: Any, count: Any, width: Any, offset: Any, starts: Any) -> Any:
    """Fills where rows of H begin, the last one repeated up to whole steps of a product; returns them."""
    whole = starts[: (count + COLUMNS - 1) // COLUMNS * COLUMNS]
    for c in range(whole.size):
        whole[c] = order[at + min(c, count - 1)] * width + offset
    return whole


@routine
def _add_all_columns(h: Any, order: Any, tile: Any) -> None:
    """Fills the sums of a block of columns with the errors of all columns, times H."""
    tile.sums[:] = 0
    width = tile.delta.size // tile.size
    for panel in range(0, width, PANEL):
        starts = _fill_starts(order, 0, order.size, width, panel, tile.starts)
        count = min(PANEL, width - panel)
        add_product(tile.sums, 0, tile.size, tile.delta, panel * tile.size, h, starts, 1, count)


@routine
def _add_changes(h: Any, order: Any, at: Any, tile: Any) -> None:
    """Adds the changes of the errors of the columns before, of the same block, times H."""
    width = tile.delta.size // tile.size
    for k in range(at):
        for c in range(COLUMNS):
            j = min(at + c, order.size - 1)
            tile.packed[k * COLUMNS + c] = h[order[j] * width + order[k]]
    starts = tile.starts[:COLUMNS]
    packed_starts(at, starts)
    add_product(tile.sums, at * tile.size, tile.size, tile.changes, 0, tile.packed, starts, COLUMNS, at)


@routine
def _improve_column(
    w_RI: Any,
    first: Any,
    k: Any,
    j: Any,
    diagonal: Any,
    damped: Any,
    group: Any,
    points: Any,
    tile: Any,
    codes_RI: Any,
) -> None:
    """Chooses the codes of column k of the weights, the j-th of a block, given all others."""
    _load_column(w_RI, codes_RI, first, k, tile)
    scale, at = k // group * tile.size, j * tile.size
    for row in range(0, tile.size, LANES):
        step, shift = load(tile.steps, scale + row), load(tile.shifts, scale + row)
        w, before = load(tile.w, row), load(tile.delta, k * tile.size + row)
        gradient = fused(before, splat(damped), load(tile.sums, at + row))
        best = before - gradient / splat(diagonal + damped)
        code, stored = nearest_point(w - best, step, shift, points, tile.scratch)
        after = w - stored
        better = absolute(after - best) < absolute(before - best)
        after = where(better, after, before)
        store(tile.codes, row, where(better, code, load(tile.codes, row)))
        store(tile.delta, k * tile.size + row, after)
        store(tile.changes, at + row, after - before)
    _store_column(codes_RI, first, k, tile)


@routine
def _pass_change_on(h: Any, order: Any, j: Any, end: Any, tile: Any) -> None:
    """Adds the change of the j-th column's error to the sums of the next ones of the block before `end`."""
    width = tile.delta.size // tile.size
    for row in range(0, tile.size, LANES):
        change = load(tile.changes, j * tile.size + row)
        for later in range(j + 1, end):
            at = later * tile.size + row
            factor = splat(h[order[later] * width + order[j]])
            store(tile.sums, at, fused(change, factor, load(tile.sums, at)))


@kernel
def _round_nearest(w_RI: Any, points: Any, steps_RG: Any, shifts_RG: Any, group: Any, codes_RI: Any) -> None:
    rows, width = w_RI.shape
    scratch, w = np.empty(2 * LANES, np.float32), np.zeros(LANES, np.float32)
    codes = np.empty(LANES, np.uint8)
    for row in range(rows):
        for g in range(steps_RG.shape[1]):
            step, shift = splat(steps_RG[row, g]), splat(shifts_RG[row, g])
            end = min(width, (g + 1) * group)
            for column in range(g * group, end, LANES):
                count = min(LANES, end - column)
                w[:count] = w_RI[row, column : column + count]
                code, _ = nearest_point(load(w, 0), step, shift, points, scratch)
                store(codes, 0, code)
                codes_RI[row, column : column + count] = codes[:count]
