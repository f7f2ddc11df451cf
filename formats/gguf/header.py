"""Parses the header of a GGUF file, and checks it against the file's size.

The invariant: nothing is allocated or trusted before it has been checked, so a hostile file costs an error
message that names the key or the tensor. Format: docs/gguf.md of the ggml project, versions 2 and 3 (equal
for a little-endian reader).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.core import ggml_types
from qconvert.errors import FETCH, CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import amount, open_regular, read_exactly

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 and counts the final NUL
MAX_DIMS = 4  # GGML_MAX_DIMS
_SWAP = "`gguf-convert-endian FILE little`, of the gguf package, turns it round"
_NEWER = "convert the model again with a current llama.cpp, or update qconvert"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of one GGUF file: metadata, tensors, and the offsets of their bytes.

    `kv` and `tensors` keep the file's order; `offsets` are absolute positions in the file.
    """

    name: str
    version: int
    alignment: int
    kv: Mapping[str, ggml_types.KV]
    tensors: Mapping[str, ggml_types.GGUFTensor]
    offsets: Mapping[str, int]
    data_start: int

    def text(self, key: str) -> str:
        """Returns the text under `key`; CorruptCheckpoint naming the key when it is absent or not text."""
        entry = self.kv.get(key)
        if entry is None:
            raise CorruptCheckpoint(f"{self.name}: {key} is missing")
        if not isinstance(entry.value, str):
            raise CorruptCheckpoint(f"{self.name}: {key} is {shown(entry.value)}, not text")
        return entry.value

    def number(self, key: str) -> int | None:
        """Returns the integer under `key`, None when it is absent; CorruptCheckpoint for another type."""
        entry = self.kv.get(key)
        if entry is None:
            return None
        if isinstance(entry.value, bool) or not isinstance(entry.value, int):
            raise CorruptCheckpoint(f"{self.name}: {key} is {shown(entry.value)}, not a whole number")
        return entry.value


