"""Journals the blocks of a run, and goes on with the blocks that an earlier run of the same job journalled.

What is said of a block is all that its event says: where its rows lie, their checksums, and what they lost.
So an output that was made in two runs has the bytes, and the manifest, of one that was made in one.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from qconvert.convert.outcome import BlockDone, WrittenRows
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.errors import NotTaken, OtherJob, SourceUnavailable
from qconvert.formats.io.journal import (
    GroupCommit,
    Journal,
    JournalFile,
    Record,
    committing,
    discard,
    first_difference,
    load,
)
from qconvert.ops import OutputError
from qconvert.plan.plan import Unit

# What ends a run, but not the next one: interruptions, and disks that are full or fail.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)


class LeftUnfinished(Exception):
    """Ends a run after its last block: a later run of the same job finishes the output."""


_PASSING_KINDS = (KeyboardInterrupt, MemoryError, SourceUnavailable, NotTaken, LeftUnfinished)


class JournaledSink(Protocol):
    """The files of an output, whose bytes can be brought to the disk, and counted as written."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def item_bytes(self, name: str) -> int: ...

    def flush(self) -> None: ...

    def restore(self, name: str, start: int, rows: int, width: int, column: int = 0) -> None: ...


class RunJournal:
    """The journal of one run. `path` is what is shown of the unfinished output, once it is opened.

    `job` are the facts that tell jobs apart, by name (`convert.identity`), as JSON has them; with `restart`,
    what an earlier run left does not count. Blocks without checksums count only where none are needed.
    `block_bytes` is the working memory of a block: that of the earlier run, since sums depend on it.
    """

    def __init__(self, job: Json, *, block_bytes: int, checksums: bool, restart: bool = False) -> None:
        self.path = Path()
        self.kept = False
        self.block_bytes = block_bytes
        self.notes: dict[str, Any] = {}
        self.job, self._restart, self._checksums = job, restart, checksums
        self._found: Journal | None = None
        self._blocks: dict[tuple[str, int], Record] = {}
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self._file: JournalFile | None = None
        self._group: GroupCommit | None = None
        self._sink: JournaledSink | None = None
        self._restored = 0

    def goes_on(self, path: Path, files: Mapping[Path, int], shown_as: Path) -> bool:
        """Whether to go on with the journal at `path` of these files, whose sizes are planned.

        If not, the journal is removed. Raises OtherJob where it belongs to another job.
        """
        self.path = shown_as
        found = None if self._restart else load(path)
        sizes = {file: file.stat().st_size if file.exists() else 0 for file in files}
        if found is not None and any(sizes.values()):
            self._require_same(found)
            if sizes == files and _is_ours(found):
                self._take(found)
                return True
        discard(path)
        return False

    def open(self, path: Path) -> None:
        """Begin the journal, or go on with the one that was found."""
        if self._found is not None:
            self._file = JournalFile.reopen(path, self._found)
        else:
            self._file = JournalFile.create(path, self.job, {"block_bytes": self.block_bytes})

    @contextmanager
    def recording(self, sink: JournaledSink) -> Iterator[None]:
        """Take records of what is written to the sink; all are on the disk when the context ends."""
        assert self._file is not None
        self._sink = sink
        self._restored = sum(map(self._nbytes, self._blocks.values()))
        try:
            with committing(self._file, sink.flush) as self._group:
                yield
        finally:
            self._file.close()

    @property
    def resumed(self) -> bool:
        """Whether it goes on with an earlier run."""
        return self._found is not None

    @property
    def share(self) -> float:
        """How much of the output's bytes is in the journal, from 0 to 1."""
        total = sum(spec.nbytes for spec in self._sink.specs.values()) if self._sink is not None else 0
        done = self._restored + (self._group.committed if self._group else 0)
        return done / total if total else 0.0

    @property
    def there(self) -> Collection[tuple[str, int]]:
        """The blocks that the earlier run has done, by the name of the output and their first row."""
        return frozenset(self._blocks)

    def rows_of(self, unit: Unit) -> list[tuple[int, int]]:
        """The rows [start, stop) of a unit's output that the earlier run has written."""
        return self._rows.get(unit.output.name, [])

    def restored(self, units: Iterable[Unit], sink: JournaledSink) -> Iterator[BlockDone]:
        """The events of these blocks, which count as written."""
        for unit in units:
            name = unit.output.name
            events = [from_record(unit, self._blocks[name, start]) for start, _ in self._rows.get(name, ())]
            whole = self.has(unit)
            for number, done in enumerate(events, 1):
                for part in done.parts:
                    sink.restore(part.name, part.start, part.rows, part.width, part.column)
                yield replace(done, last=whole and number == len(events))

    def add(self, done: BlockDone) -> None:
        """Take the event of a block; QConvertError if an earlier one could not be brought to the disk."""
        assert self._group is not None
        self._group.add(to_record(done), done.bytes_written)

    def note(self, name: str, value: Any) -> None:
        """Keep a value that the same job finds in `notes` when it goes on; with the next blocks."""
        assert self._group is not None
        self.notes[name] = value
        self._group.add(["n", name, value])

    def keep(self, name: str, value: Any) -> None:
        """Keep a value, and wait until it is on the disk."""
        assert self._group is not None
        self.note(name, value)
        self._group.commit()

    def survives(self, error: BaseException) -> bool:
        """Whether a later run can go on after this error, and has something to go on with."""
        done = bool(self._blocks) or (self._group is not None and self._group.committed > 0)
        self.kept = done and _passes(error)
        return self.kept

    def has(self, unit: Unit) -> bool:
        """Whether the earlier run has made all of a unit's output."""
        made = self._rows.get(unit.output.name)
        return made is not None and sum(stop - start for start, stop in made) == unit.output.rows

    def _take(self, found: Journal) -> None:
        self._found = found
        self.block_bytes = found.settings["block_bytes"]
        for record in found.records:
            if record[0] == "n":
                self.notes[record[1]] = record[2]
            elif not self._checksums or all(part[4] is not None for part in record[-1]):
                self._blocks[record[1], record[2]] = record
        for name, start in sorted(self._blocks):
            stop = start + self._blocks[name, start][3]
            self._rows.setdefault(name, []).append((start, stop))

    def _require_same(self, found: Journal) -> None:
        difference = first_difference(found.job, self.job)
        if difference is not None:
            raise OtherJob(
                f"{self.path}: is the unfinished output of another job, whose {difference}",
                "run the command that started it, to continue; or add --restart, to discard it",
            )

    def _nbytes(self, record: Record) -> int:
        """The bytes that the rows of a block of an earlier run take in the output."""
        assert self._sink is not None
        item_bytes = self._sink.item_bytes
        return sum(rows * width * item_bytes(name) for name, _, rows, width, *_ in record[-1])


