"""Widens rows to float32 for kernels, as many at a time as a cache holds.

A kernel that read rows as they are stored would be compiled once for each of their dtypes, for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast
from qconvert.quant.simd.lanes import LANES, kernel, load, store

_NUMBERS = 1 << 17


def float32_panels(block: DenseRows, multiple: int = LANES) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields runs of the block's rows, and their numbers as float32 [rows of the run, columns], contiguous.

    Runs are multiples of `multiple` rows, but for the last one. Numbers in float32 are all yielded at once,
    as they are; others in memory that the next run overwrites. Those of float64 are rounded, to infinity
    where they exceed float32.
    """
    rows, width = block.rows_RI.shape
    if block.dtype is DType.F32:
        yield slice(0, rows), np.ascontiguousarray(block.rows_RI)
        return
    step = max(multiple, _NUMBERS // max(1, width) // multiple * multiple)
    wide_RI = np.empty((min(rows, step), width), np.float32)
    for first in range(0, rows, step):
        run = slice(first, min(first + step, rows))
        yield run, _widened(DenseRows(block.rows_RI[run], block.dtype), wide_RI)


def _widened(block: DenseRows, wide_RI: np.ndarray) -> np.ndarray:
    if block.dtype is DType.F64:
        return cast(block, DType.F32)[0].rows_RI
    words, wide = np.ascontiguousarray(block.rows_RI).reshape(-1), wide_RI[: block.rows].reshape(-1)
    whole = words.size // LANES * LANES
    _widen(words[:whole].view(np.int16) if block.dtype is DType.F16 else words[:whole], wide)
    if whole < words.size:
        wide[whole:] = cast(DenseRows(words[None, whole:], block.dtype), DType.F32)[0].rows_RI[0]
    return wide_RI[: block.rows]


@kernel
def _widen(words: Any, wide: Any) -> None:
    """Writes words, in the dtypes of `lanes.load` and whole lanes of them, as float32."""
    for i in range(0, words.size, LANES):
        store(wide, i, load(words, i))
