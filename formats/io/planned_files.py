"""Writes files whose every offset is known before the first byte, from any number of threads.

The invariant: the bytes do not depend on the order of the writes or the number of threads, and `commit`
succeeds only when every row of every tensor has been written exactly once.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qconvert.core.dtypes import TensorSpec
from qconvert.formats.io.journal import sync_data
from qconvert.formats.io.local_file import (
    create,
    octets,
    read_exactly,
    reopen,
    require_free_disk,
    sync,
    write_exactly,
)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written: its first bytes, made some at a time, and the offset of each tensor.

    `offsets` count from the start of the file; `size` is the file's. A text file has no tensors and is all
    `head`.
    """

    name: str
    head_parts: Callable[[], Iterable[bytes]]
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    size: int

    @property
    def head(self) -> bytes:
        """The first bytes in one piece."""
        return b"".join(self.head_parts())


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a tensor is written: an open file, and the offset of its first row."""

    fd: int
    offset: int
    spec: TensorSpec
    file: str


class _Write(NamedTuple):
    """One write: `rows` rows from `start` on, of the columns [column, column + width). Sorted by column."""

    column: int
    width: int
    start: int
    rows: int


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


class FileSink:
    """The tensors of planned files, written in any order from any thread (a `core.protocols.Sink`).

    Opening it allocates the disk space of all files, so that a full disk shows before any work is done. Call
    `commit`, `suspend` or `abort` only when no other thread is writing. What is written can be read back (a
    `core.protocols.Source`).
    """

    has_weights = True

    def __init__(
        self, folder: Path, files: Sequence[FilePlan], *, claimed: bool = False, resumed: bool = False
    ) -> None:
        """Lays out the files in `folder`; QConvertError if they do not fit on its disk.

        Files the caller has `claimed` (see `local_file.claim`) exist; otherwise none may exist. With
        `resumed` all are there in their full size, and hold what an earlier run has written.
        """
        if not resumed:
            require_free_disk(folder, sum(file.size for file in files))
        self.specs = {name: spec for file in files for name, spec in file.specs.items()}
        self._paths: list[Path] = []
        self._fds: dict[int, str] = {}
        self._places: dict[str, _Location] = {}
        self._written: dict[str, list[_Write]] = defaultdict(list)
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._resumed = resumed
        try:
            for file in files:
                self._lay_out(folder / file.name, file, claimed)
        except BaseException:
            self.suspend() if resumed else self.abort()
            raise

    def _lay_out(self, path: Path, file: FilePlan, claimed: bool) -> None:
        fd = reopen(path, file.size) if self._resumed else create(path, file.size, claimed=claimed)
        self._paths.append(path)
        self._fds[fd] = file.name
        offset = 0
        for part in file.head_parts():
            write_exactly(fd, memoryview(part), offset, file.name)
            offset += len(part)
        self._dirty.add(fd)
        for name, spec in file.specs.items():
            self._places[name] = _Location(fd, file.offsets[name], spec, file.name)

    def write(self, name: str, start: int, rows: np.ndarray, column: int = 0) -> None:
        """Writes rows [start, start + len(rows)) of a tensor: `[rows, width]` in its carrier type.

        Narrower rows go to the columns from `column` on.
        """
        place = self._places[name]
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
            write_exactly(place.fd, octets(np.ascontiguousarray(run)), offset + i * stride, place.file)
        self.restore(name, start, len(rows), rows.shape[1], column)
        with self._lock:
            self._dirty.add(place.fd)

    def restore(self, name: str, start: int, rows: int, width: int, column: int = 0) -> None:
        """Counts rows, or columns of them, as written: an earlier run has done it."""
        if rows * width:
            with self._lock:
                self._written[name].append(_Write(column, width, start, rows))

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a tensor that were written, `[rows, width]` in its carrier type."""
        place = self._places[name]
        spec, size = place.spec, place.spec.dtype.nbytes
        first, last = columns or (0, spec.width)
        rows = np.empty((stop - start, last - first), spec.dtype.carrier)
        offset = place.offset + (start * spec.width + first) * size
        for i, run in enumerate([rows] if last - first == spec.width else rows):
            read_exactly(place.fd, octets(run), offset + i * spec.width * size, place.file)
        return rows

    def flush(self) -> None:
        """Waits until what was written so far is on the disk; QConvertError if that fails."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for fd in sorted(dirty):
            sync_data(fd, self._fds[fd])

    def commit(self) -> None:
        """Waits until every byte is on the disk; ValueError if not every row was written once."""
        for name, place in self._places.items():
            runs, spec = self._written[name], place.spec
            missing = spec.nbytes - sum(run.width * run.rows for run in runs) * spec.dtype.nbytes
            if missing:
                raise ValueError(f"{name}: {missing} of {spec.nbytes} bytes are missing")
            _require_each_once(name, runs)
        for path in self._paths:
            sync(path)
        self.suspend()

    def suspend(self) -> None:
        """Closes the files, and leaves them as they are."""
        while self._fds:
            os.close(self._fds.popitem()[0])

    def abort(self) -> None:
        """Removes the files, if they still exist."""
        self.suspend()
        for path in self._paths:
            path.unlink(missing_ok=True)
