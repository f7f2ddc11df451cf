"""Keeps a journal of what is done of an output, so that a run that was killed goes on where it was.

A journal is a text file of lines that are only ever appended: a checksum, and a JSON array. The first line
says whose work it is; records follow, in groups, each closed by a line with its number of records. The
invariant: a record stands in a whole group only if the bytes that it records were on the disk before it was
written, so that whatever survives a kill or a power cut can be trusted. Everything from the first line on
that is torn or damaged, or in a group that was never closed, does not count.

Every journal has a salt of its own in the checksum, so that what an earlier file has left on the disk is not
read as part of it (as in the write-ahead log of SQLite). The content of records is up to the caller.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, QConvertError, shown
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import explained, sync, write_exactly
from qconvert.formats.io.strict_json import read_bounded

FILE_NAME = ".qconvert-journal"
"""Its name in the folder of an output."""
VERSION = 1
"""That of the records; the caller that begins a journal puts it into the job."""
# A group is closed when so many bytes wait for it, or after so many seconds: no more than that is done again.
GROUP_BYTES = 64 << 20
GROUP_SECONDS = 2.0

Record = list[Any]


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal holds: the job that it belongs to, the records of its whole groups, in order.

    `job` are named facts; `settings` what does not tell jobs apart. `end` is the size of what counts, in
    bytes.
    """

    job: Json
    settings: Json
    salt: str
    records: tuple[Record, ...]
    end: int


def parse(raw: bytes) -> Journal | None:
    """Read a journal, a torn or damaged one as far as it goes; None where the first line is not whole."""
    lines = _lines(raw)
    first, end = next(lines, (b"", 0))
    head = _unpacked(first, None)
    if head is None or len(head) != 4 or head[0] != "h":
        return None
    job, settings, salt = head[1:]
    if not (isinstance(job, dict) and isinstance(settings, dict) and isinstance(salt, str)):
        return None
    records: list[Record] = []
    group: list[Record] = []
    for line, stop in lines:
        record = _unpacked(line, salt)
        if record is None:
            break
        if record[0] != "c":
            group.append(record)
        elif record == ["c", len(group)]:
            records += group
            group, end = [], stop
        else:
            break
    return Journal(job, settings, salt, tuple(records), end)


def load(path: Path) -> Journal | None:
    """Read the journal of this name; None where there is none that counts."""
    if path.is_symlink() or not path.exists():
        return None
    try:
        return parse(read_bounded(path, limits.JOURNAL_BYTES))
    except CorruptCheckpoint as error:
        if not path.exists():  # another process finished, and removed it
            return None
        raise QConvertError(f"{path}: cannot be read ({error.fact})", "remove it, and start again") from error


def discard(path: Path) -> None:
    """Remove a journal, if it is there, before the bytes that it records are changed; waits for the disk."""
    if path.exists() or path.is_symlink():
        with explained(f"{path}: cannot be removed"):
            path.unlink()
        sync(path.parent)


def packed(salt: str, record: Record) -> bytes:
    """Return the line of a record."""
    rest = _RECORD.encode(record).encode()
    return b"%08x %s\n" % (zlib.crc32(salt.encode() + rest), rest)


def whole(job: Json, settings: Json, records: Sequence[Record]) -> bytes:
    """Return all of a journal that nothing will be added to."""
    salt = os.urandom(8).hex()
    lines = [["h", job, settings, salt], *records, ["c", len(records)]]
    return b"".join(packed(salt, line) for line in lines)


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """The first thing in which two jobs differ, with both values; hashes of a file's contents say nothing."""
    if before == now:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            found = first_difference(before.get(key), now.get(key), f"{name} {key}".strip())
            if found is not None:
                return found
    if name.endswith(" sample"):
        return f"{name.removesuffix(' sample')} has changed since"
    return f"{name} was {_said(before)}, and is {_said(now)} now"


_NAME = 20
"""The most characters of a name; longer texts of a record are hashes."""


def _said(value: Any) -> str:
    """A value of JSON in a sentence; of a record, only the short texts that name something."""
    if value is None or value is True or value is False:
        return {None: "not given", True: "yes", False: "no"}[value]
    if isinstance(value, dict):
        names = [each for each in value.values() if isinstance(each, str) and len(each) <= _NAME]
        return f"given ({', '.join(names)})" if names else "given"
    return shown(value, 80)


def _number(value: Any) -> Any:
    """The Python number of a number of numpy."""
    return value.item()


_RECORD = json.JSONEncoder(separators=(",", ":"), default=_number)


