"""Divides named tasks among processes that make one output together.

Which process begins with which task is a function of the tasks and the number of processes alone, so that
no process has to ask another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True, slots=True)
class Rank:
    """Process number `number`, counted from 0, of `world`."""

    number: int
    world: int


def is_divided(rank: Rank | None) -> TypeGuard[Rank]:
    """Whether there are other processes."""
    return rank is not None and rank.world > 1


def owners(costs: Mapping[str, int], world: int) -> dict[str, int]:
    """The number of the process that owns each task: the costliest first, each to the process with least.

    The costliest share is at most 4/3 of what any division could do (R. L. Graham, Bounds on multiprocessing
    timing anomalies, 1969).
    """
    held = [0] * world
    found = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = held.index(min(held))
        found[name] = least
        held[least] += costs[name]
    return found


def order(costs: Mapping[str, int], rank: Rank) -> list[str]:
    """All tasks in the order in which a process takes them: its own, then those of others, the last first.

    So two processes meet as late as they can.
    """
    owner = owners(costs, rank.world)
    own = [name for name in costs if owner[name] == rank.number]
    return [*own, *(name for name in reversed(list(costs)) if owner[name] != rank.number)]
