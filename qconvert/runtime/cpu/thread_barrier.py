"""Threads that run one kernel together, and meet inside it.

A decode step has some hundred points where every thread needs what all have written. Meeting there
takes under a microsecond when all run, where handing work to a sleeping thread takes fifty.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from qconvert.quant.simd.lanes import kernel
from qconvert.runtime.cpu.simd import add_and_fetch, fetch, rest, routine

_RELEASED = 1 << 62
"""A count beyond every meeting: nobody waits any more."""
_GLANCES = 2000
"""Looks at the counter before the processor is offered to others: some microseconds."""


@routine
def meet(turn, size):  # type: ignore[no-untyped-def]
    """Wait until all `size` threads are here; `turn` is the address of their int64 counter."""
    if size == 1:
        return
    count = add_and_fetch(turn, 1)
    everyone = min((count + size - 1) // size * size, _RELEASED)
    glances = 0
    while fetch(turn) < everyone:
        glances += 1
        if glances > _GLANCES:
            rest()


@kernel
def _meet(turn, size):  # type: ignore[no-untyped-def]
    meet(turn, size)


class Team:
    """As many threads as torch uses, this one among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = np.zeros(1, np.int64)

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work(rank)` in every thread; an error in one sets the others free and is raised."""
        self.turn[0] = 0
        jobs = [_pool(self.size).submit(self._guarded, work, rank) for rank in range(1, self.size)]
        try:
            self._guarded(work, 0)
        finally:
            for job in jobs:
                job.result()

    def meet(self) -> None:
        """Wait for the others from Python."""
        _meet(self.turn.ctypes.data, self.size)

    def _guarded(self, work: Callable[[int], None], rank: int) -> None:
        try:
            work(rank)
        except BaseException:
            self.turn[0] = _RELEASED
            raise


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="qconvert")
