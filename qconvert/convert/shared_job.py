"""Carries a job out as one of several processes, up to where the output is finished.

What it makes are files with their receipts (`formats.io.shared_folder`); what becomes of them when there are
all says a subclass: one names the output, one keeps none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from qconvert.convert.execute import run_job
from qconvert.convert.job import Job, Result
from qconvert.convert.one_file import OfOneFile, OneFile, bytes_read, units_of, with_mates
from qconvert.convert.outcome import BlockDone, Outcome, WrittenRows
from qconvert.convert.publish import Destination
from qconvert.convert.resume import from_record, to_record
from qconvert.convert.writing import Listener
from qconvert.core.dtypes import Json
from qconvert.core.ranks import Rank, order
from qconvert.formats.io.journal import Record
from qconvert.formats.io.local_file import octets, sync
from qconvert.formats.io.read_back import Hashes, verify_files
from qconvert.formats.io.replacement import name_file
from qconvert.formats.io.shared_folder import Published, SharedFolder

Done = Callable[[int, int], None]
"""Is told how many files of how many are done, by all processes."""


def first_path(job: Job, out: Path) -> Path:
    """What gets its name last: the folder, or the first part of a GGUF file."""
    return out.with_name(job.container.files(out)[0].name) if job.compiled.is_gguf else out


class SharedJob(ABC):
    """A job as one of its processes carries it out, in the folder that they share.

    `replaced` are the inodes of what has the names of the output, by name, where it may be replaced.
    """

    def __init__(
        self,
        job: Job,
        out: Path,
        folder: SharedFolder,
        listen: Listener,
        done: Done,
        destination: Destination | None,
    ) -> None:
        self.job, self.out, self.folder, self.destination = job, out, folder, destination
        self.files = {file.name: file for file in job.container.files(out)}
        self.sent: dict[str, str] = {}
        self._listen, self._told = listen, done
        self._units = units_of(job, self.files)
        self._by_name = {unit.output.name: unit for unit in job.compiled.plan.units}
        self._heard: set[tuple[str, int]] = set()
        self._outcome = Outcome()
        self._sha256: dict[str, str] = {}
        self._tensors: dict[str, str] = {}

    @abstractmethod
    def is_published(self) -> bool:
        """Whether the output is finished, by any process."""
        ...

    def overtaken(self) -> None:
        """End, since another process has finished the output; OutputExists where it is something else."""
        self.folder.remove()

    @abstractmethod
    def finished(self) -> Result | None:
        """Complete the output, of which all files are there; None where another process was faster."""
        ...

    def carried_out(self, rank: Rank) -> Result | None:
        """Do what this process has to do; the result if it has finished the output."""
        costs = {name: file.size + bytes_read(self._units[name]) for name, file in self.files.items()}
        try:
            self.folder.work(order(costs, rank), self._make, self._hear, self.is_published)
            return self.finished()
        except Published:
            if self.destination is not None:
                self.destination.clear()
            self.overtaken()
            return None

    def _make(self, name: str) -> Sequence[Record]:
        """Write one file into this process's folder, verify and send it; its blocks and hashes as records.

        One that is not kept is removed before its receipt has its name: by that, it is at the destination.
        """
        job, file, units = self.job, self.files[name], self._units[name]
        names = {unit.output.name for unit in units}
        journal = OfOneFile(names, self.folder.settings["block_bytes"])
        sink = OneFile(self.folder.own, [file])
        records: list[Record] = []
        outcome = Outcome()
        try:
            for constant, values in job.container.constants.items():
                if constant in file.specs:
                    rows = values.reshape(len(values), -1)
                    sink.write(constant, 0, rows)
                    crc = crc32(octets(rows))
                    outcome.written.add(WrittenRows(constant, 0, len(rows), rows.shape[1], crc))
            part = replace(job, compiled=replace(job.compiled, plan=with_mates(units, job.compiled.plan)))
            with closing(run_job(part, sink, self.out, journal)) as events:
                for event in events:
                    own = replace(event, parts=tuple(part for part in event.parts if part.name in file.specs))
                    records.append(to_record(own))
                    outcome.add(own)
                    self._take(own)
            sink.commit()
            hashes = Hashes({}, {})
            if job.options.verify:
                check = job.container.check_header
                hashes = verify_files(self.folder.own, [file], outcome.written, job.options.jobs, check)
            sent: list[str] = []
            if self.destination is not None and file.specs:
                sent = [self.destination.put(name, self.folder.own / name, hashes.files[name])]
                if job.options.drop:
                    (self.folder.own / name).unlink()
        except BaseException:
            sink.abort()
            raise
        return [*records, ["v", hashes.files.get(name), dict(hashes.tensors), *sent]]

    def _hear(self, name: str, own: bool) -> None:
        """Take in the receipt of a file."""
        *blocks, (_, sha256, tensors, *sent) = self.folder.receipts[name].records
        if not own:
            for record in blocks:
                self._take(from_record(self._by_name[record[1]], record))
        if sha256 is not None:
            self._sha256[name] = sha256
        self._tensors.update(tensors)
        if sent:
            (self.sent[name],) = sent
        self._told(len(self.folder.receipts), len(self.files))

    def _take(self, done: BlockDone) -> None:
        """Take in the event of a block; one whose rows went into two files is reported for both."""
        key = done.unit.output.name, done.start
        if key not in self._heard:
            self._heard.add(key)
            self._outcome.add(done)
            self._listen(done)

    def completed(self, target: Path) -> Json:
        """Write what goes beside the weights into a folder that all processes complete; the record."""
        self._outcome.settle(self.job.compiled.plan.units)
        beside = self.folder.own / "beside"
        beside.mkdir()
        record = self.job.container.complete(beside, self.out, self._outcome, self._hashes)
        target.mkdir(exist_ok=True)
        _move_into(beside, target)
        return record

    def publish(self, folder: Path) -> Json:
        """Make visible what was sent, with the texts, which are in the folder of one that is placed there."""
        if self.destination is None:
            return {}
        texts = self.job.container.texts(folder, first_path(self.job, self.out))
        return self.destination.finish(self.sent, texts)

    def result(self, record: Json, sent: Json) -> Result:
        """The output, finished."""
        return Result(first_path(self.job, self.out), record, self._outcome, self._hashes, sent)

    @property
    def _hashes(self) -> Hashes:
        return Hashes(self._sha256, self._tensors)

    def placed(self, name: str, target: Path, old: int | None = None) -> bool:
        """Move a finished file to its place, over the one with the inode `old`; whether it was not there."""
        path = self.folder.receipts[name].folder / name
        try:
            name_file(path, target / name, old)
            return True
        except FileNotFoundError:
            if not (target / name).exists():
                raise
        except FileExistsError:
            with suppress(FileNotFoundError):
                if not path.samefile(target / name):
                    raise
                path.unlink()
        return False


def _move_into(beside: Path, target: Path) -> None:
    """Bring small files to the disk and into a folder, each in one step, in place of the same by others."""
    for path in sorted(beside.rglob("*")):
        place = target / path.relative_to(beside)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            sync(path)
            path.replace(place)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        sync(folder)
