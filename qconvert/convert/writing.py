"""Holds one output while it is written: takes up its journal, takes its blocks, verifies and finishes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from zlib import crc32

from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.containers import OpenOutput
from qconvert.convert.job import Job, Result
from qconvert.convert.outcome import BlockDone, Outcome, WrittenRows
from qconvert.convert.resume import RunJournal
from qconvert.convert.runner import MOST_CODE_ERROR, Terms, block_bytes
from qconvert.convert.stages import Stages
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.read_back import Hashes, Progress
from qconvert.plan.plan import Unit

Listener = Callable[[BlockDone], None]
Opened = Callable[[RunJournal], None]


@dataclass(frozen=True, slots=True)
class Writing:
    """An output that is open, with its journal; `listen` hears of every block that is done."""

    job: Job
    output: OpenOutput
    journal: RunJournal
    listen: Listener
    stages: Stages
    outcome: Outcome = field(default_factory=Outcome)

    @contextmanager
    def recording(self, opened: Opened = lambda journal: None) -> Iterator[None]:
        """While blocks are made: what they say goes into the journal; those of an earlier run come first.

        `opened` is given the journal before.
        """
        with self.journal.recording(self.output.sink):
            opened(self.journal)
            for name, values in self.job.container.constants.items():
                rows = values.reshape(len(values), -1)
                self.output.sink.write(name, 0, rows)
                crc = crc32(octets(rows))
                self.outcome.written[name].append(WrittenRows(name, 0, len(rows), rows.shape[1], crc))
            for done in self.journal.restored(self.job.compiled.plan.units, self.output.sink):
                self.outcome.add(done)
                self.listen(done)
            yield

    def take(self, done: BlockDone) -> None:
        """Take the event of a block."""
        self.outcome.add(done)
        self.journal.add(done)
        self.listen(done)

    def finished(self, verified: Progress) -> Result:
        """Bring all to the disk, verify it if that is asked for, and write what goes beside the weights."""
        output, options = self.output, self.job.options
        self.outcome.settle(self.job.compiled.plan.units)
        with self.stages.timed("flush"):
            output.sink.commit()
        hashes = Hashes({}, {})
        if options.verify:
            with self.stages.timed("verify"):
                hashes = output.verify(self.outcome.written, options.jobs, verified)
        with self.stages.timed("finish"):
            record = output.finish(self.outcome, hashes)
        return Result(output.path, record, self.outcome, hashes, self.stages.seconds)


@contextmanager
def writing(job: Job, out: Path, listen: Listener, stages: Stages) -> Iterator[Writing]:
    """Open the output of a job, which gets its name when the context ends without an error.

    Raises OutputExists when the name is taken, OtherJob when another job has begun an output of that name.
    """
    from qconvert.convert.identity import identity

    container, options = job.container, job.options
    journal = RunJournal(
        identity(job, container.files(out)),
        block_bytes=block_bytes(job.source.checkpoint.layout, container.layout, rows_bytes(job)),
        checksums=options.verify,
        restart=options.restart,
    )
    with container.create(out, journal) as output:
        yield Writing(job, output, journal, listen, stages)


def rows_bytes(job: Job) -> int:
    """The bytes that blocks of rows may take together."""
    saved = job.calibration.savings.rows_bytes if job.calibration is not None else None
    return saved or job.options.max_memory


def terms_of(job: Job, journal: RunJournal, *, fetches: bool) -> Terms:
    """What a job's run may take and lets pass; half of the memory is for what it `fetches`."""
    request = job.compiled.request
    return Terms(
        job.options.jobs,
        rows_bytes(job) // 2 if fetches else rows_bytes(job),
        journal.block_bytes,
        checksums=job.options.verify,
        allow_nonfinite=request.allow_nonfinite,
        most_code_error=inf if request.allow_requantize else MOST_CODE_ERROR,
    )


def position_in(checkpoint: Checkpoint) -> Callable[[Unit], tuple[int, int]]:
    """Where a unit's first array lies in the source files, so that reading goes forward."""

    def position(unit: Unit) -> tuple[int, int]:
        first = checkpoint.layout.stored_arrays(unit.source)[0]
        return checkpoint.files.source_offset(first.name)

    return position
