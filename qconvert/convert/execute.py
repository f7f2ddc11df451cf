"""Carries a conversion out: write, verify, rename into place.

Whatever fails on the way leaves nothing under the final name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from math import inf
from pathlib import Path
from zlib import crc32

from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.containers import OpenOutput
from qconvert.convert.job import Job, Result
from qconvert.convert.runner import MOST_CODE_ERROR, BlockDone, Outcome, Terms, WrittenRows, run
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.read_back import Hashes
from qconvert.plan.plan import Unit

Listener = Callable[[BlockDone], None]


def execute(job: Job, out: Path, listen: Listener = lambda done: None) -> Result:
    """Write the output of a job to `out`; `listen` hears of every block that is done.

    Raises what a run can refuse (`convert.run_errors`), CheckFailed when the disk holds other bytes than
    were written, OutputExists when the name is taken.
    """
    with job.container.create(out) as output:
        outcome = Outcome()
        _write_constants(job, output, outcome)
        collect(_run(job, output), outcome, listen)
        output.sink.commit()
        verify, jobs = job.options.verify, job.options.jobs
        hashes = output.verify(outcome.written, jobs) if verify else Hashes({}, {})
        record = output.finish(outcome, hashes)
    return Result(output.path, record, outcome, hashes)


def _write_constants(job: Job, output: OpenOutput, outcome: Outcome) -> None:
    for name, values in job.container.constants.items():
        rows = values.reshape(len(values), -1)
        output.sink.write(name, 0, rows)
        outcome.written[name].append(WrittenRows(name, 0, len(rows), rows.shape[1], crc32(octets(rows))))


def _run(job: Job, output: OpenOutput) -> Generator[BlockDone, None, None]:
    request, options, checkpoint = job.compiled.request, job.options, job.source.checkpoint
    terms = Terms(
        options.jobs,
        options.max_memory,
        checksums=options.verify,
        allow_nonfinite=request.allow_nonfinite,
        most_code_error=inf if request.allow_requantize else MOST_CODE_ERROR,
    )
    return run(
        job.compiled.plan,
        checkpoint.reader,
        job.container.layout,
        output.sink,
        terms,
        order=lambda unit: position(checkpoint, unit),
        statistics=request.statistics,
    )


def collect(events: Generator[BlockDone, None, None], outcome: Outcome, listen: Listener) -> None:
    """Run to the end: every event goes into `outcome`, and to `listen`."""
    with closing(events):
        for done in events:
            outcome.add(done)
            listen(done)


def position(checkpoint: Checkpoint, unit: Unit) -> tuple[int, int]:
    """Where a unit's first array lies in the source files, so that reading goes forward."""
    first = checkpoint.layout.stored_arrays(unit.source)[0]
    return checkpoint.files.source_offset(first.name)
