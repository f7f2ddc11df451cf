"""Carries a writing command out as one of several processes, of which one tells what was made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.events import events_to
from qconvert.cli.progress import progress
from qconvert.cli.signals import Stopped, ending_in_time
from qconvert.core.ranks import Rank

if TYPE_CHECKING:
    from qconvert.cli.flags import Flags
    from qconvert.convert.job import Job, Result
    from qconvert.convert.publish import Destination


def rank_to_be(job: Job, out: Path, flags: Flags) -> Rank | None:
    """The rank as which to carry a job out; None for a process that is alone.

    One that is alone goes on with what several have begun, or throws it away under --restart.
    """
    from qconvert.formats.io.shared_folder import is_shared, shared_folder

    joins = is_shared(out) and not (flags.to_store or flags.overwrite) and job.calibration is None
    if flags.shared or not joins:
        return flags.rank if flags.shared else None
    if flags.restart:
        shutil.rmtree(shared_folder(out), ignore_errors=True)
        return None
    return Rank(0, 1)


def own_file(path: Path | None, rank: Rank) -> Path | None:
    """The file for the events of one process: of several, each writes its own, `NAME.0` to `NAME.3`."""
    return path.with_name(f"{path.name}.{rank.number}") if path is not None and rank.world > 1 else path


def carried_out(
    job: Job, out: Path, rank: Rank, flags: Flags, destination: Destination | None
) -> Result | None:
    """Carry out a job as one of several processes; None where another one has named the output."""
    from qconvert.convert.ranks import execute_with_others
    from qconvert.convert.time_left import Work
    from qconvert.report.tables import count

    files = job.container.files(out)
    counts = (0, len(files))

    def told(done: int, total: int) -> None:
        nonlocal counts
        counts = (done, total)

    def farewell() -> str:
        return (
            f"stopped with {counts[0]} of {count(counts[1], 'file')} done; run the same command to continue"
        )

    if flags.talks:
        click.echo(f"process {rank.number} of {rank.world}, {count(len(files), 'file')} in all", err=True)
        if len(files) < rank.world:
            size = "--split-max-size" if job.compiled.is_gguf else "--shard-size"
            few = f"{count(len(files), 'file')} for {rank.world} processes: some have nothing to do"
            click.echo(f"note: {few}; {size} makes more files", err=True)
    work = Work([job.compiled.plan])
    with (
        progress(work, talks=flags.logs) as bars,
        events_to(own_file(flags.events, rank), [(job, out)], work, bars, rank) as events,
        ending_in_time(farewell),
    ):
        try:
            result = execute_with_others(job, out, rank, events.listen, told, destination)
            events.ended([result]) if result is not None else events.end(ok=True)
        except KeyboardInterrupt as error:
            signum = error.signum if isinstance(error, Stopped) else Stopped().signum
            raise Stopped(signum, farewell()) from error
    if result is None and flags.talks:
        shown = out if flags.keeps or destination is None else destination.shown
        click.echo(f"{shown}: complete", err=True)
    return result
