"""Writes files whose every offset is known before the first byte, from any number of threads.

The invariant: the bytes do not depend on the order of the writes or the number of threads, and `commit`
succeeds only when every row of every tensor has been written exactly once.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qconvert.core.dtypes import TensorSpec
from qconvert.core.protocols import ArrayRows
from qconvert.errors import shown
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.io.journal import sync_data
from qconvert.formats.io.local_file import (
    WRITE_BYTES,
    create,
    explained,
    octets,
    read_exactly,
    reopen,
    require_free_disk,
    sync,
    write_exactly,
)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written: its first bytes, made some at a time, and its arrays with their offsets.

    `size` is the file's. A text file has no arrays and is all `head`.
    """

    name: str
    head_parts: Callable[[], Iterable[bytes]]
    specs: ArrayTable
    size: int

    @property
    def head(self) -> bytes:
        """The first bytes in one piece."""
        return b"".join(self.head_parts())

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset of every array from the start of the file."""
        return self.specs.offsets


class _Location(NamedTuple):
    """Where a tensor is written: an open file, its number in that file, and the offset of its first row."""

    file: _OpenFile
    number: int
    offset: int
    spec: TensorSpec

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.plan.name


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file that is written: how many bytes of each array are missing."""

    plan: FilePlan
    fd: int
    missing: array[int]


class _Write(NamedTuple):
    """One write: `rows` rows from `start` on, of the columns [column, column + width). Sorted by column."""

    column: int
    width: int
    start: int
    rows: int


