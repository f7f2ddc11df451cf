"""Admits blocks of rows to threads, within a budget of memory and in the order in which their bytes come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from qconvert.plan.plan import Unit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of a unit's output, and the working memory they need in bytes."""

    unit: Unit
    start: int
    stop: int
    cost: int

    @property
    def alone(self) -> Sequence[Block]:
        """The blocks that are made by this one: itself, where it is none of several."""
        return (self,)


class Fetching(Protocol):
    """The blocks of a run in the order in which their bytes come, and their work once these are there."""

    @property
    def blocks(self) -> Sequence[Block]: ...

    def made(self, make: Callable[[Block], T], block: Block) -> T: ...

    def abort(self) -> None: ...


ReadAhead = Callable[["Sequence[Block]"], "AbstractContextManager[Fetching]"]
"""Fetches what blocks will read, while the context is open, from a source that is not on this disk."""


@dataclass(frozen=True, slots=True)
class _AtHand:
    """Blocks whose bytes are on this disk."""

    blocks: Sequence[Block]

    def made(self, make: Callable[[Block], T], block: Block) -> T:
        return make(block)

    def abort(self) -> None:
        """Nothing is under way."""


def at_hand(blocks: Sequence[Block]) -> AbstractContextManager[Fetching]:
    """The `ReadAhead` of sources on this disk: nothing is fetched."""
    return nullcontext(_AtHand(blocks))


def bounded(
    blocks: Sequence[Block],
    make: Callable[[Block], T],
    jobs: int,
    max_memory: int,
    ahead: ReadAhead = at_hand,
) -> Generator[T, None, None]:
    """Run `make` on every block with `jobs` threads, never admitting more than the budget at once."""
    with ahead(blocks) as fetching:
        waiting = iter(fetching.blocks)
        block = next(waiting, None)
        running: dict[Future[T], int] = {}
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while block is not None or running:
                    while block is not None and (
                        not running
                        or (len(running) < 2 * jobs and sum(running.values()) + block.cost <= max_memory)
                    ):
                        running[pool.submit(fetching.made, make, block)] = block.cost
                        block = next(waiting, None)
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        del running[future]
                        yield future.result()
            except BaseException:
                fetching.abort()  # else the threads below would wait for bytes that are not used
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