def to_record(done: BlockDone) -> Record:
    """What is kept of the event of a block."""
    name, parts = done.unit.output.name, list(map(list, done.parts))
    error = None if done.error is None else _values(done.error)
    output_error = None if done.output_error is None else _values(done.output_error)
    return ["b", name, done.start, done.rows, done.bytes_read, error, done.code_error, output_error, parts]


def _values(record: Any) -> list[Any]:
    """The fields of a flat record: `astuple` copies each of them, which takes longer than to write rows."""
    return list(attrgetter(*record.__dataclass_fields__)(record))


def from_record(unit: Unit, record: Record) -> BlockDone:
    """The event of a block of a unit that was kept."""
    from qconvert.quant.affine import QuantError

    start, rows, bytes_read, error, code_error, output_error, parts = record[2:]
    return BlockDone(
        unit,
        start,
        rows,
        bytes_read,
        tuple(WrittenRows(*part) for part in parts),
        None if error is None else QuantError(*error),
        False,
        code_error,
        None if output_error is None else OutputError(*output_error),
    )


def _is_ours(found: Journal) -> bool:
    """Whether a journal holds what is written here; one under right checksums may hold anything else."""
    asked = found.settings.get("block_bytes")
    return isinstance(asked, int) and asked > 0 and all(map(_is_record, found.records))


def _is_record(record: Record) -> bool:
    from qconvert.quant.affine import QuantError

    if record[0] == "n":
        return len(record) == 3 and isinstance(record[1], str)
    if record[0] != "b" or len(record) != 9:
        return False
    name, start, rows, nbytes, error, code_error, output_error, parts = record[1:]
    return (
        isinstance(name, str)
        and all(type(number) is int and number >= 0 for number in (start, rows, nbytes))
        and (error is None or _is_numbers(error, len(fields(QuantError))))
        and isinstance(code_error, float | int)
        and (output_error is None or _is_numbers(output_error, len(fields(OutputError))))
        and isinstance(parts, list)
        and all(map(_is_part, parts))
    )


def _is_numbers(values: object, count: int) -> bool:
    return (
        isinstance(values, list) and len(values) == count and all(isinstance(v, float | int) for v in values)
    )


def _is_part(part: object) -> bool:
    """Whether it can be a `WrittenRows`: a name, and whole numbers, of which the checksum may be none."""
    return (
        isinstance(part, list)
        and len(part) == len(WrittenRows._fields)
        and isinstance(part[0], str)
        and all(value is None or (type(value) is int and value >= 0) for value in part[1:])
        and None not in (*part[1:4], *part[5:])
    )


def _passes(error: BaseException | None) -> bool:
    """Whether a run may succeed after this error without anything else being asked of it."""
    while error is not None:
        passing = isinstance(error, OSError) and error.errno in _PASSING
        if passing or isinstance(error, _PASSING_KINDS):
            return True
        error = error.__cause__
    return False