class _Specs(Mapping[str, TensorSpec]):
    """The arrays of several files by name."""

    __slots__ = ("_homes",)

    def __init__(self, homes: Mapping[str, _OpenFile]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> TensorSpec:
        return self._homes[name].plan.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _require_each_once(name: str, runs: Iterable[_Write]) -> None:
    """Raises ValueError unless these writes cover every row of a tensor exactly once.

    Their bytes must add up to the tensor's. They are whole rows, or column bands, each with all rows.
    """
    column = 0
    for (first, width), band in groupby(sorted(runs), key=lambda run: run[:2]):
        row = 0
        for run in band:
            if (first, run.start) != (column, row):
                raise ValueError(f"{name}: row {run.start}, column {first} where {row}, {column} was missing")
            row += run.rows
        column += width


_Whole = tuple[int, int, memoryview, _OpenFile, int]
"""A whole array: descriptor and offset, its bytes, its file, and its number there."""


def _side_by_side(arrays: Iterable[_Whole]) -> Iterator[tuple[int, int, memoryview, _OpenFile]]:
    """Yields where runs of arrays begin, their bytes, and their file; no more than one call takes."""
    run: list[memoryview] = []
    begin = end = 0
    home: _OpenFile | None = None
    for _, offset, data, file, _ in arrays:
        if home is not None and (file is not home or offset != end or end + len(data) - begin > WRITE_BYTES):
            yield home.fd, begin, _joined(run), home
            run = []
        if not run:
            home, begin, end = file, offset, offset
        run.append(data)
        end += len(data)
    if home is not None:
        yield home.fd, begin, _joined(run), home


def _joined(run: Sequence[memoryview]) -> memoryview:
    return run[0] if len(run) == 1 else memoryview(b"".join(run))


class FileSink:
    """The tensors of planned files, written in any order from any thread (a `core.protocols.Sink`).

    Opening it allocates the disk space of all files, so that a full disk shows before any work is done. Call
    `commit`, `suspend` or `abort` only when no other thread is writing. What is written can be read back (a
    `core.protocols.Source`).
    """

    has_weights = True

    def __init__(
        self,
        folder: Path,
        files: Sequence[FilePlan],
        *,
        claimed: bool = False,
        resumed: bool = False,
        sparse: bool = False,
    ) -> None:
        """Allocates the files in `folder`; QConvertError if they do not fit on its disk.

        Files the caller has `claimed` (see `local_file.claim`) exist; otherwise none may exist. With
        `resumed` all are there in their full size, and hold what an earlier run has written. `sparse` ones
        take disk space as they are written, and are meant to be `dropped` one after another.
        """
        if not (resumed or sparse):
            require_free_disk(folder, sum(file.size for file in files))
        self._paths: list[Path] = []
        self._fds: dict[int, str] = {}
        self._files: list[_OpenFile] = []
        # Arrays that are not written in one go, each with its writes: of very many arrays the few large ones.
        self._parts: dict[str, list[_Write]] = defaultdict(list)
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._resumed, self._sparse = resumed, sparse
        try:
            for file in files:
                self._lay_out(folder / file.name, file, claimed)
        except BaseException:
            self.suspend() if resumed else self.abort()
            raise
        self._homes = {name: file for file in self._files for name in file.plan.specs}

    def _lay_out(self, path: Path, file: FilePlan, claimed: bool) -> None:
        fd = (
            reopen(path, file.size)
            if self._resumed
            else create(path, file.size, claimed=claimed, sparse=self._sparse)
        )
        self._paths.append(path)
        self._fds[fd] = file.name
        offset = 0
        for part in file.head_parts():
            write_exactly(fd, memoryview(part), offset, file.name)
            offset += len(part)
        self._dirty.add(fd)
        missing = array("q", (spec.nbytes for spec in file.specs.values()))
        self._files.append(_OpenFile(file, fd, missing))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The arrays of all files by name."""
        return _Specs(self._homes)

    def _place(self, name: str) -> _Location:
        file = self._homes[name]
        table = file.plan.specs
        return _Location(file, table.row(name), table.offset(name), table[name])

    def write(self, name: str, start: int, rows: np.ndarray, column: int = 0) -> None:
        """Writes rows [start, start + len(rows)) of a tensor: `[rows, width]` in its carrier type.

        Narrower rows go to the columns from `column` on.
        """
        place = self._place(name)
        spec = place.spec
        if (
            rows.dtype != spec.dtype.carrier
            or rows.ndim != 2
            or not 0 <= column <= spec.width - rows.shape[1]
        ):
            raise ValueError(f"{name}: {rows.dtype} {rows.shape} are not rows of {spec}")
        if not 0 <= start <= spec.rows - len(rows):
            raise ValueError(f"{name}: rows [{start}, {start + len(rows)}) of {spec.rows}")
        stride = spec.width * spec.dtype.nbytes
        offset = place.offset + start * stride + column * spec.dtype.nbytes
        whole = rows.shape[1] == spec.width
        for i, run in enumerate([rows] if whole else rows):
            write_exactly(place.file.fd, octets(np.ascontiguousarray(run)), offset + i * stride, place.name)
        self._count(place, start, len(rows), rows.shape[1], column)
        with self._lock:
            self._dirty.add(place.file.fd)

    def write_all(self, arrays: Iterable[ArrayRows]) -> None:
        """Writes contiguous rows of many arrays; whole arrays that lie side by side go in one call."""
        whole: list[_Whole] = []
        for each in arrays:
            file, rows = self._homes[each.name], each.rows
            number, form, offset = file.plan.specs.place(each.name)
            if rows.dtype == form.carrier and rows.shape == form[1:3]:
                whole.append((file.fd, offset, octets(rows), file, number))
            else:
                self.write(each.name, each.start, rows, each.column)
        whole.sort(key=itemgetter(0, 1))
        for fd, offset, data, file in _side_by_side(whole):
            write_exactly(fd, data, offset, file.plan.name)
        with self._lock:
            for fd, _, data, file, number in whole:
                file.missing[number] -= len(data)
                self._dirty.add(fd)

    def item_bytes(self, name: str) -> int:
        """Returns the bytes of one element of an array."""
        return self._homes[name].plan.specs.place(name)[1].item_bytes

    def restore(self, name: str, start: int, rows: int, width: int, column: int = 0) -> None:
        """Counts rows, or columns of them, as written: an earlier run has done it."""
        self._count(self._place(name), start, rows, width, column)

    def _count(self, place: _Location, start: int, rows: int, width: int, column: int) -> None:
        spec = place.spec
        with self._lock:
            place.file.missing[place.number] -= rows * width * spec.dtype.nbytes
            if rows * width and (rows, width) != (spec.rows, spec.width):
                self._parts[spec.name].append(_Write(column, width, start, rows))

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a tensor that were written, `[rows, width]` in its carrier type."""
        place = self._place(name)
        spec, size = place.spec, place.spec.dtype.nbytes
        first, last = columns or (0, spec.width)
        rows = np.empty((stop - start, last - first), spec.dtype.carrier)
        offset = place.offset + (start * spec.width + first) * size
        for i, run in enumerate([rows] if last - first == spec.width else rows):
            read_exactly(place.file.fd, octets(run), offset + i * spec.width * size, place.name)
        return rows

    def flush(self) -> None:
        """Waits until what was written so far is on the disk; QConvertError if that fails."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for fd in sorted(dirty):
            sync_data(fd, self._fds[fd])

    def dropped(self, file: str) -> None:
        """Gives the disk space of a sparse file back; it keeps its size, and holds zeros."""
        fd = next(fd for fd, name in self._fds.items() if name == file)
        size = os.fstat(fd).st_size
        with explained(f"{shown(file)}: cannot be emptied"):
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size)

    def commit(self) -> None:
        """Waits until every byte is on the disk; ValueError if not every row was written once."""
        for file in self._files:
            if any(file.missing):
                lacking = zip(file.plan.specs.values(), file.missing, strict=True)
                spec, nbytes = next(each for each in lacking if each[1])
                raise ValueError(f"{spec.name}: {nbytes} of {spec.nbytes} bytes are missing")
        for name, runs in self._parts.items():
            _require_each_once(name, runs)
        for path in self._paths:
            sync(path)
        self.suspend()

    def suspend(self) -> None:
        """Closes the files, and leaves them as they are."""
        while self._fds:
            os.close(self._fds.popitem()[0])

    def abort(self) -> None:
        """Removes the files, if they still exist and the disk lets it: it may be failing."""
        self.suspend()
        for path in self._paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
