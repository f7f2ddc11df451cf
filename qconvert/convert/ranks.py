"""Carries out a job together with other processes, which share nothing but the folder of the output.

plan + world  ->  files in the order of this process  ->  blocks of their units  ->  verified file + receipt
receipts of all, in the order of the plan  ->  the outcome of one process  ->  what lies beside  ->  the name

With a destination, a receipt says that the file is there, too: each process sends its own before it names
their receipts, and makes all visible before it gives the output its name. So what has its name was sent.

Whoever finds all receipts finishes the output, and any number may try at once: a file is moved, or found
where it belongs; the other files are the same from every process; and the output gets its name by one rename.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from qconvert.convert.execute import run_job, with_all_scales
from qconvert.convert.existing import is_written
from qconvert.convert.job import Job, Result
from qconvert.convert.outcome import BlockDone, Outcome, WrittenRows
from qconvert.convert.publish import Destination, job_hash, sent_hash, weight_names
from qconvert.convert.resume import RunJournal, from_record, to_record
from qconvert.convert.run_memory import block_bytes_of
from qconvert.convert.send_written import send_where_lacking
from qconvert.convert.writing import Listener, facts_of
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.protocols import ArrayRows
from qconvert.core.ranks import Rank, order
from qconvert.errors import BadRecipe, OutputExists, QConvertError
from qconvert.formats.io.journal import Record
from qconvert.formats.io.local_file import octets, sync
from qconvert.formats.io.planned_files import FilePlan, FileSink
from qconvert.formats.io.read_back import Hashes, verify_files
from qconvert.formats.io.replacement import clear_replaced, inode, mark, marked, name_file, name_folder
from qconvert.formats.io.shared_folder import (
    Published,
    SharedFolder,
    is_shared,
    settings_of,
    shared_folder,
)
from qconvert.models.parameter_table import form_bytes
from qconvert.plan.plan import Plan, Unit

Done = Callable[[int, int], None]
"""Is told how many files of how many are done, by all processes."""


def execute_with_others(
    job: Job,
    out: Path,
    rank: Rank,
    listen: Listener = lambda done: None,
    done: Done = lambda done, total: None,
    destination: Destination | None = None,
) -> Result | None:
    """Write the output of a job to `out`, as one of several processes; the result if this one named it.

    None means that another one has, and that the output is there. `listen` gets every block that any process
    has made, `done` every file. Raises what `execute` raises, and BadRecipe for a job that is
    not divided. What is overwritten keeps its name until the output is finished; an output of this very job
    is left, since it may be that of processes that were faster. With a `destination`, it goes there, too.
    """
    refuse_undivided(job)
    job = with_all_scales(job, out)
    options = {"verify": job.options.verify, "hash_sources": job.options.hash_sources}
    sent = facts_of(job, out, destination)
    facts = {**sent, "options": options}
    if _is_there(job, out, facts):
        if destination is not None:
            send_where_lacking(job, out, destination)
        return None
    if destination is not None:
        weights = weight_names(job, out)
        destination.begin(sent_hash(sent), weights, overwrite=job.options.overwrite, resumed=False)
    settings = {"block_bytes": block_bytes_of(job), "replaces": _taken(job, out)}
    try:
        folder = SharedFolder(shared_folder(out), facts, settings)
    except (OSError, QConvertError):
        if not is_written(job, out) or settings["replaces"] == _taken(job, out) != {}:
            raise
        return None  # it was finished, and the folder removed, at this very moment
    try:
        return _Shared(job, out, folder, listen, done, destination).carried_out(rank)
    finally:
        folder.close()


def refuse_undivided(job: Job) -> None:
    """Raise BadRecipe for a job whose files cannot be made apart from each other."""
    if job.calibration is None:
        return
    if not job.calibration.traits.together:
        raise BadRecipe(
            f"--method {job.calibration.method}: every process would measure the text for itself",
            "measure once with `qconvert calibrate`, and give all processes --calibration FILE",
        )
    raise BadRecipe(
        f"--method {job.calibration.method}: chooses codes layer after layer, which one process does",
        "give --rank 0/1, for a single process",
    )


def _is_there(job: Job, out: Path, facts: Json) -> bool:
    """Whether the output has its name; OutputExists where something else has it."""
    first, taken, shared = _first(job, out), _taken(job, out), is_shared(out)
    if shared and settings_of(out).get("replaces", {}).get(first.name, "") == inode(first):
        return False
    if taken and not shared:
        if marked(first) == job_hash(facts):
            return is_written(job, out)
        job.container.check_target(out)
        return False
    try:
        found = is_written(job, out)
    except OutputExists:
        if not shared:
            raise
        return False  # the parts of a GGUF that have their names already
    if found and shared:  # the process that named it was killed before it removed this
        clear_replaced(out, settings_of(out).get("replaces", {}).get(out.name))
        shutil.rmtree(shared_folder(out), ignore_errors=True)
    return found


def _first(job: Job, out: Path) -> Path:
    """What gets its name last: the folder, or the first part of a GGUF file."""
    return out.with_name(job.container.files(out)[0].name) if job.compiled.is_gguf else out


def _taken(job: Job, out: Path) -> dict[str, int]:
    """The inodes of what has the names of an output, where that may be overwritten."""
    names = [file.name for file in job.container.files(out)] if job.compiled.is_gguf else [out.name]
    found = {name: inode(out.with_name(name)) for name in names if job.options.overwrite}
    return {name: number for name, number in found.items() if number is not None}


class _Shared:
    """A job as one of its processes carries it out."""

    def __init__(
        self,
        job: Job,
        out: Path,
        folder: SharedFolder,
        listen: Listener,
        done: Done,
        destination: Destination | None,
    ) -> None:
        self._job, self._out, self._folder, self._destination = job, out, folder, destination
        self._files = {file.name: file for file in job.container.files(out)}
        self._listen, self._told = listen, done
        self._units = _units_of(job, self._files)
        self._by_name = {unit.output.name: unit for unit in job.compiled.plan.units}
        self._heard: set[tuple[str, int]] = set()
        self._replaces: Mapping[str, int] = folder.settings.get("replaces", {})
        self._outcome = Outcome()
        self._sha256: dict[str, str] = {}
        self._sent: dict[str, str] = {}
        self._tensors: dict[str, str] = {}

    def carried_out(self, rank: Rank) -> Result | None:
        costs = {name: file.size + _bytes_read(self._units[name]) for name, file in self._files.items()}
        try:
            self._folder.work(order(costs, rank), self._make, self._hear, self._is_published)
            return self._finished()
        except Published:
            if self._destination is not None:
                self._destination.clear()
            is_written(self._job, self._out)  # OutputExists, where the name was taken by something else
            self._folder.remove()
            return None

    def _is_published(self) -> bool:
        return inode(self._first) not in (None, self._replaces.get(self._first.name))

    @property
    def _first(self) -> Path:
        return _first(self._job, self._out)

    def _make(self, name: str) -> Sequence[Record]:
        """Write one file into this process's folder, verify and send it; its blocks and hashes as records."""
        job, file, units = self._job, self._files[name], self._units[name]
        names = {unit.output.name for unit in units}
        journal = _OfOneFile(names, self._folder.settings["block_bytes"])
        sink = _OneFile(self._folder.own, [file])
        records: list[Record] = []
        outcome = Outcome()
        try:
            for constant, values in job.container.constants.items():
                if constant in file.specs:
                    rows = values.reshape(len(values), -1)
                    sink.write(constant, 0, rows)
                    crc = crc32(octets(rows))
                    outcome.written.add(WrittenRows(constant, 0, len(rows), rows.shape[1], crc))
            part = replace(job, compiled=replace(job.compiled, plan=_with_mates(units, job.compiled.plan)))
            with closing(run_job(part, sink, self._out, journal)) as events:
                for event in events:
                    own = replace(event, parts=tuple(part for part in event.parts if part.name in file.specs))
                    records.append(to_record(own))
                    outcome.add(own)
                    self._take(own)
            sink.commit()
            hashes = Hashes({}, {})
            if job.options.verify:
                check = job.container.check_header
                hashes = verify_files(self._folder.own, [file], outcome.written, job.options.jobs, check)
            sent: list[str] = []
            if self._destination is not None and file.specs:
                sent = [self._destination.put(name, self._folder.own / name, hashes.files[name])]
        except BaseException:
            sink.abort()
            raise
        return [*records, ["v", hashes.files.get(name), dict(hashes.tensors), *sent]]

    def _hear(self, name: str, own: bool) -> None:
        """Take in the receipt of a file."""
        *blocks, (_, sha256, tensors, *sent) = self._folder.receipts[name].records
        if not own:
            for record in blocks:
                self._take(from_record(self._by_name[record[1]], record))
        if sha256 is not None:
            self._sha256[name] = sha256
        self._tensors.update(tensors)
        if sent:
            (self._sent[name],) = sent
        self._told(len(self._folder.receipts), len(self._files))

    def _take(self, done: BlockDone) -> None:
        """Take in the event of a block; one whose rows went into two files is reported for both."""
        key = done.unit.output.name, done.start
        if key not in self._heard:
            self._heard.add(key)
            self._outcome.add(done)
            self._listen(done)

    def _finished(self) -> Result | None:
        """Complete the output and name it; None where another process was faster."""
        job, container, folder = self._job, self._job.container, self._folder
        hashes = Hashes(self._sha256, self._tensors)
        self._outcome.settle(job.compiled.plan.units)
        try:
            beside = folder.own / "beside"
            beside.mkdir()
            record = container.complete(beside, self._out, self._outcome, hashes)
            target = self._out.parent if job.compiled.is_gguf else folder.finished
            target.mkdir(exist_ok=True)
            _move_into(beside, target)
            if job.options.overwrite:
                mark(self._marked(target), folder.job)
            sent = self._published(target) if job.compiled.is_gguf else {}
            named = [self._placed(name, target) for name in reversed(self._files)][-1]
            if not job.compiled.is_gguf:
                sent = self._published(target)
                old = self._replaces.get(self._out.name)
                named = _renamed(target, self._out, old, int(folder.own.name, 16))
                clear_replaced(self._out, old)
            sync(self._out.parent)
        except (OSError, QConvertError):
            if not self._is_published():
                raise
            named = False
        if not named:
            is_written(job, self._out)  # OutputExists, where the name was taken by something else
        folder.remove()
        return Result(self._first, record, self._outcome, hashes, sent) if named else None

    def _published(self, folder: Path) -> Json:
        """Make visible what was sent, with the texts, which are in the folder of one that is placed there."""
        if self._destination is None:
            return {}
        return self._destination.finish(self._sent, self._job.container.texts(folder, self._first))

    def _marked(self, target: Path) -> Path:
        """What will have the name of the output: the folder, or the file that is the first part."""
        first = self._first.name
        return self._folder.receipts[first].folder / first if self._job.compiled.is_gguf else target

    def _placed(self, name: str, target: Path) -> bool:
        """Move a finished file to its place; whether it was not there before."""
        path = self._folder.receipts[name].folder / name
        try:
            name_file(path, target / name, self._replaces.get(name) if self._job.compiled.is_gguf else None)
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


