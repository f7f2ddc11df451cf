"""Makes two outputs of one source as far as their last blocks, so that only the better one is finished.

mix, rival  ->  each under the output's name in a folder of its own, with its journal  ->  measured as written
                                                                                                   |
the ordinary run, which finds all blocks in the journal  <-  moved to the output's place  <-  the better one

So codes that are chosen on a text are compared as they are, and none is chosen twice. A run that was killed
goes on with both; what was measured is noted before anything moves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from qconvert.convert.as_planned import PlannedRows
from qconvert.convert.execute import run_job
from qconvert.convert.job import Job
from qconvert.convert.known_as import job_hash
from qconvert.convert.resume import LeftUnfinished, RunJournal
from qconvert.convert.run_memory import block_bytes_of
from qconvert.convert.stages import Stages
from qconvert.convert.writing import Listener, Opened, facts_of, writing
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io.local_file import explained, write_whole
from qconvert.formats.io.strict_json import read_json_object

_NAMES, _DECISION = ("mix", "one"), "decided.json"


class _Free(Exception):
    """Ends a run that has only found out that its output's place is free."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The nats per token of a mix and of its rival, what they were measured `on`, and whether the mix won."""

    nats: tuple[float, float]
    on: Json
    mixed: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """A mix and its rival of one encoding, of which one becomes the output `out`."""

    jobs: tuple[Job, Job]
    out: Path

    @property
    def places(self) -> list[tuple[Job, Path]]:
        """Where each of them lies meanwhile: under the name of the output, which its files may have."""
        return [
            (job, self._folder / name / self.out.name) for job, name in zip(self.jobs, _NAMES, strict=True)
        ]

    def check(self) -> None:
        """Raise OtherJob where an unfinished output of another job is in the way, OutputBusy while one runs.

        With `restart`, it is removed, as are candidates of an earlier run.
        """
        job, options = self.jobs[0], self.jobs[0].options
        if options.restart:
            self.clear()
        journal = RunJournal(
            facts_of(job, self.out, None),
            block_bytes=block_bytes_of(job),
            checksums=options.verify,
            restart=options.restart,
        )
        with suppress(_Free), job.container.create(self.out, journal):
            raise _Free

    @contextmanager
    def made(self, listen: Listener, opened: Opened, scratch: Path) -> Iterator[list[PlannedRows]]:
        """The weights of both, once all blocks are written; their outputs are left unfinished.

        Raises what `execute` raises; what can go on then is left to the next run.
        """
        (mix, at), (one, beside) = self.places
        try:
            with (
                _unfinished(mix, at, listen, opened, scratch) as first,
                _unfinished(one, beside, listen, opened, scratch) as second,
            ):
                yield [first, second]
        finally:
            for folder in (at.parent, beside.parent, self._folder):
                with suppress(OSError):  # of one that holds what the next run goes on with
                    folder.rmdir()

    def decided(self) -> Decision | None:
        """What an earlier run found of these very jobs; None where it found nothing."""
        path = self._folder / _DECISION
        if not path.is_file():
            return None
        with suppress(CorruptCheckpoint, KeyError, TypeError, ValueError):
            found = read_json_object(path)
            mix, one = found["nats"]
            if found["jobs"] == self._hashes:
                return Decision((float(mix), float(one)), dict(found["on"]), bool(found["mixed"]))
        return None

    def decide(self, decision: Decision) -> None:
        """Note what was found, on the disk."""
        text = json.dumps(asdict(decision) | {"jobs": self._hashes}) + "\n"
        write_whole(self._folder / _DECISION, text.encode())

    def promote(self, *, mixed: bool) -> None:
        """Let the run that finishes the output find the better one's blocks; they may be there already."""
        job, made = self.places[0 if mixed else 1]
        moves = zip(job.container.unfinished(made), job.container.unfinished(self.out), strict=True)
        with explained(f"{self.out}: cannot be moved to its place"):
            for source, target in moves:
                if source.exists():
                    source.rename(target)

    def drop(self) -> None:
        """Remove what was made, and keep what was measured of it."""
        for _, made in self.places:
            shutil.rmtree(made.parent, ignore_errors=True)

    def clear(self) -> None:
        """Remove what is left of both."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.candidates")

    @property
    def _hashes(self) -> list[str]:
        return [job_hash(facts_of(job, self.out, None)) for job in self.jobs]


@contextmanager
def _unfinished(
    job: Job, out: Path, listen: Listener, opened: Opened, scratch: Path
) -> Iterator[PlannedRows]:
    """The weights of an output once all its blocks are written; in the end it is left as it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with suppress(LeftUnfinished), writing(job, out, listen, Stages()) as run:
        with (
            run.recording(opened),
            closing(run_job(job, run.output.sink, run.output.path, run.journal)) as events,
        ):
            for done in events:
                run.take(done)
        yield PlannedRows(job, scratch, run.output.sink)
        raise LeftUnfinished
