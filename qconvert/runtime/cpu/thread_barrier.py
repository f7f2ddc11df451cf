"""A barrier that the threads of a kernel wait at inside it.

A decode step has some hundred points where every thread needs what all have written. A barrier
takes under a microsecond when all run, where handing work to a sleeping thread takes fifty.
"""

from __future__ import annotations

from qconvert.runtime.cpu.simd import add_and_fetch, fetch, rest, routine

_SPINS = 2000
"""Looks at the counter before the processor is offered to others: some microseconds."""


@routine
def wait_for_all(arrived, size):  # type: ignore[no-untyped-def]
    """Wait until all `size` threads are here; `arrived` is the address of their int64 counter."""
    if size == 1:
        return
    count = add_and_fetch(arrived, 1)
    everyone = (count + size - 1) // size * size
    spins = 0
    while fetch(arrived) < everyone:
        spins += 1
        if spins > _SPINS:
            rest()
