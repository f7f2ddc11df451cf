"""Allocates weights one after the other, in large pages.

A token reads every weight of a model once, and a processor remembers where some thousand pages lie: in small
ones that is less than a layer of most models, and looking them up takes a fifth of decoding's time. Most
weights are smaller than a large page, or lie across the edges of two, unless they share them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qconvert.core.large_pages import AVAILABLE, in_large_pages
from qconvert.runtime.cpu.simd import LINE

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a tensor [n] of so many numbers, which are not set yet."""

LARGE_BY_ITSELF = 32 << 20
"""Bytes from which on an array that numpy has made lies in large pages, but for some of its edges: numpy asks
for them from 4 MB on. Copying one would take more time than it saves in some hundred tokens."""

_CHUNK = 64 << 20


def one_by_one(count: int, dtype: torch.dtype) -> Tensor:
    """As torch allocates: each by itself."""
    return torch.empty(count, dtype=dtype)


class WeightMemory:
    """Memory for weights that are made together and live as long as each other.

    It is taken in chunks of many weights; one is given back when the last tensor in it is gone.
    """

    def __init__(self) -> None:
        self._chunk, self._taken = memoryview(b""), 0

    def __call__(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor [count] that begins at a cache line."""
        nbytes = count * dtype.itemsize
        if not AVAILABLE or nbytes == 0:
            return one_by_one(count, dtype)
        if self._taken + nbytes > len(self._chunk):
            self._chunk, self._taken = memoryview(in_large_pages(max(nbytes, _CHUNK))), 0
        made = torch.frombuffer(self._chunk, dtype=torch.uint8, count=nbytes, offset=self._taken)
        self._taken += -(-nbytes // LINE) * LINE
        return made.view(dtype)
