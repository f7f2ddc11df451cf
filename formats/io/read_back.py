"""Verifies written files before they are renamed: headers, every byte, every tensor's hash.

The header is read by the safetensors library, which qconvert does not write with; the bytes are read back
from the disk and compared with the CRC-32 of what was passed to the sink.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from operator import eq
from pathlib import Path
from typing import Any, Protocol

from qconvert.core.dtypes import TensorSpec
from qconvert.errors import REPORT, CheckFailed
from qconvert.formats.io.array_table import Form, kinds_of
from qconvert.formats.io.local_file import read_exactly
from qconvert.formats.io.planned_files import FilePlan

WINDOW = 4 << 20
# Small arrays are verified so many bytes at a time, and so many times for each thread before one is awaited.
_SPAN_BYTES = 16 << 20
_SPANS_AHEAD = 4


class Written(Protocol):
    """Rows or columns of one array, as passed to the sink (see `convert.runner.WrittenRows`)."""

    @property
    def start(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def column(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def crc32(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Hashes:
    """SHA-256 in hexadecimal: of whole files, and of each tensor's stored bytes."""

    files: Mapping[str, str]
    tensors: Mapping[str, str]


HeaderCheck = Callable[[Path, Mapping[str, TensorSpec]], None]
Progress = Callable[[int, int], None]
"""Is told how many bytes of how many were read back, by one thread at a time."""


_Stored = tuple[str, Form, int]
"""An array: its name, how its rows are held, and its offset."""


class _Count:
    """Adds up the bytes that threads have read, and tells how many there are of all."""

    def __init__(self, total: int, tell: Progress) -> None:
        self._done, self._total, self._tell, self._lock = 0, total, tell, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._tell(self._done, self._total)


def verify_files(
    folder: Path,
    files: Sequence[FilePlan],
    written: Mapping[str, Sequence[Written]],
    jobs: int,
    check_header: HeaderCheck | None = None,
    progress: Progress = lambda done, total: None,
) -> Hashes:
    """Re-reads every file; returns the hashes. CheckFailed names the first difference.

    What the system still remembers of them is dropped first, so that the disk is asked.
    `check_header` compares a file's header with the plan, by default as safetensors. Every byte of a tensor
    counts twice for `progress`: as one of the file, and as one of the tensor.
    """
    count = _Count(bytes_to_verify(files), progress).add
    check_header = check_header or check_safetensors_header
    for each in files:
        _forget(folder / each.name)
    found: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        whole = {f.name: pool.submit(file_sha256, folder / f.name, count) for f in files}
        running: deque[Future[dict[str, str]]] = deque()
        for file in files:
            for span in _spans(file):
                running.append(pool.submit(_verify_span, folder / file.name, span, written, count))
                if len(running) > _SPANS_AHEAD * jobs:
                    found |= running.popleft().result()
            if file.specs:
                check_header(folder / file.name, file.specs)
        for future in running:
            found |= future.result()
        return Hashes({name: future.result() for name, future in whole.items()}, found)


def _spans(file: FilePlan) -> Iterator[list[_Stored]]:
    """Yields arrays of a file that lie together: large ones alone, small ones in runs."""
    span: list[_Stored] = []
    filled = 0
    for stored in file.specs.places():
        nbytes = stored[1].nbytes
        if span and filled + nbytes > _SPAN_BYTES:
            yield span
            span, filled = [], 0
        span.append(stored)
        filled += nbytes
    if span:
        yield span


def bytes_to_verify(files: Iterable[FilePlan]) -> int:
    """How many bytes are read to verify files: every byte of a tensor twice."""
    return sum(file.size + file.specs.nbytes for file in files)


def _forget(path: Path) -> None:
    """Drops a file that is on the disk from the page cache, where the system can be told to."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # a file system that has no such cache
        finally:
            os.close(fd)


def file_sha256(path: Path, count: Callable[[int], None] = lambda nbytes: None) -> str:
    """Returns the SHA-256 of a whole file, read in bounded windows; `count` is told their sizes."""
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for window in _File(fd, path.name, memoryview(bytearray(min(WINDOW, size)))).windows(0, size):
            digest.update(window)
            count(len(window))
    finally:
        os.close(fd)
    return digest.hexdigest()


def check_safetensors_header(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Reads the header with the safetensors library; CheckFailed if its tensors differ from `specs`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            if _is_as_planned(file, specs):
                return
            names = set(file.keys())
            seen = ((name, file.get_slice(name)) for name in names)
            found = ((name, (part.get_dtype(), tuple(part.get_shape()))) for name, part in seen)
            odd = [each for each in found if each[0] not in specs or each[1] != _said(specs[each[0]])]
    except SafetensorError as error:
        raise CheckFailed(f"{path.name}: the safetensors library refuses it ({error})", REPORT) from error
    odd += [(name, _said(spec)) for name, spec in specs.items() if name not in names]
    if odd:
        name, what = min(odd)
        raise CheckFailed(f"{path.name}: {name} is not what was planned ({what})", REPORT)


def _is_as_planned(file: Any, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether an open file says of arrays what `specs` do, in this order, which is that of their bytes."""
    if not hasattr(file, "offset_keys"):  # safetensors before 0.5
        return False
    names = file.offset_keys()
    if names != list(specs):
        return False
    said = cache(lambda kind: (kind[0].code, list(kind[1])))
    found = ((part.get_dtype(), part.get_shape()) for part in map(file.get_slice, names))
    return all(map(eq, found, (said(kind) for _, kind in kinds_of(specs))))