def is_gguf(path: Path) -> bool:
    """True if a file is GGUF by its name, or by its first bytes (Ollama names blobs by hash)."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.is_file()
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GGUFHeader:
    """Returns the checked header of one GGUF file (of one part, when it is split).

    Raises CorruptCheckpoint naming the invalid key or tensor, UnsupportedModel for a version or byte order
    that is not supported.
    """
    fd = open_regular(path)
    try:
        return parse_header(fd, shown(path.name))
    finally:
        os.close(fd)


_NUMBERS = {kind: struct.Struct(f"<{kind}") for kind in "bBhHiIqQfd?"}
_AFTER_DIMS = [struct.Struct(f"<{n_dims}qIQ") for n_dims in range(MAX_DIMS + 1)]


class _Cursor:
    """A position in a file's first bytes that cannot pass its end; errors name what was read."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.size = os.fstat(fd).st_size
        self.position = 0
        self.items = 0
        self._window = b""
        self._window_start = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def fail(self, what: str, hint: str = FETCH) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.name}: {what}", hint)

    def take(self, count: int, what: str) -> bytes:
        start = self.position - self._window_start
        stop = start + count
        if stop > len(self._window):
            self._refill(count, what)
            start, stop = 0, count
        self.position += count
        return self._window[start:stop]

    def _refill(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.fail(
                f"{what} needs {count:,} bytes, but {self.left:,} are left of {self.size:,}",
                "the file is cut short or damaged; fetch it again",
            )
        if self.position + count > limits.GGUF_HEADER_BYTES:
            raise self.fail(
                f"{what} ends past the first {amount(limits.GGUF_HEADER_BYTES)}, too far for a header"
            )
        room = min(self.left, limits.GGUF_HEADER_BYTES - self.position)
        buffer = bytearray(min(max(count, 1 << 20), room))
        read_exactly(self.fd, memoryview(buffer), self.position, self.name)
        self._window, self._window_start = bytes(buffer), self.position

    def unpack(self, format_: str, what: str) -> Any:
        number = _NUMBERS[format_]
        return number.unpack(self.take(number.size, what))[0]

    def raw_text(self, what: str, most: int = limits.GGUF_TEXT_BYTES) -> bytes:
        length: int = self.unpack("Q", what)
        if length > most:
            raise self.fail(f"{what} is a text of {length:,} bytes (limit {most:,})")
        return self.take(length, what)

    def texts(self, count: int, what: str) -> Iterator[str]:
        """Yields the next `count` texts; a vocabulary has a million, so a whole window is read at once."""
        left, length_at = count, _NUMBERS["Q"].unpack_from
        while left:
            window, at = self._window, self.position - self._window_start
            while left and at + 8 <= len(window):
                stop = at + 8 + length_at(window, at)[0]
                if stop > len(window):
                    break
                yield window[at + 8 : stop].decode("utf-8", "surrogateescape")
                left, at = left - 1, stop
            self.position = self._window_start + at
            if left:
                yield self.raw_text(what).decode("utf-8", "surrogateescape")
                left -= 1

    def name_text(self, what: str) -> str:
        """Returns a key or tensor name; it must be UTF-8, because other readers compare it as text."""
        raw = self.raw_text(what, limits.GGUF_KEY_BYTES)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {shown(raw)}") from None


def parse_header(fd: int, name: str) -> GGUFHeader:
    """Parses the header of the file open as `fd`, which errors call `name`."""
    cursor = _Cursor(fd, name)
    version = _check_version(cursor)
    n_tensors = _count(cursor, "the tensor count", smallest=24, most=limits.GGUF_RECORDS)
    n_kv = _count(cursor, "the metadata count", smallest=13, most=limits.GGUF_KEYS)
    kv: dict[str, ggml_types.KV] = {}
    for i in range(n_kv):
        entry = _read_kv(cursor, f"metadata key {i + 1} of {n_kv}")
        if entry.key in kv:
            raise cursor.fail(f"{shown(entry.key)} appears twice in the metadata")
        kv[entry.key] = entry
    records = [_read_tensor(cursor, f"tensor {i + 1} of {n_tensors}") for i in range(n_tensors)]
    alignment = _alignment(cursor, kv)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, ggml_types.GGUFTensor] = {}
    offsets: dict[str, int] = {}
    for tensor, offset in records:
        if tensor.name in tensors:
            raise cursor.fail(f"{shown(tensor.name)} appears twice among the tensors")
        _check_bounds(cursor, tensor, offset, alignment, data_start)
        tensors[tensor.name] = tensor
        offsets[tensor.name] = data_start + offset
    end, previous = 0, ""
    for tensor_name in sorted(tensors, key=offsets.__getitem__):  # stable: ties stay in file order
        if offsets[tensor_name] < end:
            where = f"{shown(previous)} (byte {offsets[tensor_name]:,})"
            raise cursor.fail(f"{shown(tensor_name)} starts inside {where}")
        end, previous = offsets[tensor_name] + tensors[tensor_name].nbytes, tensor_name
    return GGUFHeader(name, version, alignment, kv, tensors, offsets, data_start)


def _check_version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "the magic number")
    if magic == MAGIC[::-1]:
        raise UnsupportedModel(f"{cursor.name}: a GGUF of the other byte order (big-endian)", _SWAP)
    if magic != MAGIC:
        raise cursor.fail(f"is not a GGUF file (it begins with {magic!r})")
    version: int = cursor.unpack("I", "the version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(
            f"{cursor.name}: version {version:#x}: a GGUF of the other byte order (big-endian)", _SWAP
        )
    known = " and ".join(map(str, VERSIONS))
    raise UnsupportedModel(f"{cursor.name}: GGUF version {version}; versions {known} are read", _NEWER)


def _count(cursor: _Cursor, what: str, smallest: int, most: int) -> int:
    """Returns a number of records of at least `smallest` bytes; CorruptCheckpoint if they exceed the file."""
    count: int = cursor.unpack("Q", what)
    if count * smallest > cursor.left:
        raise cursor.fail(f"{what} is {count:,}, more than {cursor.left:,} bytes can hold")
    if count > most:
        raise cursor.fail(f"{what} is {count:,} (limit {most:,})")
    return count


