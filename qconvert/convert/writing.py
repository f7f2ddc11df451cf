"""Holds one output while it is written: takes up its journal, takes its blocks, verifies and finishes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from zlib import crc32

from qconvert.calibrate.memory_limit import resident
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.blocks import Block
from qconvert.convert.containers import OpenOutput
from qconvert.convert.job import Job, Result
from qconvert.convert.outcome import BlockDone, Outcome, WrittenRows
from qconvert.convert.publish import Destination, Publication, publishing
from qconvert.convert.resume import RunJournal
from qconvert.convert.run_memory import block_bytes_of, rows_bytes, threads
from qconvert.convert.runner import MOST_CODE_ERROR, Terms, rows_read
from qconvert.convert.stages import Stages
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.read_back import Hashes, Progress
from qconvert.formats.layouts.stored_arrays import StoredArrays

Listener = Callable[[BlockDone], None]
Opened = Callable[[RunJournal], None]


@dataclass(slots=True)
class Writing:
    """An output that is open, with its journal; `listen` is called with every block that is done.

    Where it goes to a `destination`, there is a `publication` while it is recorded.
    """

    job: Job
    out: Path
    output: OpenOutput
    journal: RunJournal
    listen: Listener
    stages: Stages
    destination: Destination | None = None
    publication: Publication | None = None
    outcome: Outcome = field(default_factory=Outcome)
    hashes: Hashes = field(default_factory=lambda: Hashes({}, {}))

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
                self.outcome.written.add(WrittenRows(name, 0, len(rows), rows.shape[1], crc))
            for done in self.journal.restored(self.job.compiled.plan.units, self.output.sink):
                self.outcome.add(done)
                self.listen(done)
            goes_to = self.destination, self.job, self.out
            with publishing(*goes_to, self.output, self.journal, self.outcome) as self.publication:
                yield
                if self.publication is not None:
                    self.hashes = self.publication.drain()

    def take(self, done: BlockDone) -> None:
        """Take the event of a block."""
        self.outcome.add(done)
        self.journal.add(done)
        self.listen(done)
        if self.publication is not None:
            self.publication.add(done)

    def finished(self, verified: Progress) -> Result:
        """Bring all to the disk, verify it if that is asked for, and write what goes beside the weights.

        What goes elsewhere was verified before, and is made visible there now.
        """
        output, options = self.output, self.job.options
        self.outcome.settle(self.job.compiled.plan.units)
        with self.stages.timed("flush"):
            output.sink.commit()
        if options.verify and self.publication is None:
            with self.stages.timed("verify"):
                self.hashes = output.verify(self.outcome.written, options.jobs, verified)
        with self.stages.timed("finish"):
            record = output.finish(self.outcome, self.hashes)
            sent = self.publication.finish() if self.publication is not None else {}
        return Result(output.path, record, self.outcome, self.hashes, sent, self.stages.seconds)


@contextmanager
def writing(
    job: Job, out: Path, listen: Listener, stages: Stages, destination: Destination | None = None
) -> Iterator[Writing]:
    """Open the output of a job, which gets its name when the context ends without an error.

    Raises OutputExists when the name is taken, OtherJob when another job has begun an output of that name.
    """
    container, options = job.container, job.options
    journal = RunJournal(
        facts_of(job, out, destination),
        block_bytes=block_bytes_of(job),
        checksums=options.verify,
        restart=options.restart,
    )
    with container.create(out, journal) as output:
        yield Writing(job, out, output, journal, listen, stages, destination)


def facts_of(job: Job, out: Path, destination: Destination | None) -> Json:
    """What tells a job that writes `out`, and sends it to a destination, from others."""
    from qconvert.convert.identity import identity

    goes_to = {"destination": destination.shown, "dropped": job.options.drop} if destination else {}
    return {**identity(job, job.container.files(out)), **goes_to}


def terms_of(job: Job, journal: RunJournal, *, fetches: bool) -> Terms:
    """What a job's run may take and lets pass; half of the memory is for what it `fetches`."""
    request, memory = job.compiled.request, rows_bytes(job, resident())
    return Terms(
        threads(job, memory),
        memory // 2 if fetches else memory,
        journal.block_bytes,
        checksums=job.options.verify,
        allow_nonfinite=request.allow_nonfinite,
        most_code_error=inf if request.allow_requantize else MOST_CODE_ERROR,
    )


def position_in(checkpoint: Checkpoint) -> Callable[[Block], tuple[int, int]]:
    """About where in the source files a block begins to read, so that reading goes forward."""

    arrays, source_offset = StoredArrays(checkpoint.layout), checkpoint.files.source_offset

    def position(block: Block) -> tuple[int, int]:
        row = rows_read(block.unit, block.start)
        for piece in block.unit.inputs:
            if row < piece.rows:
                break
            row -= piece.rows
        begin, ((end, kind), *_) = arrays.of(piece.tensor)
        file, offset = source_offset(begin + end)
        first = piece.start + row // piece.pieces * piece.step
        nbytes = TensorSpec("", *kind).nbytes if first else 0
        return file, offset + nbytes * first // max(1, piece.tensor.rows)

    return position