def _lines(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The whole lines, without their ends, and where the next one begins."""
    start = 0
    while (stop := raw.find(b"\n", start)) >= 0:
        yield raw[start:stop], stop + 1
        start = stop + 1


def _unpacked(line: bytes, salt: str | None) -> Record | None:
    """The record of a line, None if it is damaged; a first line has its own salt in it."""
    crc, _, rest = line.partition(b" ")
    try:
        record = json.loads(rest)
        if not isinstance(record, list) or not record:
            return None
        own = str(record[-1]) if salt is None else salt
        return record if crc == b"%08x" % zlib.crc32(own.encode() + rest) else None
    except (ValueError, RecursionError):
        return None


class JournalFile:
    """A journal that is being written, by one thread."""

    def __init__(self, path: Path, fd: int, journal: Journal) -> None:
        self._path, self._fd, self._salt, self._end = path, fd, journal.salt, journal.end

    @classmethod
    def create(cls, path: Path, job: Json, settings: Json) -> JournalFile:
        """Begin a journal, which gets its name when its first line is on the disk. QConvertError if not."""
        salt = os.urandom(8).hex()
        line = packed(salt, ["h", job, settings, salt])
        new = path.with_name(f"{path.name}.new")
        with explained(f"{path}: cannot be created"):
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            try:
                write_exactly(fd, memoryview(line), 0, str(path))
                os.fsync(fd)
                new.replace(path)
                sync(path.parent)
            except BaseException:
                os.close(fd)
                new.unlink(missing_ok=True)
                raise
        return cls(path, fd, Journal(job, settings, salt, (), len(line)))

    @classmethod
    def reopen(cls, path: Path, journal: Journal) -> JournalFile:
        """Go on with a journal; what does not count in it is cut off. QConvertError if that fails."""
        with explained(f"{path}: cannot be opened"):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                os.ftruncate(fd, journal.end)
                os.fsync(fd)
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd, journal)

    def append(self, records: Iterable[Record]) -> None:
        """Add a group and wait until it is on the disk; QConvertError if that fails, which is final."""
        lines = [packed(self._salt, record) for record in records]
        lines.append(packed(self._salt, ["c", len(lines)]))
        data = b"".join(lines)
        write_exactly(self._fd, memoryview(data), self._end, str(self._path))
        sync_data(self._fd, self._path.name)
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)


def sync_data(fd: int, name: str) -> None:
    """Wait until the bytes of a file are on the disk, whatever else is known of it; QConvertError if not."""
    with explained(f"{shown(name)}: cannot be written to disk"):
        getattr(os, "fdatasync", os.fsync)(fd)  # macOS has no fdatasync


class GroupCommit:
    """Brings finished work to the disk in the background, and then its records into the journal.

    After an error nothing is tried again: the system may have dropped what it could not write, and say that
    all is well the next time. The error is raised by the next call. `committed` are the bytes of work in the
    journal.
    """

    def __init__(self, journal: JournalFile, flush: Callable[[], None]) -> None:
        """`flush` waits until all that was written so far is on the disk."""
        self._journal, self._flush = journal, flush
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._nbytes = 0
        self.committed = 0
        self._closing = self._pressed = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, record: Record, nbytes: int = 0) -> None:
        """Take a record of work that is done, of so many written bytes."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            self._waiting.append(record)
            self._nbytes += nbytes
            if self._nbytes >= GROUP_BYTES:
                self._changed.notify_all()

    def commit(self) -> None:
        """Wait until all that was added is in the journal; QConvertError if it could not be brought there."""
        with self._changed:
            self._pressed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pressed or self._failed is not None)
            if self._failed is not None:
                raise self._failed

    def close(self) -> None:
        """Commit what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(self._is_due, GROUP_SECONDS)
                pressed = self._pressed
                # Taken before flushing: the bytes that they record have been written by now.
                taken, self._waiting = self._waiting, []
                nbytes, self._nbytes = self._nbytes, 0
                last = self._closing
            try:
                if taken:
                    self._flush()
                    self._journal.append(taken)
                    self.committed += nbytes
            except BaseException as error:
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
                return
            if pressed:
                with self._changed:
                    self._pressed = False
                    self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._closing or self._pressed or self._nbytes >= GROUP_BYTES


@contextmanager
def committing(journal: JournalFile, flush: Callable[[], None]) -> Iterator[GroupCommit]:
    """A group commit that ends with its block, which it lets fail with its own error."""
    group = GroupCommit(journal, flush)
    try:
        yield group
        group.close()
    except BaseException:
        with suppress(QConvertError):
            group.close()  # no thread outlives the files that it flushes
        raise
