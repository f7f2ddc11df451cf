"""Reads and writes llama-imatrix's importance matrices: mean squared activations by GGUF tensor name.

Two containers: GGUF with `NAME.in_sum2` and `NAME.counts` tensors, and the older binary `.dat`. Source:
tools/imatrix/imatrix.cpp and load_imatrix in tools/quantize/quantize.cpp of llama.cpp (commit 0c1e57098).
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.gguf.writer import GGUFSink, plan_files
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import amount, octets, open_regular, read_exactly

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MADE_BY = "give what `qconvert calibrate` or llama-imatrix wrote for this model"


@dataclass(frozen=True, slots=True)
class Imatrix:
    """The mean squared activation of every input column, by tensor name; experts are concatenated.

    `means` are arrays of float32 (type code "f"), four bytes a column. `dataset` is the text it was computed
    on and `chunks` the number of its chunks, where the file has them.
    """

    file: str
    means: Mapping[str, array[float]]
    dataset: str | None
    chunks: int

    @property
    def kv(self) -> tuple[KV, ...]:
        """The metadata that llama-quantize writes about it into the files made with it."""
        dataset = [] if self.dataset is None else [KV.text("quantize.imatrix.dataset", self.dataset)]
        chunks = [KV.u32("quantize.imatrix.chunks_count", self.chunks)] if self.chunks > 0 else []
        return (
            KV.text("quantize.imatrix.file", self.file),
            *dataset,
            KV.u32("quantize.imatrix.entries_count", len(self.means)),
            *chunks,
        )


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """Sums of squares of a tensor's input columns, float32 [E, I], and rows summed up, int64 [E].

    E is 1 but for stacks of experts.
    """

    squares_EI: np.ndarray
    counts_E: np.ndarray


def write_imatrix(
    path: Path,
    entries: Mapping[str, ImatrixEntry],
    *,
    datasets: Sequence[str],
    window: int,
    overwrite: bool = False,
) -> None:
    """Writes what llama-imatrix would: sums and counts by tensor, its texts and the tokens of a chunk.

    Source: IMatrixCollector::save_imatrix in tools/imatrix/imatrix.cpp. Raises OutputExists when the name is
    taken, unless `overwrite`.
    """
    most = max((int(entry.counts_E.max()) for entry in entries.values()), default=0)
    kv = (
        KV.text("general.type", "imatrix"),
        KV.texts("imatrix.datasets", tuple(datasets)),
        KV.u32("imatrix.chunk_count", most // window),
        KV.u32("imatrix.chunk_size", window),
    )
    tensors, rows = [], {}
    for name, entry in sorted(entries.items()):
        squares_EI = entry.squares_EI.astype(np.float32)
        counts_E1 = entry.counts_E.astype(np.float32)[:, None]
        for suffix, values in ((_SUMS, squares_EI), (_COUNTS, counts_E1)):
            shape = values.shape if len(values) > 1 else values.shape[1:]
            tensor = GGUFTensor(name + suffix, GGMLType.F32, shape)
            tensors.append(tensor)
            rows[tensor.name] = values.reshape(tensor.stored.rows, tensor.stored.width)
    sink = GGUFSink(path.parent, plan_files(path.name, kv, tensors), overwrite=overwrite)
    try:
        for name, values in rows.items():
            sink.write(name, 0, values)
        sink.commit()
        sink.publish()
    except BaseException:
        sink.abort()
        raise


def read_imatrix(path: Path) -> Imatrix:
    """Reads an importance matrix. `dataset` and errors use the path as the caller gave it.

    Raises CorruptCheckpoint for a damaged file and for numbers that are not finite or negative.
    """
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file", _MADE_BY)
    with path.open("rb") as file:
        magic = file.read(4)
    means, dataset, chunks = _from_gguf(path) if magic == b"GGUF" else _from_dat(path)
    return Imatrix(str(path), means, dataset, chunks)


_Entries = tuple[dict[str, "array[float]"], str | None, int]


def _checked(path: Path, name: str, means: np.ndarray) -> array[float]:
    if not np.isfinite(means).all() or (means < 0).any():
        raise CorruptCheckpoint(f"{path.name}: {shown(name)} holds a negative or infinite mean", _MADE_BY)
    checked = array("f")
    checked.frombytes(octets(means.astype(np.float32, copy=False)))
    return checked


def _check_values(path: Path, name: str, values: int) -> None:
    if values > limits.IMATRIX_ENTRY_VALUES:
        most = limits.IMATRIX_ENTRY_VALUES
        raise CorruptCheckpoint(
            f"{path.name}: {shown(name)} has {values:,} values (limit {most:,})", _MADE_BY
        )


def _check_size(path: Path, nbytes: int) -> None:
    if nbytes > limits.IMATRIX_BYTES:
        raise CorruptCheckpoint(
            f"{path.name}: has {amount(nbytes)}, the limit is {amount(limits.IMATRIX_BYTES)}"
        )


def _from_gguf(path: Path) -> _Entries:
    with GGUFFile(path) as file:
        names = [n.removesuffix(_SUMS) for n in file.tensors if n.endswith(_SUMS)]
        if not names:
            raise CorruptCheckpoint(f"{path.name}: holds no {_SUMS} tensors", _MADE_BY)
        _check_size(path, sum(tensor.nbytes for tensor in file.tensors.values()))
        datasets = file.kv.get("imatrix.datasets")
        listed = datasets.value if datasets and isinstance(datasets.value, tuple) else ()
        first = next((text for text in listed[:1] if isinstance(text, str)), None)
        chunks = file.headers[0].number("imatrix.chunk_count") or 0
        return {n: _checked(path, n, _mean(file, path.name, n)) for n in names}, first, chunks


def _mean(file: GGUFFile, origin: str, name: str) -> np.ndarray:
    """Divides sums by counts, expert by expert; an expert without tokens weighs all columns equally."""
    if name + _COUNTS not in file.tensors:
        raise CorruptCheckpoint(f"{origin}: {shown(name)}{_COUNTS} is missing", _MADE_BY)
    _check_values(Path(origin), name, file.specs[name + _SUMS].count)
    sums_EI = file.read(name + _SUMS, 0, file.specs[name + _SUMS].rows).astype(np.float32)
    counts_E = file.read(name + _COUNTS, 0, file.specs[name + _COUNTS].rows).reshape(-1).astype(np.float32)
    if sums_EI.size % counts_E.size:
        raise CorruptCheckpoint(
            f"{origin}: {shown(name)}{_COUNTS} has {counts_E.size} entries for {sums_EI.size} sums", _MADE_BY
        )
    sums_EI = sums_EI.reshape(len(counts_E), -1)
    means_EI = np.ones_like(sums_EI)
    np.divide(sums_EI, counts_E[:, None], out=means_EI, where=counts_E[:, None] > 0)
    return means_EI.reshape(-1)


def _from_dat(path: Path) -> _Entries:
    """Returns entries of (name, calls, values): values are sums of one mean per call.

    Newer files end with the number of chunks and the name of the text.
    """
    fd = open_regular(path)
    try:
        file = _Dat(path, fd, os.fstat(fd).st_size)
        _check_size(path, file.size)
        return _entries(file)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path.name}: not an importance matrix ({error})", _MADE_BY) from error
    finally:
        os.close(fd)


@dataclass
class _Dat:
    """An open file and a position in it, read in bounded pieces."""

    path: Path
    fd: int
    size: int
    position: int = 0

    def take(self, count: int, what: str) -> bytes:
        if not 0 <= count <= self.size - self.position:
            raise ValueError(f"{what} runs past the end")
        buffer = bytearray(count)
        read_exactly(self.fd, memoryview(buffer), self.position, self.path.name)
        self.position += count
        return bytes(buffer)

    def number(self, what: str) -> int:
        return int(struct.unpack("<i", self.take(4, what))[0])


def _entries(file: _Dat) -> _Entries:
    count = file.number("the number of entries")
    if not 0 < count <= min(file.size // 12, limits.GGUF_RECORDS):
        raise ValueError(f"{count} entries in {file.size} bytes")
    found: dict[str, array[float]] = {}
    for number in range(count):
        what = f"entry {number + 1} of {count}"
        name = file.take(file.number(what), what).decode("utf-8")
        calls, values = file.number(what), file.number(what)
        if not name or values < 1:
            raise ValueError(f"entry {shown(name)!r} has {values} values")
        _check_values(file.path, name, values)
        sums = np.frombuffer(file.take(4 * values, f"entry {shown(name)!r}"), "<f4")
        means = sums / np.float32(calls) if calls > 0 else np.ones(values, np.float32)
        found[name] = _checked(file.path, name, means)
    if file.position == file.size:
        return found, None, 0
    chunks = file.number("its end")
    dataset = file.take(file.number("its end"), "its end")
    if file.position != file.size:
        raise ValueError("its end is not a name")
    return found, dataset.decode("utf-8"), chunks
