"""Carries out jobs: shows how far they are, writes events, says what they go on with or leave behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.events import events_to
from qconvert.cli.progress import progress
from qconvert.cli.sending import disk_needed
from qconvert.cli.signals import Stopped, ending_in_time
from qconvert.errors import QConvertError

if TYPE_CHECKING:
    from qconvert.cli.events import Events
    from qconvert.cli.flags import Flags
    from qconvert.convert.as_planned import PlannedRows
    from qconvert.convert.candidates import Candidates
    from qconvert.convert.job import Job, Result
    from qconvert.convert.publish import Destination
    from qconvert.convert.resume import RunJournal


@dataclass(frozen=True, slots=True)
class _Run:
    """What is notified of jobs that are run."""

    events: Events
    opened: Callable[[RunJournal], None]


def executed(
    jobs: Sequence[tuple[Job, Path]], flags: Flags, destination: Destination | None = None
) -> list[Result]:
    """Carry out jobs of one source, each at its path; say what they go on with, or leave for the next run.

    A job that is alone may go to a destination. Raises QConvertError where there is too little disk.
    """
    from qconvert.convert.execute import execute
    from qconvert.convert.execute_together import execute_together

    with _running(jobs, flags, verifies=flags.verify) as run:
        listen, opened, verified = run.events.listen, run.opened, run.events.verified
        results = (
            [execute(*jobs[0], listen, opened, verified, destination)]
            if len(jobs) == 1
            else execute_together(jobs, listen, opened, verified)
        )
        run.events.ended(results)
    return results


@contextmanager
def candidates_made(candidates: Candidates, flags: Flags, scratch: Path) -> Iterator[list[PlannedRows]]:
    """The weights of both candidates, made as `executed` makes outputs; these are left unfinished.

    Of the events, that is a run of its own, which ends when they have been measured.
    """
    with (
        _running(candidates.places, flags, verifies=False, candidates_of=candidates.out) as run,
        candidates.made(run.events.listen, run.opened, scratch) as weights,
    ):
        yield weights
        run.events.end(ok=True)


@contextmanager
def _running(
    jobs: Sequence[tuple[Job, Path]], flags: Flags, *, verifies: bool, candidates_of: Path | None = None
) -> Iterator[_Run]:
    """While jobs are carried out: bars, events, and what is said of an output that is left unfinished.

    They may be candidates, of which one becomes another output. Raises QConvertError for a disk with too
    little room.
    """
    from qconvert.convert.time_left import Work
    from qconvert.formats.io.local_file import require_free_disk

    begun = [path for job, out in jobs for path in job.container.partial(out) if path.is_file()]
    held = sum(path.stat().st_blocks * 512 for path in begun)
    require_free_disk(jobs[0][1], sum(disk_needed(job, out) for job, out in jobs) - held)
    files = [file for job, out in jobs if verifies for file in job.container.files(out)]
    work = Work([job.compiled.plan for job, _ in jobs], files)
    runs: list[RunJournal] = []

    def opened(journal: RunJournal) -> None:
        runs.append(journal)
        if journal.resumed:
            events.resumed(journal)
            if flags.talks:
                click.echo(f"resuming {_shown(journal.path)}: {percent(journal.share)} was done", err=True)

    def farewell() -> str:
        return f"stopped at {percent(_share(runs, jobs))}; run the same command to continue"

    def kept() -> bool:
        return any(run.kept for run in runs)

    with (
        progress(work, talks=flags.logs) as bars,
        events_to(flags.events, jobs, work, bars, candidates_of=candidates_of) as events,
        ending_in_time(farewell),
    ):
        try:
            yield _Run(events, opened)
        except KeyboardInterrupt as error:
            if not kept():
                raise
            signum = error.signum if isinstance(error, Stopped) else Stopped().signum
            raise Stopped(signum, farewell()) from error
        except QConvertError as error:
            if kept():
                going_on = f"run the same command to continue at {percent(_share(runs, jobs))}"
                error.hint = f"{error.hint}; then {going_on}"
            raise


def _share(runs: Sequence[RunJournal], jobs: Sequence[object]) -> float:
    """How much is in the journals of all outputs, from 0 to 1."""
    return sum(run.share for run in runs) / len(jobs)


def percent(share: float) -> str:
    """A share of work as `43 %`: rounded down, since all of it is done only with the output's name."""
    return f"{min(99, int(100 * share))} %"


def _shown(path: Path) -> str:
    """A path from the current folder, where it is below it."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)