class _OneFile(FileSink):
    """The sink of one file: rows of arrays that lie in another one are made there, too."""

    def write(self, name: str, start: int, rows: Any, column: int = 0) -> None:
        if name in self.specs:
            super().write(name, start, rows, column)

    def write_all(self, arrays: Iterable[ArrayRows]) -> None:
        specs = self.specs
        super().write_all(each for each in arrays if each.name in specs)


class _OfOneFile(RunJournal):
    """Marks all units but those of a file as done; they share scales with one of them."""

    def __init__(self, names: Collection[str], block_bytes: int) -> None:
        super().__init__({}, block_bytes=block_bytes, checksums=True)
        self._names = names

    @property
    def there(self) -> Collection[tuple[str, int]]:
        return _BlocksOfOthers(self._names)


@dataclass(frozen=True, slots=True)
class _BlocksOfOthers(Collection[tuple[str, int]]):
    """All blocks of units but these."""

    names: Collection[str]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, tuple) and block[0] not in self.names

    def __iter__(self) -> Iterator[tuple[str, int]]:
        raise TypeError("blocks of others are not counted")

    def __len__(self) -> int:
        raise TypeError("blocks of others are not counted")


def _units_of(job: Job, files: Mapping[str, FilePlan]) -> dict[str, list[Unit]]:
    """The units that have an array in each file, in the order of the plan."""
    file_of = {array: file.name for file in files.values() for array in file.specs}
    found: dict[str, list[Unit]] = {name: [] for name in files}
    for unit in job.compiled.plan.units:
        arrays: Iterable[TensorSpec] = job.container.layout.stored_arrays(unit.output)
        for name in dict.fromkeys(file_of[array.name] for array in arrays):
            found[name].append(unit)
    return found


def _with_mates(units: Sequence[Unit], plan: Plan) -> Plan:
    """The plan of units and of those that share a scale with one of them."""
    groups = {op.shared_scale_group for unit in units for op in unit.ops} - {""}
    names = {unit.output.name for unit in units}
    mates = (u for u in plan.units if any(op.shared_scale_group in groups for op in u.ops)) if groups else ()
    return Plan((*units, *(unit for unit in mates if unit.output.name not in names)))


def _bytes_read(units: Iterable[Unit]) -> int:
    return sum(
        form_bytes(piece.tensor.encoding, (piece.rows, piece.tensor.width))
        for unit in units
        for piece in unit.inputs
    )


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


def _renamed(folder: Path, out: Path, old: int | None, own: int) -> bool:
    """Give a folder its final name, in place of the one with this inode; False where another has it."""
    try:
        name_folder(folder, out, old, own)
    except QConvertError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True
