"""Transposes a matrix at memory speed: a cache line of every output row at a time."""

from __future__ import annotations

import numpy as np

_LINE_BYTES = 64


def transposed(array_RC: np.ndarray) -> np.ndarray:
    """Returns a contiguous [C, R] copy of [R, C].

    numpy alone reads whole columns, and a line has left the cache before the next column needs it: int32
    [1120, 1536] takes 5.7 ms that way and 1.3 ms this way.
    """
    rows, columns = array_RC.shape
    transposed_CR = np.empty((columns, rows), array_RC.dtype)
    step = max(1, _LINE_BYTES // array_RC.itemsize)
    for row in range(0, rows, step):
        transposed_CR[:, row : row + step] = array_RC[row : row + step].T
    return transposed_CR
