"""Runs one kernel in several threads, with a barrier that they wait at inside it.

A decode step has some hundred points where every thread needs what all have written. A barrier
takes under a microsecond when all run, where handing work to a sleeping thread takes fifty.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from qconvert.runtime.cpu.openmp_threads import call_in_openmp
from qconvert.runtime.cpu.simd import add_and_fetch, fetch, rest, routine

_RELEASED = 1 << 62
"""A count beyond every barrier: no thread waits any more."""
_SPINS = 2000
"""Looks at the counter before the processor is offered to others: some microseconds."""


@routine
def wait_for_all(arrived, size):  # type: ignore[no-untyped-def]
    """Wait until all `size` threads are here; `arrived` is the address of their int64 counter."""
    if size == 1:
        return
    count = add_and_fetch(arrived, 1)
    everyone = min((count + size - 1) // size * size, _RELEASED)
    spins = 0
    while fetch(arrived) < everyone:
        spins += 1
        if spins > _SPINS:
            rest()


class ThreadTeam:
    """As many threads as torch uses, this one among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived = np.zeros(1, np.int64)

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work(rank)` in every thread; an error in one sets the others free and is raised."""
        self.arrived[0] = 0
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                self.arrived[0] = _RELEASED
                errors.append(error)

        if self.size == 1:
            guarded(0)
        elif not call_in_openmp(self.size, guarded):
            jobs = [_pool(self.size).submit(guarded, rank) for rank in range(1, self.size)]
            guarded(0)
            for job in jobs:
                job.result()
        if errors:
            raise errors[0]


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="qconvert")
