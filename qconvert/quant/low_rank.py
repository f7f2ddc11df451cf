"""Adds products of two narrow matrices to weights, as adapters (LoRA, DoRA) change them.

LoRA: Hu et al. 2021 (arXiv:2106.09685), W + scale B A; DoRA: Liu et al. 2024 (arXiv:2402.09353), rows of that
sum with lengths of their own. Every number is computed in one order, whatever rows it comes with.

R: rows of the weight, I: its columns, K: the rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows, Value
from qconvert.quant.casts import cast
from qconvert.quant.dequantize import numbers
from qconvert.quant.simd.lanes import kernel
from qconvert.quant.simd.products import COLUMNS, ROWS, add_product

_TILE = 256  # columns of which the right matrix and the sums stay in the nearest caches
_DOUBLE = np.float64(0)


def merged(
    value: Value,
    left_RK: np.ndarray,
    right_KI: np.ndarray,
    scale: float,
    lengths_R: np.ndarray | None,
    dtype: DType,
) -> DenseRows:
    """Returns `w + scale * left @ right`, its rows scaled to `lengths_R` if there are some, in `dtype`.

    It is rounded once: products and sums are in float32, one after another from the first of the K, and
    quantized weights are dequantized to float32 before. A float32 value is changed in place. `left_RK`
    [R, K], `right_KI` [K, I] and `lengths_R` [R] are float32.
    """
    w_RI = np.require(numbers(value, DType.F32).rows_RI, requirements=["C", "W"])
    left_RK, right_KI = np.ascontiguousarray(left_RK), np.ascontiguousarray(right_KI)
    if w_RI.size:
        _add_products(w_RI, left_RK, right_KI, np.float32(scale))
        if lengths_R is not None:
            _set_lengths(w_RI, np.ascontiguousarray(lengths_R))
    return cast(DenseRows(w_RI, DType.F32), dtype)[0]


@kernel
def _add_products(w_RI: Any, left_RK: Any, right_KI: Any, scale: Any) -> None:
    """Adds in tiles of columns, which are the lanes of the sums, `COLUMNS` rows of the weight at once."""
    rows, width = w_RI.shape
    rank = len(right_KI)
    left, starts = left_RK.reshape(-1), np.empty(COLUMNS, np.intp)
    panel, sums = np.empty(rank * _TILE, np.float32), np.empty(COLUMNS * _TILE, np.float32)
    for first in range(0, width, _TILE):
        count = min(_TILE, width - first)
        tile = (count + ROWS - 1) // ROWS * ROWS
        panel[:] = 0
        for k in range(rank):
            for i in range(count):
                panel[k * tile + i] = right_KI[k, first + i]
        for row in range(0, rows, COLUMNS):
            for c in range(COLUMNS):
                starts[c] = min(row + c, rows - 1) * rank
            sums[:] = 0
            add_product(sums, 0, panel, 0, tile, tile, left, starts, 1, rank)
            for c in range(min(COLUMNS, rows - row)):
                changed, added = w_RI[row + c, first : first + count], sums[c * tile : c * tile + count]
                for i in range(count):
                    changed[i] += scale * added[i]


@kernel
def _set_lengths(w_RI: Any, lengths_R: Any) -> None:
    rows, width = w_RI.shape
    for row in range(rows):
        total = _DOUBLE
        for i in range(width):
            total += np.float64(w_RI[row, i]) * np.float64(w_RI[row, i])
        factor = np.float32(np.float64(lengths_R[row]) / np.sqrt(total))
        for i in range(width):
            w_RI[row, i] *= factor
