"""Gathers sixteen blocks into a tile and scatters them back; computes the weights of their elements.

A tile is a flat float32 array [elements, lanes]: element e of the block in lane k is `tile[16 * e + k]`.
`starts` holds the index of every block's first element. Where fewer than sixteen blocks are left, the last
one is repeated in the other lanes; writing it again changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import LANES, absolute, load, load_columns, routine, splat, square_root, store

_ZERO = np.float32(0)
_RUNS = np.arange(LANES, dtype=np.intp) * LANES


@routine
def tile(elements: int) -> np.ndarray:
    """Returns an uninitialised tile."""
    return np.empty(elements * LANES, np.float32)


@routine
def consecutive(starts: np.ndarray, first: int, count: int, size: int) -> None:
    """Fills `starts` with the blocks `first` to `first + 15` of `count`, of `size` elements each."""
    for lane in range(LANES):
        starts[lane] = min(first + lane, count - 1) * size


@routine
def stacked(starts: np.ndarray, first: int, count: int, width: int, column: int) -> None:
    """Fills `starts` with the blocks at `column` of the rows `first` to `first + 15` of `count`."""
    for lane in range(LANES):
        starts[lane] = min(first + lane, count - 1) * width + column


@routine
def gather(rows: np.ndarray, starts: np.ndarray, n: int, x: np.ndarray) -> None:
    """Fills a tile with `n` elements of every block."""
    for element in range(0, n, LANES):
        load_columns(rows, starts, element, x, element * LANES, LANES)


@routine
def scatter(x: np.ndarray, n: int, blocks: np.ndarray) -> None:
    """Writes a tile block by block: element e of lane k goes to `blocks[n * k + e]`."""
    for element in range(0, n, LANES):
        load_columns(x, _RUNS, element * LANES, blocks, element, n)


@routine
def row_variance(rows: np.ndarray, starts: np.ndarray, width: int) -> Any:
    """Returns the mean of the squares of `width` elements from every start on, summed in their order."""
    total = splat(_ZERO)
    x = tile(LANES)
    for element in range(0, width, LANES):
        load_columns(rows, starts, element, x, 0, LANES)
        total = add_squares(total, x, LANES)
    return total / np.float32(width)


@routine
def add_squares(total: Any, x: np.ndarray, n: int) -> Any:
    """Returns lanes `total` plus the squares of a tile's `n` elements, added one after the other."""
    for at in range(0, n * LANES, LANES):
        value = load(x, at)
        total = total + value * value
    return total


@routine
def weigh_by_magnitude(x: np.ndarray, w: np.ndarray, n: int) -> None:
    """Sets weights to abs(x): Q2_K without importance."""
    for at in range(0, n * LANES, LANES):
        store(w, at, absolute(load(x, at)))


@routine
def weigh_by_size(x: np.ndarray, w: np.ndarray, n: int) -> None:
    """Sets weights to rms(block) + abs(x): Q4_K and Q5_K without importance."""
    average = square_root(add_squares(splat(_ZERO), x, n) / np.float32(n))
    for at in range(0, n * LANES, LANES):
        store(w, at, average + absolute(load(x, at)))


@routine
def weigh_by_square(x: np.ndarray, w: np.ndarray, n: int) -> None:
    """Sets weights to x * x: the symmetric searches without importance."""
    for at in range(0, n * LANES, LANES):
        value = load(x, at)
        store(w, at, value * value)


@routine
def weigh_by_importance(
    x: np.ndarray, w: np.ndarray, importance: np.ndarray, column: int, n: int, variance: Any
) -> None:
    """Sets weights to importance * sqrt(variance + x * x), `importance` of `n` columns from `column` on."""
    for element in range(n):
        value = load(x, element * LANES)
        store(w, element * LANES, importance[column + element] * square_root(variance + value * value))


@routine
def weigh_by_column(w: np.ndarray, importance: np.ndarray, column: int, n: int) -> None:
    """Sets weights to `importance` alone: Q6_K."""
    for element in range(n):
        store(w, element * LANES, splat(importance[column + element]))


@routine
def sum_of(w: np.ndarray, n: int) -> Any:
    """Returns the sum of a tile's `n` elements in their order."""
    total = splat(_ZERO)
    for at in range(0, n * LANES, LANES):
        total = total + load(w, at)
    return total
