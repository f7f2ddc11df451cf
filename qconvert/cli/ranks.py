"""Carries a command out as one of several processes, which a launcher tells apart by its environment."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli.progress import progress
from qconvert.cli.signals import Stopped, ending_in_time
from qconvert.core.ranks import Rank

if TYPE_CHECKING:
    from qconvert.cli.flags import Flags
    from qconvert.convert.job import Job, Result

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
            self.fail(f"{value!r} is no rank; write 0/4 to 3/4 for four processes, or {AUTO}", param, ctx)
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
    """The rank that a launcher has given this process; None where it is none of several."""
    for number, world, first in launchers:
        values = [environment.get(name, "") for name in (number, world)]
        if all(re.fullmatch(r"\d{1,6}", value) for value in values):
            begin = environment.get(first, "0")
            rank = Rank(int(values[0]) - (int(begin) if begin.isdigit() else 0), int(values[1]))
            if 0 <= rank.number < rank.world and rank.world > 1:
                return rank
    return None


def is_divided(rank: Rank | None) -> bool:
    """Whether there are other processes."""
    return rank is not None and rank.world > 1


def processes_here() -> int:
    """How many of the processes run on this machine, where the launcher says so."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    return max(1, int(said)) if re.fullmatch(r"\d{1,6}", said) else 1


def rank_to_be(job: Job, out: Path, flags: Flags) -> Rank | None:
    """The rank as which to carry a job out; None for a process that is alone.

    One that is alone goes on with what several have begun, or throws it away under --restart.
    """
    from qconvert.formats.io.shared_folder import is_shared, shared_folder

    if flags.shared or not is_shared(out) or flags.overwrite or job.calibration is not None:
        return flags.rank if flags.shared else None
    if flags.restart:
        shutil.rmtree(shared_folder(out), ignore_errors=True)
        return None
    return Rank(0, 1)


def carried_out(job: Job, out: Path, rank: Rank, flags: Flags) -> Result | None:
    """Carry out a job as one of several processes; None where another one has named the output."""
    from qconvert.convert.ranks import execute_with_others
    from qconvert.report.tables import count

    files = job.container.files(out)
    counts = (0, len(files))

    def told(done: int, total: int) -> None:
        nonlocal counts
        counts = (done, total)

    def farewell() -> str:
        return f"stopped with {counts[0]} of {count(counts[1], 'file')} done; run the same command to go on"

    if flags.talks:
        click.echo(f"process {rank.number} of {rank.world}, {count(len(files), 'file')} in all", err=True)
        if len(files) < rank.world:
            size = "--split-max-size" if job.compiled.is_gguf else "--shard-size"
            click.echo(
                f"note: {rank.world - len(files)} have nothing to do; {size} makes more files", err=True
            )
    with progress(job.compiled.plan, talks=flags.talks) as bar, ending_in_time(farewell):
        try:
            result = execute_with_others(job, out, rank, bar.listen, told)
        except KeyboardInterrupt as error:
            signum = error.signum if isinstance(error, Stopped) else Stopped().signum
            raise Stopped(signum, farewell()) from error
    if result is None and flags.talks:
        click.echo(f"{out}: complete", err=True)
    return result
