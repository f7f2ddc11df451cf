"""Writes files whose every offset is known before the first byte, from any number of threads.

The invariant: the bytes do not depend on the order of the writes or the number of threads, and `commit`
succeeds only when every row of every tensor has been written exactly once.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qconvert.core.dtypes import TensorSpec
from qconvert.errors import QConvertError
from qconvert.formats.io.local_file import create, flush, octets, require_free_disk, sync, write_exactly

FLUSH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to be written: its first bytes, and the offset of each tensor.

    `offsets` count from the start of the file; `size` is the file's. A text file has no tensors and is all
    `head`.
    """

    name: str
    head: bytes
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    size: int


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


class _Flusher:
    """Flushes written bytes to disk in the background, one call at a time.

    Otherwise all of them would wait for `commit`, which then takes a third of the time of copying a file.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._waiting: dict[int, int] = defaultdict(int)
        self._running: Future[None] | None = None

    def wrote(self, fd: int, nbytes: int, file: str) -> None:
        """Flushes the file once many of its bytes wait; raises the QConvertError of an earlier flush."""
        self._waiting[fd] += nbytes
        if self._waiting[fd] < FLUSH_BYTES or (self._running and not self._running.done()):
            return
        if self._running:
            self._running.result()
        self._waiting[fd] = 0
        self._running = self._thread.submit(flush, fd, file)

    def finish(self) -> None:
        """Waits until no file is in use any more; raises the QConvertError of the last flush."""
        self._thread.shutdown()
        if self._running:
            self._running.result()


class FileSink:
    """The tensors of planned files, written in any order from any thread (a `core.protocols.Sink`).

    Opening it allocates the disk space of all files, so that a full disk shows before any work is done. Call
    `commit` or `abort` only when no other thread is writing.
    """

    def __init__(self, folder: Path, files: Sequence[FilePlan], *, claimed: bool = False) -> None:
        """Lays out the files in `folder`; QConvertError if they do not fit on its disk.

        Files the caller has `claimed` (see `local_file.claim`) exist; otherwise none may exist.
        """
        require_free_disk(folder, sum(file.size for file in files))
        self._paths: list[Path] = []
        self._fds: list[int] = []
        self._places: dict[str, _Location] = {}
        self._written: dict[str, list[_Write]] = defaultdict(list)
        self._lock = threading.Lock()
        self._flusher = _Flusher()
        try:
            for file in files:
                self._lay_out(folder / file.name, file, claimed)
        except BaseException:
            self.abort()
            raise

    def _lay_out(self, path: Path, file: FilePlan, claimed: bool) -> None:
        fd = create(path, file.size, claimed=claimed)
        self._paths.append(path)
        self._fds.append(fd)
        write_exactly(fd, memoryview(file.head), 0, file.name)
        for name, spec in file.specs.items():
            self._places[name] = _Location(fd, file.offsets[name], spec, file.name)

    def write(self, name: str, start: int, rows: np.ndarray, column: int = 0) -> None:
        """Writes rows [start, start + len(rows)) of a tensor: `[rows, width]` in its carrier type.

        Narrower rows go to the columns from `column` on.
        """
        parameter = self._places[name]
        spec = parameter.spec
        if (
            rows.dtype != spec.dtype.carrier
            or rows.ndim != 2
            or not 0 <= column <= spec.width - rows.shape[1]
        ):
            raise ValueError(f"{name}: {rows.dtype} {rows.shape} are not rows of {spec}")
        if not 0 <= start <= spec.rows - len(rows):
            raise ValueError(f"{name}: rows [{start}, {start + len(rows)}) of {spec.rows}")
        stride = spec.width * spec.dtype.nbytes
        offset = parameter.offset + start * stride + column * spec.dtype.nbytes
        whole = rows.shape[1] == spec.width
        for i, run in enumerate([rows] if whole else rows):
            write_exactly(
                parameter.fd, octets(np.ascontiguousarray(run)), offset + i * stride, parameter.file
            )
        with self._lock:
            if rows.size:
                self._written[name].append(_Write(column, rows.shape[1], start, len(rows)))
            self._flusher.wrote(parameter.fd, rows.nbytes, parameter.file)

    def commit(self) -> None:
        """Waits until every byte is on the disk; ValueError if not every row was written once."""
        for name, parameter in self._places.items():
            runs, spec = self._written[name], parameter.spec
            missing = spec.nbytes - sum(run.width * run.rows for run in runs) * spec.dtype.nbytes
            if missing:
                raise ValueError(f"{name}: {missing} of {spec.nbytes} bytes are missing")
            _require_each_once(name, runs)
        self._flusher.finish()
        for path in self._paths:
            sync(path)
        self._close()

    def abort(self) -> None:
        """Removes the files, if they still exist."""
        with suppress(QConvertError):
            self._flusher.finish()
        self._close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
