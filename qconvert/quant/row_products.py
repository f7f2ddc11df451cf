"""Computes a H b^T for many rows at once, each the same whatever rows it comes with."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import kernel
from qconvert.quant.simd.products import COLUMNS, PANEL, ROWS, add_product, pack, rows_as_lanes

_BLOCK = 128  # columns of the matrix that are multiplied at once
_TILE = 128  # rows that share what is read of the matrix


def row_products(a_RI: np.ndarray, matrix_II: np.ndarray, b_RI: np.ndarray) -> np.ndarray:
    """a M b^T of every row: float32 [R, I], [I, I], [R, I] to float64 [R].

    Sums of up to 256 products are in float32, sums of those in float64.
    """
    totals_R = np.zeros(len(a_RI), np.float64)
    a_RI, b_RI = np.ascontiguousarray(a_RI, np.float32), np.ascontiguousarray(b_RI, np.float32)
    _add_row_products(a_RI, np.ascontiguousarray(matrix_II, np.float32), b_RI, totals_R)
    return totals_R


@kernel
def _add_row_products(a_RI: Any, matrix_II: Any, b_RI: Any, totals_R: Any) -> None:
    rows, width = a_RI.shape
    tile = min(_TILE, (rows + ROWS - 1) // ROWS * ROWS)
    a, sums = np.empty(width * tile, np.float32), np.empty(_BLOCK * tile, np.float32)
    packed, starts = np.empty(_BLOCK * PANEL, np.float32), np.empty(_BLOCK, np.intp)
    for first in range(0, rows, tile):
        rows_as_lanes(a_RI, first, tile, a)
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            for panel in range(0, width, PANEL):
                count = min(PANEL, width - panel)
                sums[:] = 0
                pack(matrix_II, panel, count, start, stop, packed, starts)
                add_product(sums, 0, a, panel * tile, tile, tile, packed, starts, COLUMNS, count)
                for row in range(min(tile, rows - first)):
                    total = 0.0
                    for j in range(start, stop):
                        total += np.float64(sums[(j - start) * tile + row]) * np.float64(b_RI[first + row, j])
                    totals_R[first + row] += total
