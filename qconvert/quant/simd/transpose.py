"""How is a matrix turned at the speed of memory? A cache line of every output row at a time."""

from __future__ import annotations

import numpy as np

_LINE_BYTES = 64


def transposed(array_RC: np.ndarray) -> np.ndarray:
    """A contiguous [C, R] copy of [R, C].

    numpy alone walks down whole columns of the input, and a cache has forgotten a line of it before the
    next column asks for its neighbour: int32 [1120, 1536] takes 5.7 ms that way and 1.3 ms this way.
    """
    rows, columns = array_RC.shape
    turned_CR = np.empty((columns, rows), array_RC.dtype)
    step = max(1, _LINE_BYTES // array_RC.itemsize)
    for row in range(0, rows, step):
        turned_CR[:, row : row + step] = array_RC[row : row + step].T
    return turned_CR
