"""Importance matrices as llama-imatrix writes them: mean squared activations by GGUF tensor name.

Two containers: GGUF with `NAME.in_sum2` and `NAME.counts` tensors, and the older binary `.dat`.
Source: tools/imatrix/imatrix.cpp and load_imatrix in tools/quantize/quantize.cpp of llama.cpp
(commit 0c1e57098).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.gguf_io import GGUFFile
from qconvert.formats.json_io import read_bounded
from qconvert.gguf_types import KV

_SUMS, _COUNTS = ".in_sum2", ".counts"
MAX_DAT_BYTES = 4 << 30
_MADE_BY = "give the file that llama-imatrix wrote for this model"


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Mean squared activation of every input column, by tensor name; experts one after another.

    `dataset` is the text it was measured on and `chunks` the number of its pieces, where the file
    says so.
    """

    file: str
    means: Mapping[str, tuple[float, ...]]
    dataset: str | None
    chunks: int

    @property
    def kv(self) -> tuple[KV, ...]:
        """What llama-quantize writes about it into the files made with it."""
        dataset = [] if self.dataset is None else [KV.text("quantize.imatrix.dataset", self.dataset)]
        chunks = [KV.u32("quantize.imatrix.chunks_count", self.chunks)] if self.chunks > 0 else []
        return (
            KV.text("quantize.imatrix.file", self.file),
            *dataset,
            KV.u32("quantize.imatrix.entries_count", len(self.means)),
            *chunks,
        )


def read_imatrix(path: Path) -> Imatrix:
    """The importance matrix in a file, which it names as the caller did.

    Raises CorruptCheckpoint for a damaged file and for numbers that are not finite or negative.
    """
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file", _MADE_BY)
    with path.open("rb") as file:
        magic = file.read(4)
    found, dataset, chunks = _from_gguf(path) if magic == b"GGUF" else _from_dat(path)
    for name, means in found.items():
        if not np.isfinite(means).all() or (means < 0).any():
            raise CorruptCheckpoint(f"{path.name}: {shown(name)} holds a negative or infinite mean", _MADE_BY)
    return Imatrix(str(path), {n: tuple(means.tolist()) for n, means in found.items()}, dataset, chunks)


_Entries = tuple[dict[str, np.ndarray], str | None, int]


def _from_gguf(path: Path) -> _Entries:
    with GGUFFile(path) as file:
        names = [n.removesuffix(_SUMS) for n in file.tensors if n.endswith(_SUMS)]
        if not names:
            raise CorruptCheckpoint(f"{path.name}: holds no {_SUMS} tensors", _MADE_BY)
        datasets = file.kv.get("imatrix.datasets")
        first = (
            datasets.value[0] if datasets and isinstance(datasets.value, tuple) and datasets.value else None
        )
        chunks = file.headers[0].number("imatrix.chunk_count") or 0
        return (
            {n: _mean(file, path.name, n) for n in names},
            first if isinstance(first, str) else None,
            chunks,
        )


def _mean(file: GGUFFile, origin: str, name: str) -> np.ndarray:
    """Sums over counts, expert by expert; an expert that saw no token weighs every column alike."""
    if name + _COUNTS not in file.tensors:
        raise CorruptCheckpoint(f"{origin}: {shown(name)}{_COUNTS} is missing", _MADE_BY)
    sums_EI = file.read(name + _SUMS, 0, file.specs[name + _SUMS].rows).astype(np.float32)
    counts_E = file.read(name + _COUNTS, 0, file.specs[name + _COUNTS].rows).reshape(-1).astype(np.float32)
    sums_EI = sums_EI.reshape(len(counts_E), -1)
    means_EI = np.ones_like(sums_EI)
    np.divide(sums_EI, counts_E[:, None], out=means_EI, where=counts_E[:, None] > 0)
    return means_EI.reshape(-1)


def _from_dat(path: Path) -> _Entries:
    """Entries of (name, calls, values): values are sums that grew by one mean per call.

    Newer files end with the number of chunks and the name of the text.
    """
    raw = read_bounded(path, MAX_DAT_BYTES)
    try:
        return _entries(raw)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path.name}: not an importance matrix ({error})", _MADE_BY) from error


def _entries(raw: bytes) -> _Entries:
    (count,), offset = struct.unpack_from("<i", raw), 4
    if not 0 < count <= len(raw) // 12:
        raise ValueError(f"{count} entries in {len(raw)} bytes")
    found: dict[str, np.ndarray] = {}
    for _ in range(count):
        (length,) = struct.unpack_from("<i", raw, offset)
        name = raw[offset + 4 : offset + 4 + max(length, 0)].decode("utf-8")
        calls, values = struct.unpack_from("<ii", raw, offset + 4 + length)
        offset += 12 + length
        if length < 1 or values < 1 or offset + 4 * values > len(raw):
            raise ValueError(f"entry {shown(name)!r} runs past the end")
        sums = np.frombuffer(raw, "<f4", values, offset)
        found[name] = sums / np.float32(calls) if calls > 0 else np.ones(values, np.float32)
        offset += 4 * values
    if offset == len(raw):
        return found, None, 0
    chunks, length = struct.unpack_from("<ii", raw, offset)
    if offset + 8 + length != len(raw):
        raise ValueError("its end is not a name")
    return found, raw[offset + 8 :].decode("utf-8"), chunks
