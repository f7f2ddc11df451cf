"""Carries out several jobs that read one source: it is read once, and every output is that of its own run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from qconvert.convert.blocks import at_hand
from qconvert.convert.job import Job, Result
from qconvert.convert.read_ahead import read_ahead
from qconvert.convert.run_memory import rows_bytes
from qconvert.convert.run_together import Part, run_together
from qconvert.convert.stages import Stages
from qconvert.convert.writing import Listener, Opened, position_in, terms_of, writing
from qconvert.errors import BadRecipe
from qconvert.formats.io.read_back import Progress, bytes_to_verify


def execute_together(
    jobs: Sequence[tuple[Job, Path]],
    listen: Listener = lambda done: None,
    opened: Opened = lambda journal: None,
    verified: Progress = lambda done, total: None,
) -> list[Result]:
    """Write the outputs of jobs of one source, each to its path; threads and memory are those of the first.

    The arguments and errors are those of `execute`; `opened` is given the journal of each output. Outputs
    get their names when all of them are verified. An error leaves all of them to the next run. Raises
    BadRecipe where codes would be chosen together, for which each output needs a run of its own.
    """
    first, source = jobs[0][0], jobs[0][0].source
    for job, out in jobs:
        if job.calibration is not None or job.compiled.scalable:
            raise BadRecipe(
                f"{out}: its codes or scales are measured on a text", "convert it in a run of its own"
            )
        assert job.source is source, "outputs of one source"
    stages = Stages()
    told = _Added(verified, [bytes_to_verify(job.container.files(out)) for job, out in jobs])
    with ExitStack() as outputs:
        runs = [outputs.enter_context(writing(job, out, listen, stages)) for job, out in jobs]
        fetching = read_ahead(source, rows_bytes(first) // 2)
        with stages.timed("convert"), ExitStack() as records:
            for run in runs:
                records.enter_context(run.recording(opened))
            parts = [
                Part(
                    run.job.compiled.plan,
                    run.job.container.layout,
                    run.output.sink,
                    terms_of(run.job, run.journal, fetches=fetching is not None),
                    run.job.compiled.request.statistics,
                    run.journal.there,
                )
                for run in runs
            ]
            checkpoint = source.checkpoint
            events = run_together(parts, checkpoint.reader, position_in(checkpoint), fetching or at_hand)
            with closing(events):
                for number, done in events:
                    runs[number].take(done)
        return [run.finished(told.next()) for run in runs]


class _Added:
    """Reports what is verified of all outputs together."""

    def __init__(self, tell: Progress, totals: Sequence[int]) -> None:
        self._tell, self._totals, self._next = tell, totals, 0

    def next(self) -> Callable[[int, int], None]:
        """The listener of the next output."""
        before, every = sum(self._totals[: self._next]), sum(self._totals)
        self._next += 1
        return lambda done, total: self._tell(before + done, every)
