"""Lists the points of the lattices that IQ1, IQ2 and IQ3 blocks index, and the neighbours of all others.

A cell is 8 (IQ1, IQ2) or 4 (IQ3) consecutive elements of a block; its codes, 0 to `levels - 1` each, are the
digits of a number below `levels**cell`, the first one the lowest. A lattice has 256 to 2048 of these; codes
off it move to one of their neighbours, the points at the smallest few distances. Source: iq2xs_init_impl and
iq3xs_init_impl in ggml-quants.c; the points themselves are those of the gguf package.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

LANES = 16
# Distances whose points are neighbours (nwant).
_DISTANCES = {"IQ1_S": 3, "IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3}


class Lattice(NamedTuple):
    """What kernels read of a lattice. P: numbers of cells, C: elements of a cell, N: runs of neighbours."""

    index_P: np.ndarray
    """int32: the stored index of the point with these digits, -1 where there is none."""
    runs_P1: np.ndarray
    """int32: a cell's runs of neighbours are `runs[p]` to `runs[p + 1] - 1`; points have none."""
    odds: np.ndarray
    """uint8 [N * C * 16], flat: `2 * code + 1` of sixteen neighbours, by element; the last one repeated."""


@lru_cache
def lattice(type_name: str) -> Lattice:
    """Returns the lattice of an IQ1, IQ2 or IQ3 type; IQ1_M shares that of IQ1_S."""
    name = "IQ1_S" if type_name == "IQ1_M" else type_name
    points_GC = _points(name)
    levels, cell = int(points_GC.max()) + 1, points_GC.shape[1]
    place_C = levels ** np.arange(cell)
    index_P = np.full(levels**cell, -1, np.int32)
    index_P[points_GC @ place_C] = np.arange(len(points_GC))
    off_O = np.flatnonzero(index_P < 0)
    cells_OC = off_O[:, None] // place_C % levels
    row_M, point_M = _neighbours(cells_OC, points_GC, _DISTANCES[name])
    count_O = np.bincount(row_M, minlength=len(off_O))
    runs_O = -(-count_O // LANES)
    runs_P1 = np.zeros(levels**cell + 1, np.int32)
    runs_P1[off_O + 1] = runs_O
    last_O = np.cumsum(count_O) - 1
    run_N = np.repeat(np.arange(len(off_O)), runs_O)
    offset_N = np.arange(len(run_N)) - np.repeat(np.cumsum(runs_O) - runs_O, runs_O)
    first_N = (last_O + 1 - count_O)[run_N] + offset_N * LANES
    listed_NL = np.minimum(first_N[:, None] + np.arange(LANES), last_O[run_N][:, None])
    odds_NCL = (2 * points_GC + 1)[point_M[listed_NL]].transpose(0, 2, 1)
    return Lattice(index_P, np.cumsum(runs_P1, dtype=np.int32), odds_NCL.astype(np.uint8).reshape(-1))


def lattice_numbers(type_name: str) -> np.ndarray:
    """Returns the numbers of the points of a type, float32 [points, cell], in the order of their indices."""
    from gguf import quants

    stored = getattr(quants, "IQ1_S" if type_name == "IQ1_M" else type_name)
    stored.init_grid()
    numbers: np.ndarray = stored.grid.reshape(-1, stored.grid.shape[-1]).astype(np.float32)
    return numbers


def _points(name: str) -> np.ndarray:
    """Returns the codes of the points, int64 [points, cell], in the order of their indices."""
    numbers = lattice_numbers(name)
    codes: np.ndarray = np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)
    return codes


def _neighbours(cells_OC: np.ndarray, points_GC: np.ndarray, distances: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of cells and their neighbours' indices, sorted by row, then distance, then index."""
    # Small integers, so that the products are exact and the faster float32 ones.
    cells, points = cells_OC.astype(np.float32), points_GC.astype(np.float32)
    squares_OG = (cells**2).sum(axis=1)[:, None] + (points**2).sum(axis=1) - 2 * (cells @ points.T)
    farthest_O = squares_OG.min(axis=1)
    for _ in range(distances - 1):
        beyond_OG = np.where(squares_OG > farthest_O[:, None], squares_OG, np.inf)
        farthest_O = beyond_OG.min(axis=1)
    row_M, point_M = np.nonzero(squares_OG <= farthest_O[:, None])
    order_M = np.lexsort((point_M, squares_OG[row_M, point_M], row_M))
    return row_M[order_M], point_M[order_M]


def nearest_points(type_name: str) -> np.ndarray:
    """Returns the index of a nearest point for every combination of codes, int32 [levels**cell].

    A combination is the number whose digits are the codes, the first one the lowest.
    """
    points = lattice(type_name)
    nearest_P: np.ndarray = points.index_P.copy()
    odds_NCL = points.odds.reshape(points.runs_P1[-1], -1, LANES)
    cell = odds_NCL.shape[1]
    place_C = round(len(nearest_P) ** (1 / cell)) ** np.arange(cell)
    off_O = np.flatnonzero(nearest_P < 0)
    # Neighbours begin with the nearest.
    nearest_P[off_O] = points.index_P[(odds_NCL[points.runs_P1[off_O], :, 0] // 2) @ place_C]
    return nearest_P