def _read_kv(cursor: _Cursor, where: str) -> ggml_types.KV:
    key = cursor.name_text(where)
    what = shown(key)
    number: int = cursor.unpack("I", what)
    if number == ggml_types.ARRAY_NUMBER:
        item = _kv_type(cursor, what, cursor.unpack("I", what), nested=True)
        return ggml_types.KV(key, ggml_types.ArrayOf(item), _read_array(cursor, what, item))
    kind = _kv_type(cursor, what, number, nested=False)
    if kind is ggml_types.KVType.TEXT:
        return ggml_types.KV(key, kind, cursor.raw_text(what).decode("utf-8", "surrogateescape"))
    return ggml_types.KV(key, kind, cursor.unpack(kind.format, what))


def _kv_type(cursor: _Cursor, what: str, number: int, *, nested: bool) -> ggml_types.KVType:
    kind = ggml_types.KV_TYPE_BY_NUMBER.get(number)
    if kind is not None:
        return kind
    if nested and number == ggml_types.ARRAY_NUMBER:
        raise cursor.fail(f"{what} is an array of arrays, which no GGUF reader takes")
    raise cursor.fail(f"{what} has value type {number}, which does not exist")


def _read_array(cursor: _Cursor, what: str, item: ggml_types.KVType) -> tuple[ggml_types.Scalar, ...]:
    length: int = cursor.unpack("Q", what)
    width = 8 if item is ggml_types.KVType.TEXT else struct.calcsize(item.format)
    if length * width > cursor.left:
        raise cursor.fail(f"{what} claims {length:,} items, but {cursor.left:,} bytes are left")
    cursor.items += length
    if cursor.items > limits.GGUF_ARRAY_ITEMS:
        raise cursor.fail(
            f"{what} brings the metadata to {cursor.items:,} items (limit {limits.GGUF_ARRAY_ITEMS:,})"
        )
    if item is ggml_types.KVType.TEXT:
        return tuple(cursor.texts(length, what))
    return struct.unpack(f"<{length}{item.format}", cursor.take(length * width, what))


def _alignment(cursor: _Cursor, kv: Mapping[str, ggml_types.KV]) -> int:
    entry = kv.get("general.alignment")
    value = entry.value if entry else DEFAULT_ALIGNMENT
    if entry and entry.type is not ggml_types.KVType.U32:
        raise cursor.fail(f"general.alignment is {shown(value)}, not an unsigned 32-bit number")
    if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment is {value}, not a power of two up to {MAX_ALIGNMENT:,}")
    return value


def _read_tensor(cursor: _Cursor, where: str) -> tuple[ggml_types.GGUFTensor, int]:
    name = cursor.name_text(where)
    what = shown(name)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise cursor.fail(f"{what} is a tensor name of {len(name.encode())} bytes, over {MAX_NAME_BYTES}")
    n_dims: int = cursor.unpack("I", what)
    if n_dims > MAX_DIMS:
        raise cursor.fail(f"{what} has {n_dims} dimensions, over {MAX_DIMS}")
    rest = _AFTER_DIMS[n_dims]
    *dims, number, offset = rest.unpack(cursor.take(rest.size, what))
    if dims and min(dims) <= 0:
        raise cursor.fail(f"{what} has dimensions {dims}; each must be at least 1")
    kind = ggml_types.TYPE_BY_NUMBER.get(number)
    if kind is None:
        raise cursor.fail(f"{what} has tensor type {number}, which does not exist")
    tensor = ggml_types.GGUFTensor(name, kind, tuple(dims[::-1]))
    if tensor.width % kind.block:
        raise cursor.fail(
            f"{what} has rows of {tensor.width} elements, not a multiple of {kind.name}'s {kind.block}"
        )
    return tensor, offset


def _check_bounds(
    cursor: _Cursor, tensor: ggml_types.GGUFTensor, offset: int, alignment: int, data_start: int
) -> None:
    what = shown(tensor.name)
    if offset % alignment:
        raise cursor.fail(f"{what} starts at data offset {offset}, not a multiple of {alignment}")
    end = data_start + offset + tensor.nbytes
    if end > cursor.size:
        raise cursor.fail(
            f"{what} ends at byte {end:,}, past the end of the file ({cursor.size:,} bytes)",
            "the file is cut short or damaged; fetch it again",
        )
