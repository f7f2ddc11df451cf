"""Searches the scale and the lattice points of least error of a group, sixteen blocks at a time.

The counterpart of `qconvert.quant.ggml.search` for IQ2 and IQ3, whose magnitudes are `scale * (2 * code + 1)`
with the codes of every cell a point of a lattice. Tiles hold the odd numbers `2 * code + 1`, not the codes.
Each lane's float32 operations are those of ggml-quants.c, in its order. Source: iq2_find_best_neighbour,
iq3_find_best_neighbour and the search that all quantize_row_iq2_* and quantize_row_iq3_* repeat.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import (
    LANES,
    clamp,
    load,
    lowest,
    nearest,
    routine,
    splat,
    square_root,
    store,
    where,
)
from qconvert.quant.simd.lanes import first as first_lane

_ZERO, _HALF, _ONE, _TWO = (np.float32(number) for number in (0, 0.5, 1, 2))
_LARGEST = np.finfo(np.float32).max
_SIGN_CELL = 8  # elements whose signs share a byte
_BITS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float32)

# Which cells are placed again for the scale found: those off the lattice in the best trial; all, if one of
# them was; or all in any case.
OFF_LATTICE, ALL_IF_ANY, ALWAYS = 0, 1, 2


def trials_around(numerator: int, step: float, around: int) -> Any:
    """Returns trial scales in units of 1 / peak: `numerator` and `around` steps in either direction."""
    return np.float32(numerator) + np.float32(step) * np.arange(-around, around + 1).astype(np.float32)


@routine
def split_signs(
    x: np.ndarray, w: np.ndarray, sizes: np.ndarray, signs: np.ndarray, n: int, even: bool
) -> None:
    """Fills a tile with magnitudes, and `signs` with a byte per cell of 8: bit i is set where x is negative.

    With `even` the top bit is left out, as it makes the number of bits even: where that number is odd, the
    element of smallest weighted square changes its sign, and its magnitude is negative.
    """
    kept = _SIGN_CELL - 1 if even else _SIGN_CELL
    for start in range(0, n, _SIGN_CELL):
        bits, odd = splat(_ZERO), splat(_ZERO)
        least, which = splat(_ZERO), splat(_ZERO)
        for element in range(_SIGN_CELL):
            at = (start + element) * LANES
            value = load(x, at)
            negative = value < _ZERO
            store(sizes, at, where(negative, -value, value))
            odd = where(negative, _ONE - odd, odd)
            if element < kept:
                bits = where(negative, bits + _BITS[element], bits)
            square = load(w, at) * value * value
            if element == 0:
                least = square
            else:
                smaller = square < least
                least, which = (
                    where(smaller, square, least),
                    where(smaller, splat(np.float32(element)), which),
                )
        if even:
            for element in range(_SIGN_CELL):
                at = (start + element) * LANES
                changes = (odd > _ZERO) & (which == np.float32(element))
                size = load(sizes, at)
                store(sizes, at, where(changes, -size, size))
                if element < kept:
                    toggled = where(load(x, at) < _ZERO, bits - _BITS[element], bits + _BITS[element])
                    bits = where(changes, toggled, bits)
        store(signs, start // _SIGN_CELL * LANES, bits)


@routine
def largest(x: np.ndarray, n: int) -> Any:
    """Returns the largest number in every lane."""
    high = load(x, 0)
    for at in range(LANES, n * LANES, LANES):
        value = load(x, at)
        high = where(high > value, high, value)
    return high


@routine
def square_roots(w: np.ndarray, root: np.ndarray, n: int) -> None:
    """Fills a tile with square roots of weights, by which neighbours are chosen."""
    for at in range(0, n * LANES, LANES):
        store(root, at, square_root(load(w, at)))


@routine
def place(
    x: np.ndarray, root: np.ndarray, odds: np.ndarray, on: np.ndarray, n: int, cell: int, levels: int,
    spread: Any, step: Any, lattice: Any, lanes: np.ndarray,
) -> None:  # fmt: skip
    """Fills `odds` with the point of every cell for the scale `step`, which is 1 / `spread`.

    `on` becomes 1 for a cell whose rounded codes are a point, else 0; those take the neighbour of least error
    weighted by `root`. `lanes` is a tile of 2.
    """
    store(lanes, LANES, step)
    for start in range(0, n, cell):
        number, worth = splat(_ZERO), _ONE
        for element in range(start, start + cell):
            scaled = _HALF * (spread * load(x, element * LANES) - _ONE)
            code = clamp(nearest(scaled), _ZERO, np.float32(levels - 1))
            store(odds, element * LANES, code * _TWO + _ONE)
            number = number + code * worth
            worth = worth * np.float32(levels)
        store(lanes, 0, number)
        for k in range(LANES):
            p = np.int64(lanes[k])
            is_point = lattice.runs_P1[p] == lattice.runs_P1[p + 1]
            on[start // cell * LANES + k] = _ONE if is_point else _ZERO
            if not is_point:
                move(x, root, odds, start, cell, k, lanes[LANES + k], _ZERO, False, p, lattice)


@routine
def move(
    x: np.ndarray, w: np.ndarray, odds: np.ndarray, start: int, cell: int, k: int, scale: np.float32,
    middle: np.float32, ternary: bool, p: int, lattice: Any,
) -> None:  # fmt: skip
    """Moves the cell of one lane, whose codes are the digits of `p`, to its neighbour of least error.

    A number is `scale` times the odd number or, if `ternary`, times half of that plus `middle`. The first of
    equal neighbours is taken. (C gives up where all errors are infinite; the first is as good.)
    """
    neighbours = lattice.odds
    least, found = _LARGEST, lattice.runs_P1[p] * cell * LANES
    for run in range(lattice.runs_P1[p], lattice.runs_P1[p + 1]):
        at = run * cell * LANES
        error = splat(_ZERO)
        for element in range(cell):
            own = (start + element) * LANES + k
            number = load(neighbours, at + element * LANES)
            if ternary:
                number = number * _HALF + middle
            difference = scale * number - x[own]
            error = error + w[own] * difference * difference
        low = lowest(error)
        if low < least:
            least, found = low, at + first_lane(error == low)
    for element in range(cell):
        odds[(start + element) * LANES + k] = np.float32(neighbours[found + element * LANES])


@routine
def sums(x: np.ndarray, w: np.ndarray, odds: np.ndarray, n: int) -> Any:
    """Returns the weighted sums of x * odd and of odd * odd, as lanes."""
    sum_wxq, sum_wqq = splat(_ZERO), splat(_ZERO)
    for at in range(0, n * LANES, LANES):
        weight, odd = load(w, at), load(odds, at)
        sum_wxq = sum_wxq + weight * load(x, at) * odd
        sum_wqq = sum_wqq + weight * odd * odd
    return sum_wxq, sum_wqq


@routine
def fit_to_lattice(
    x: np.ndarray, w: np.ndarray, root: np.ndarray, n: int, cell: int, levels: int, trials: np.ndarray,
    peak: Any, scale: Any, again: int, lattice: Any, odds: np.ndarray, new: np.ndarray, on: np.ndarray,
    lanes: np.ndarray,
) -> Any:  # fmt: skip
    """Fills `odds` with the points of highest weighted correlation; returns the scale as lanes.

    The trial scales are `peak / trials`; `scale` is the result where all weights are 0. `again` is one of
    `OFF_LATTICE`, `ALL_IF_ANY` and `ALWAYS`. `new` is a tile of n, `on` one of two per cell.
    """
    cells = n // cell
    now, best_on = on[: cells * LANES], on[cells * LANES :]
    for at in range(0, n * LANES, LANES):
        store(odds, at, splat(_ONE))
    for at in range(0, cells * LANES, LANES):
        store(best_on, at, splat(_ONE if again == OFF_LATTICE else _ZERO))
    best = splat(_ZERO)
    for trial in trials:
        spread = trial / peak
        place(x, root, new, now, n, cell, levels, spread, _ONE / spread, lattice, lanes)
        sum_wxq, sum_wqq = sums(x, w, new, n)
        better = (sum_wqq > _ZERO) & (sum_wxq * sum_wxq > best * sum_wqq)
        scale = where(better, sum_wxq / sum_wqq, scale)
        best = where(better, scale * sum_wxq, best)
        for at in range(0, n * LANES, LANES):
            store(odds, at, where(better, load(new, at), load(odds, at)))
        if again != ALWAYS:
            for at in range(0, cells * LANES, LANES):
                store(best_on, at, where(better, load(now, at), load(best_on, at)))
    return _place_again(x, w, root, n, cell, levels, scale, again, lattice, odds, new, on, lanes)


@routine
def _place_again(
    x: np.ndarray, w: np.ndarray, root: np.ndarray, n: int, cell: int, levels: int, scale: Any, again: int,
    lattice: Any, odds: np.ndarray, new: np.ndarray, on: np.ndarray, lanes: np.ndarray,
) -> Any:  # fmt: skip
    """Places cells once more, for the scale found; returns the scale that fits the result best."""
    cells = n // cell
    now, best_on = on[: cells * LANES], on[cells * LANES :]
    place(x, root, new, now, n, cell, levels, _ONE / scale, scale, lattice, lanes)
    on_lattice = splat(_ZERO)
    for at in range(0, cells * LANES, LANES):
        on_lattice = on_lattice + load(best_on, at)
    moves = (scale > _ZERO) & (on_lattice < np.float32(cells))
    for start in range(0, n, cell):
        replaced = moves
        if again == OFF_LATTICE:
            replaced = moves & (load(best_on, start // cell * LANES) == _ZERO)
        for at in range(start * LANES, (start + cell) * LANES, LANES):
            store(odds, at, where(replaced, load(new, at), load(odds, at)))
    sum_wxq, sum_wqq = sums(x, w, odds, n)
    return where(moves & (sum_wqq > _ZERO), sum_wxq / sum_wqq, scale)


@routine
def above(peak: Any, nothing: np.float32) -> Any:
    """Returns the mask of lanes whose magnitudes are not all below `nothing`."""
    return where(peak < nothing, splat(_ZERO), splat(_ONE)) > _ZERO


@routine
def unsigned(scale: Any, used: Any, signs: np.ndarray, cells: int, bits: np.float32) -> Any:
    """Returns scales without their signs, which turn those of the elements; unused lanes become 0."""
    negative = scale < _ZERO
    for at in range(0, cells * LANES, LANES):
        stored = load(signs, at)
        store(signs, at, where(used, where(negative, bits - stored, stored), splat(_ZERO)))
    return where(used, where(negative, -scale, scale), splat(_ZERO))


@routine
def put_indices(
    odds: np.ndarray, n: int, cell: int, levels: int, used: Any, lattice: Any, indices: np.ndarray,
    first: int, lanes: np.ndarray,
) -> None:  # fmt: skip
    """Writes the lattice index of every cell to `indices` [cells, lanes], from cell `first` on.

    Lanes where the mask `used` is not set get index 0.
    """
    for start in range(0, n, cell):
        number, worth = splat(_ZERO), _HALF
        for at in range(start * LANES, (start + cell) * LANES, LANES):
            number = number + (load(odds, at) - _ONE) * worth
            worth = worth * np.float32(levels)
        store(lanes, 0, where(used, number, splat(_ZERO)))
        for k in range(LANES):
            indices[(first + start // cell) * LANES + k] = lattice.index_P[np.int64(lanes[k])]


@routine
def put_scale_codes(scales: np.ndarray, groups: int, top: int, unit: Any, codes: np.ndarray) -> None:
    """Writes the codes c, 0 to `top`, of the scales `unit * (2 * c + 1)` nearest to those of the groups.

    They are 0 where `unit` is.
    """
    inverse = _ONE / unit
    for at in range(0, groups * LANES, LANES):
        code = clamp(nearest(_HALF * (inverse * load(scales, at) - _ONE)), _ZERO, np.float32(top))
        store(codes, at, where(unit > _ZERO, code, splat(_ZERO)))
