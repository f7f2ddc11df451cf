"""Importance matrices as llama-imatrix writes them: mean squared activations by GGUF tensor name.

Two containers: GGUF with `NAME.in_sum2` and `NAME.counts` tensors, and the older binary `.dat`.
Source: tools/imatrix/imatrix.cpp and load_imatrix in tools/quantize/quantize.cpp of llama.cpp
(commit 0c1e57098).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.files import shown
from qconvert.formats.gguf_io import GGUFFile
from qconvert.formats.json_io import read_bounded

_SUMS, _COUNTS = ".in_sum2", ".counts"
MAX_DAT_BYTES = 4 << 30

Importance = dict[str, tuple[float, ...]]


def read_imatrix(path: Path) -> Importance:
    """Mean squared activation of every input column, by tensor name; experts one after another.

    Raises CorruptCheckpoint for a damaged file and for numbers that are not finite or negative.
    """
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file", "give the file llama-imatrix wrote")
    with path.open("rb") as file:
        magic = file.read(4)
    found = _from_gguf(path) if magic == b"GGUF" else _from_dat(path)
    for name, means in found.items():
        if not np.isfinite(means).all() or (means < 0).any():
            raise CorruptCheckpoint(f"{path.name}: {shown(name)} holds a negative or infinite mean", None)
    return {name: tuple(means.tolist()) for name, means in found.items()}


def _from_gguf(path: Path) -> dict[str, np.ndarray]:
    with GGUFFile(path) as file:
        names = [n.removesuffix(_SUMS) for n in file.tensors if n.endswith(_SUMS)]
        if not names:
            raise CorruptCheckpoint(f"{path.name}: holds no {_SUMS} tensors", "is this an importance matrix?")
        return {name: _mean(file, path.name, name) for name in names}


def _mean(file: GGUFFile, origin: str, name: str) -> np.ndarray:
    """Sums over counts, expert by expert; an expert that saw no token weighs every column alike."""
    if name + _COUNTS not in file.tensors:
        raise CorruptCheckpoint(f"{origin}: {shown(name)}{_COUNTS} is missing", None)
    sums_EI = file.read(name + _SUMS, 0, file.specs[name + _SUMS].rows).astype(np.float32)
    counts_E = file.read(name + _COUNTS, 0, file.specs[name + _COUNTS].rows).reshape(-1).astype(np.float32)
    sums_EI = sums_EI.reshape(len(counts_E), -1)
    means_EI = np.ones_like(sums_EI)
    np.divide(sums_EI, counts_E[:, None], out=means_EI, where=counts_E[:, None] > 0)
    return means_EI.reshape(-1)


def _from_dat(path: Path) -> dict[str, np.ndarray]:
    """Entries of (name, calls, values): values are sums that grew by one mean per call."""
    raw = read_bounded(path, MAX_DAT_BYTES)
    try:
        return _entries(raw)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path.name}: not an importance matrix ({error})", None) from error


def _entries(raw: bytes) -> dict[str, np.ndarray]:
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
    return found
