"""One row of x times a large matrix, in float32, at the speed of reading the matrix once.

torch multiplies 16- and 8-bit weights by few rows only with results rounded to 16 bits. Legend:
O out features (rows of the matrix), I in features.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.lanes import LANES, kernel, lane, load, routine, splat

_CHAINS = 4
"""Sums kept side by side, which hides the latency of an addition. They lie along the row: the
matrix is then read from front to back, which memory does fastest."""


def multiply_row(x_I: Tensor, w_OI: Tensor) -> Tensor:
    """`W x`, float32 [O], of CPU tensors: x float32, W bfloat16 or uint8 (whole numbers), contiguous.

    I must be a multiple of 16. Rows are divided among as many threads as torch uses.
    """
    x, w_OI = x_I.numpy(), w_OI.view(torch.uint16) if w_OI.dtype == torch.bfloat16 else w_OI
    w, out = w_OI.numpy().reshape(-1), len(w_OI)
    y = np.empty(out, np.float32)
    threads = torch.get_num_threads()
    bounds = [out * i // threads for i in range(threads + 1)]
    jobs = [_pool(threads).submit(_rows, x, w, y, *part) for part in pairwise(bounds[1:])]
    _rows(x, w, y, 0, bounds[1])
    for job in jobs:
        job.result()
    return torch.from_numpy(y)


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@kernel
def _rows(x, w, y, start, stop):  # type: ignore[no-untyped-def]
    """y[start:stop] of `y = W x`."""
    width = len(x)
    even = width - width % (_CHAINS * LANES)
    for row in range(start, stop):
        at = row * width
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for i in range(0, even, _CHAINS * LANES):
            a = a + load(x, i) * load(w, at + i)
            b = b + load(x, i + LANES) * load(w, at + i + LANES)
            c = c + load(x, i + 2 * LANES) * load(w, at + i + 2 * LANES)
            d = d + load(x, i + 3 * LANES) * load(w, at + i + 3 * LANES)
        for i in range(even, width, LANES):
            a = a + load(x, i) * load(w, at + i)
        y[row] = _total((a + b) + (c + d))  # type: ignore[no-untyped-call]


@routine
def _total(lanes):  # type: ignore[no-untyped-def]
    """The sum of the lanes, one after the other."""
    total = np.float32(0)
    for i in range(LANES):
        total += lane(lanes, i)
    return total
