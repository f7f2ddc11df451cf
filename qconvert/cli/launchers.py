"""Finds out which of several processes this one is: by --rank, or by what a launcher tells."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from qconvert.core.ranks import Rank

F = TypeVar("F", bound=Callable[..., Any])

TORCHRUN = ("RANK", "WORLD_SIZE", "")
# A process's number, how many there are, and the number of the first, as launchers give them.
LAUNCHERS = (
    TORCHRUN,
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
)
AUTO = "auto"


class RankType(click.ParamType):  # type: ignore[type-arg]
    """I/N, or `auto`: what a launcher has put into the environment."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Rank:
        if isinstance(value, Rank):
            return value
        if value == AUTO:
            found = launched(os.environ, LAUNCHERS)
            if found is None:
                names = ", ".join(f"{number} and {world}" for number, world, _ in LAUNCHERS)
                self.fail(f"auto: the environment has none of {names}", param, ctx)
            return found
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(value))
        if match is None or not int(match[1]) < int(match[2]):
            self.fail(f"{value!r} is not a rank; write 0/4 to 3/4 for four processes, or {AUTO}", param, ctx)
        return Rank(int(match[1]), int(match[2]))


def _launched_by_torchrun() -> Rank | None:
    return launched(os.environ, (TORCHRUN,))


rank_option = click.option(
    "--rank",
    type=RankType(),
    default=_launched_by_torchrun,
    show_default="torchrun's",
    metavar="I/N|auto",
    help="Be process I (from 0) of N that make the output together; auto asks Slurm and MPI as well.",
)


def launched(environment: Mapping[str, str], launchers: tuple[tuple[str, str, str], ...]) -> Rank | None:
    """The rank that a launcher has given this process; None where there is no launcher."""
    for number, world, first in launchers:
        values = [environment.get(name, "") for name in (number, world)]
        if all(re.fullmatch(r"\d{1,6}", value) for value in values):
            begin = environment.get(first, "0")
            rank = Rank(int(values[0]) - (int(begin) if begin.isdigit() else 0), int(values[1]))
            if 0 <= rank.number < rank.world:
                return rank
    return None


def processes_here() -> int:
    """How many of the processes run on this machine, where the launcher says so."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    return max(1, int(said)) if re.fullmatch(r"\d{1,6}", said) else 1
