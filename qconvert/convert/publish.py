"""Sends the files of an output elsewhere while others are written, and makes all of them visible together.

How a file goes: its last block is written; it is read back from the disk; the destination takes it; the
journal says so; where files are dropped, its disk space is given back. After the last file one step of the
destination makes the output visible as a whole. The invariant: a file that the journal calls sent was
verified, and is at the destination; nothing that is not whole is visible there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from qconvert.convert.files_at import FilesAt
from qconvert.convert.known_as import KnownAs, known_as
from qconvert.convert.outcome import BlockDone, Outcome, WrittenRows
from qconvert.core.dtypes import Json
from qconvert.errors import QConvertError
from qconvert.formats.io.local_file import sync
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import Hashes

if TYPE_CHECKING:
    from qconvert.convert.containers import OpenOutput
    from qconvert.convert.job import Job
    from qconvert.convert.resume import RunJournal

_NOTE = "sent "
# How long a transfer that is under way may take to notice that the run has ended, in seconds.
_FAREWELL = 2.0


class Destination(Protocol):
    """Where an output goes. Every method raises NotTaken for what a later run may get through."""

    @property
    def shown(self) -> str:
        """Its name or address, without anything secret."""
        ...

    @property
    def files(self) -> FilesAt | None:
        """Its files, where the output is whole once they are; None where a commit says that it is."""
        ...

    def sent(self, job: KnownAs, weights: Collection[str], *, by_any: bool = False) -> Json | None:
        """What `finish` has said of these weights of this job, where they are visible there unchanged.

        Where `by_any` version of qconvert will do, and this one has sent nothing: those of a job that was
        asked for the same; `version` says then whose they are.
        """
        ...

    def begin(self, job: KnownAs, weights: Collection[str], *, overwrite: bool, resumed: bool) -> None:
        """Make sure that the output can go there.

        OutputExists where another model is there, unless `overwrite`; one of this very job may be, and what
        a `resumed` run has sent.
        """
        ...

    def put(self, name: str, path: Path, sha256: str) -> str:
        """Take a weight file, not visible yet; what `holds` knows it by later."""
        ...

    def holds(self, name: str, size: int, receipt: str) -> bool:
        """Whether the file that `put` gave this receipt for is still there."""
        ...

    def finish(self, receipts: Mapping[str, str], texts: Mapping[str, bytes | Path]) -> Json:
        """Make the weights visible, and what belongs beside them; says what is there, as plain data."""
        ...

    def clear(self) -> None:
        """Remove what is not visible of an output that is; of several processes, others may have, too."""
        ...


@dataclass(slots=True)
class _Sent:
    """What is known of the files that are at the destination, by name."""

    receipts: dict[str, str]
    files: dict[str, str]
    tensors: dict[str, str]

    @property
    def hashes(self) -> Hashes:
        return Hashes(self.files, self.tensors)


def weight_names(job: Job, out: Path) -> list[str]:
    """The names of the files of an output that hold weights, which a destination gets first."""
    return [file.name for file in job.container.files(out) if file.specs]


class Publication:
    """The files of one output on their way, sent by a thread of its own, one after another."""

    def __init__(
        self,
        destination: Destination,
        job: Job,
        out: Path,
        output: OpenOutput,
        journal: RunJournal,
        outcome: Outcome,
    ) -> None:
        container = job.container
        planned = container.files(out)
        self._places = dict(zip([file.name for file in planned], container.partial(out), strict=True))
        self.weights = tuple(file for file in planned if file.specs)
        self._texts = tuple(file for file in planned if not file.specs)
        self._destination, self._output, self._journal = destination, output, journal
        self._written, self._options = outcome.written, job.options
        self._homes = {name: file for file in self.weights for name in file.specs}
        self._left = {file.name: sum(spec.nbytes for spec in file.specs.values()) for file in self.weights}
        self._sent = _Sent({}, {}, {})
        self._queue: SimpleQueue[FilePlan | None] = SimpleQueue()
        self._queued: set[str] = set()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False
        self._take_notes()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        for parts in outcome.written.values():
            self._count(parts)

    def _take_notes(self) -> None:
        """Take over what an earlier run has sent; a file that is gone is sent again, if it is here."""
        for file in self.weights:
            note = self._journal.notes.get(_NOTE + file.name)
            if note is None:
                continue
            if self._destination.holds(file.name, file.size, note["receipt"]):
                self._queued.add(file.name)
                self._keep(file.name, note["receipt"], note["sha256"], note["tensors"])
            elif self._options.drop:
                raise QConvertError(
                    f"{self._destination.shown}: {file.name} was sent there, and is gone",
                    "start again with --restart",
                )

    def _keep(self, name: str, receipt: str, digest: str, tensors: Mapping[str, str]) -> None:
        self._sent.receipts[name], self._sent.files[name] = receipt, digest
        self._sent.tensors.update(tensors)

    def add(self, done: BlockDone) -> None:
        """Take the event of a block that is in the journal; raises what has ended the sending."""
        self._require_well()
        self._count(done.parts)

    def _count(self, parts: Iterable[WrittenRows]) -> None:
        for part in parts:
            file = self._homes[part.name]
            self._left[file.name] -= part.rows * part.width * file.specs[part.name].dtype.nbytes
            if not self._left[file.name]:
                self._enqueue(file)

    def _enqueue(self, file: FilePlan) -> None:
        with self._changed:
            if file.name not in self._queued:
                self._queued.add(file.name)
                self._queue.put(file)

    def wait_for_room(self) -> None:
        """Wait until at most one file that is written is still here."""
        self._wait(lambda: len(self._queued) - len(self._sent.files) <= 1)

    def drain(self) -> Hashes:
        """Wait until all weights are sent; the hashes of all files and tensors."""
        for file in self.weights:  # one without bytes is written from the beginning
            self._enqueue(file)
        self._wait(lambda: len(self._sent.files) == len(self.weights))
        for file in self._texts:
            sync(self._places[file.name])
        texts = self._output.verify({}, self._options.jobs, _silent, self._texts)
        self._sent.files.update(texts.files)
        return self._sent.hashes

    def finish(self) -> Json:
        """Make the output visible."""
        return self._destination.finish(self._sent.receipts, self._output.texts())

    def end(self) -> None:
        """Send nothing more, and touch neither journal nor files."""
        with self._changed:
            self._ended = True
        self._queue.put(None)
        self._thread.join(_FAREWELL)

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or until())
        self._require_well()

    def _require_well(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (file := self._queue.get()) is not None:
            try:
                self._send(file)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _send(self, file: FilePlan) -> None:
        path = self._places[file.name]
        sync(path)
        written = {name: self._written[name] for name in file.specs}
        found = self._output.verify(written, self._options.jobs, _silent, [file])
        digest = found.files[file.name]
        receipt = self._destination.put(file.name, path, digest)
        with self._changed:
            if self._ended:
                return
            note = {"receipt": receipt, "sha256": digest, "tensors": dict(found.tensors)}
            self._journal.keep(_NOTE + file.name, note)
            if self._options.drop:
                self._output.sink.dropped(path.name)
            self._keep(file.name, receipt, digest, found.tensors)
            self._changed.notify_all()


def _silent(done: int, total: int) -> None:
    """Do nothing."""


@contextmanager
def publishing(
    destination: Destination | None,
    job: Job,
    out: Path,
    output: OpenOutput,
    journal: RunJournal,
    outcome: Outcome,
) -> Iterator[Publication | None]:
    """The sending of an output called `out` while it is written; None where it stays."""
    if destination is None:
        yield None
        return
    name, weights = known_as(journal.job), weight_names(job, out)
    destination.begin(name, weights, overwrite=job.options.overwrite, resumed=journal.resumed)
    publication = Publication(destination, job, out, output, journal, outcome)
    try:
        yield publication
    finally:
        publication.end()


@dataclass(frozen=True, slots=True)
class _Others(Collection[tuple[str, int]]):
    """The blocks that are there, and all of units that have another turn."""

    there: Collection[tuple[str, int]]
    turn: frozenset[str]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, tuple) and (block[0] not in self.turn or block in self.there)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.there)

    def __len__(self) -> int:
        return len(self.there)


def file_by_file(
    publication: Publication,
    arrays: Mapping[str, Sequence[str]],
    there: Collection[tuple[str, int]],
    run: Callable[[Collection[tuple[str, int]]], Generator[BlockDone, None, None]],
) -> Generator[BlockDone, None, None]:
    """Make the blocks of one file after another, of which at most two are on the disk.

    `arrays` are those that each unit writes, by the name of its output; `run` makes all blocks but those
    that it is given. A unit whose arrays lie in several files has its turn with the first.
    """
    homes = {name: number for number, file in enumerate(publication.weights) for name in file.specs}
    turns: list[set[str]] = [set() for _ in publication.weights]
    for unit, names in arrays.items():
        turns[min((homes[name] for name in names), default=0)].add(unit)
    for turn in turns:
        publication.wait_for_room()
        yield from run(_Others(there, frozenset(turn)))