def _said(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    return spec.dtype.code, spec.shape


def _verify_span(
    path: Path,
    span: Sequence[_Stored],
    written: Mapping[str, Sequence[Written]],
    count: Callable[[int], None],
) -> dict[str, str]:
    """Returns the SHA-256 of arrays that lie together, by name; CheckFailed where one is not as written."""
    fd = os.open(path, os.O_RDONLY)
    try:
        buffer = memoryview(bytearray(min(WINDOW, _extent(span))))
        file, found = _File(fd, path.name, buffer), dict[str, str]()
        for some, nbytes in _windows(span):
            name, _, offset = some[0]
            if nbytes > WINDOW:
                found[name] = _verify_tensor(file, some[0], written.get(name, ()), count)
                continue
            read_exactly(fd, buffer[:nbytes], offset, file.name)
            count(sum(form.nbytes for _, form, _ in some))
            for stored in some:
                name, form, at = stored
                data = buffer[at - offset : at - offset + form.nbytes]
                found[name] = _verify_bytes(file, stored, data, written.get(name, ()))
        return found
    finally:
        os.close(fd)


def _windows(span: Sequence[_Stored]) -> Iterator[tuple[Sequence[_Stored], int]]:
    """Yields arrays that fit one window, and the bytes from the first to the last; larger ones alone."""
    some: list[_Stored] = []
    for stored in span:
        if some and stored[2] + stored[1].nbytes - some[0][2] > WINDOW:
            yield some, _extent(some)
            some = []
        some.append(stored)
    if some:
        yield some, _extent(some)


def _extent(arrays: Sequence[_Stored]) -> int:
    """The bytes from the first array to the end of the last one."""
    (_, _, begin), (_, form, offset) = arrays[0], arrays[-1]
    return offset + form.nbytes - begin


def _verify_bytes(file: _File, stored: _Stored, data: memoryview, written: Sequence[Written]) -> str:
    """Returns the SHA-256 of a tensor's bytes, after comparing every written run with its CRC-32."""
    name, (_, rows, width, size, _), _ = stored
    stride, row = width * size, 0
    for run in sorted(written, key=_place) if len(written) > 1 else written:
        if run.width == width:
            _require_next(name, row, run)
            part = data if not row and run.rows == rows else data[row * stride : (row + run.rows) * stride]
            same = zlib.crc32(part) == run.crc32
            row += run.rows
        else:
            crc = 0
            for i in range(run.start, run.start + run.rows):
                begin = i * stride + run.column * size
                crc = zlib.crc32(data[begin : begin + run.width * size], crc)
            same = crc == run.crc32
        _require(same, file.name, name, run)
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class _File:
    """An open file, and a buffer to read windows of it into."""

    fd: int
    name: str
    buffer: memoryview

    def windows(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, WINDOW):
            window = self.buffer[: min(WINDOW, nbytes - start)]
            read_exactly(self.fd, window, offset + start, self.name)
            yield window


def _verify_tensor(
    file: _File, stored: _Stored, written: Iterable[Written], count: Callable[[int], None]
) -> str:
    """Returns the SHA-256 of a tensor's bytes, after comparing every written run with its CRC-32."""
    runs, (name, form, offset) = sorted(written, key=_place), stored
    if any(run.width != form.width for run in runs):
        return _verify_tiles(file, stored, runs, count)
    digest = hashlib.sha256()
    row = 0
    for run in runs:
        _require_next(name, row, run)
        nbytes = run.rows * form.width * form.item_bytes
        crc = 0
        for window in file.windows(offset, nbytes):
            digest.update(window)
            crc = zlib.crc32(window, crc)
            count(len(window))
        _require(crc == run.crc32, file.name, name, run)
        offset += nbytes
        row += run.rows
    return digest.hexdigest()


def _verify_tiles(file: _File, stored: _Stored, runs: Iterable[Written], count: Callable[[int], None]) -> str:
    """Does the same for runs of some columns only: each is gathered from its rows."""
    name, (_, _, width, size, nbytes), offset = stored
    stride = width * size
    digest = hashlib.sha256()
    for window in file.windows(offset, nbytes):
        digest.update(window)
        count(len(window))
    for run in runs:
        crc = 0
        buffer = memoryview(bytearray(run.width * size))
        for row in range(run.start, run.start + run.rows):
            read_exactly(file.fd, buffer, offset + row * stride + run.column * size, file.name)
            crc = zlib.crc32(buffer, crc)
        _require(crc == run.crc32, file.name, name, run)
    return digest.hexdigest()


def _place(run: Written) -> tuple[int, int]:
    return run.start, run.column


def _require_next(name: str, row: int, run: Written) -> None:
    if run.start != row:
        raise CheckFailed(f"{name}: rows {row} to {run.start} were never written", REPORT)


def _require(same: bool, file: str, name: str, run: Written) -> None:
    if not same:
        raise CheckFailed(
            f"{file}: {name} rows {run.start} to {run.start + run.rows} read back differently",
            "the disk or the memory of this machine is faulty; write to another disk",
        )
