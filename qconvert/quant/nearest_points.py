"""Finds the nearest number that a grid can store, sixteen rows at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.quant.point_grid import PointGrid
from qconvert.quant.simd.lanes import LANES, absolute, clamp, load, rounded_even, routine, splat, store, where

_ZERO = np.float32(0)


class Points(NamedTuple):
    """The levels of a `PointGrid` as kernels look them up.

    `uniform`: levels are consecutive integers, from `first` to `last`. `levels_T`, `middles_M` float32: all
    levels, and the middles between neighbours, followed by infinities up to one less than a power of two.
    """

    uniform: bool
    first: np.float32
    last: np.float32
    levels_T: np.ndarray
    middles_M: np.ndarray


def as_points(grid: PointGrid) -> Points:
    """Prepares the levels of a grid for kernels."""
    levels_T = np.ascontiguousarray(grid.levels_T, np.float32)
    first, last = levels_T[0], levels_T[-1]
    uniform = first == np.rint(first) and bool((np.diff(levels_T) == 1).all())
    middles_M = np.full((1 << (len(levels_T) - 1).bit_length()) - 1, np.inf, np.float32)
    middles_M[: len(levels_T) - 1] = (levels_T[1:] + levels_T[:-1]) / 2
    return Points(bool(uniform), first, last, levels_T, middles_M)


@routine
def nearest_point(wanted: Any, step: Any, shift: Any, points: Any, scratch: Any) -> Any:
    """Returns the codes of the levels nearest to sixteen numbers, and the numbers that those store, as lanes.

    Halves between integers go to the even one, halves in a table to the lower level. Where the step is 0, all
    levels store the shift: the code is that of the level nearest to 0. Not a number has a valid code too.
    `scratch`: float32 of two times `LANES`.
    """
    position = where(step == _ZERO, splat(_ZERO), (wanted - shift) / step)
    if points.uniform:
        level = clamp(rounded_even(position), points.first, points.last)
        return level - points.first, level * step + shift
    store(scratch, 0, position)
    for i in range(LANES):
        code = 0
        half = (points.middles_M.size + 1) >> 1
        while half:
            if points.middles_M[code + half - 1] < scratch[i]:
                code += half
            half >>= 1
        scratch[i], scratch[LANES + i] = np.float32(code), points.levels_T[code]
    return load(scratch, 0), load(scratch, LANES) * step + shift


@routine
def finite(lanes: Any) -> Any:
    """Returns finite numbers, and 0 for others: the error of a weight that no code can come near to."""
    return where(absolute(lanes) < np.float32(np.inf), lanes, splat(_ZERO))


@routine
def point(code: Any, step: Any, shift: Any, points: Any, scratch: Any) -> Any:
    """Returns the numbers that sixteen codes store, as lanes."""
    if points.uniform:
        return (code + points.first) * step + shift
    store(scratch, 0, code)
    for i in range(LANES):
        scratch[LANES + i] = points.levels_T[int(scratch[i])]
    return load(scratch, LANES) * step + shift
