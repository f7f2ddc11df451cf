"""Reads safetensors headers and rows strictly.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, then the
tensors' bytes without gaps. What the reference implementation refuses is refused here, with the tensor's
name, and so are two things it accepts, because readers disagree about them: a repeated name, and shapes of
more than 8 dimensions. Headers are checked in exact integers before anything is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import DTYPE_BY_CODE, Json, TensorSpec
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel, shown
from qconvert.formats.huggingface.plain_json import scan_header
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.io.byte_source import ByteSource, LocalBytes
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.strict_json import kind_of, parse_json_object

MAX_HEADER_BYTES = limits.SAFETENSORS_HEADER_BYTES
MAX_RANK = 8
# Not counting zeros in the shape: more than any file has, and safe in numpy's shape arithmetic.
MAX_ELEMENTS = 2**48
WINDOW_BYTES = 1 << 20
METADATA_KEY = "__metadata__"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_CUT_OFF = "it is cut off; download or copy it again"
_READ_CODES = f"read: {', '.join(DTYPE_BY_CODE)}"
# Codes of the format for which no conversion here has a use.
_UNREAD_CODES = ("C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file, checked against the file's size.

    `specs` are in the order of their bytes, their offsets from the start of the file; `metadata` is
    `__metadata__`; `warnings` are oddities that every reader tolerates; `size` is the file's, `header_sha256`
    the hash of the header's JSON bytes.
    """

    path: Path
    specs: ArrayTable
    metadata: Mapping[str, str]
    warnings: tuple[str, ...]
    data_start: int
    size: int
    header_sha256: str


class SafetensorsFile:
    """An open safetensors file whose rows any thread may read.

    Its bytes come from `source`, by default the file at `path` on this disk; it has at most `most` tensors.
    """

    def __init__(
        self, path: Path, source: ByteSource | None = None, most: int = limits.SAFETENSORS_TENSORS
    ) -> None:
        self.source = source or LocalBytes(path)
        self.header = _header_of(self.source, path, most)

    def close(self) -> None:
        self.source.close()

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a tensor, or their columns [first, last): a new array `[rows,
        columns]` in the carrier type of its dtype. CorruptCheckpoint if the file has been truncated since it
        was opened.
        """
        _, form, offset = self.header.specs.place(name)
        if not 0 <= start <= stop <= form.rows:
            raise ValueError(f"{name}: rows [{start}, {stop}) of {form.rows}")
        if columns is not None and columns != (0, form.width):
            return self._read_columns(self.header.specs[name], start, stop, *columns)
        rows = np.empty((stop - start, form.width), form.carrier)
        self.source.read_into(octets(rows), offset + start * form.width * form.item_bytes)
        return rows

    def _read_columns(self, spec: TensorSpec, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Reads columns [first, last) of rows: from windows of whole rows, or row by row where that is
        cheaper.

        A call costs about as much as the source's `call_bytes` bytes.
        """
        if not 0 <= first <= last <= spec.width:
            raise ValueError(f"{spec.name}: columns [{first}, {last}) of {spec.width}")
        picked = np.empty((stop - start, last - first), spec.dtype.carrier)
        stride, size = spec.width * spec.dtype.nbytes, spec.dtype.nbytes
        if stride - picked.shape[1] * size <= self.source.call_bytes:
            step = max(1, max(WINDOW_BYTES, self.source.call_bytes) // max(1, stride))
            for row in range(start, stop, step):
                end = min(row + step, stop)
                picked[row - start : end - start] = self.read(spec.name, row, end)[:, first:last]
            return picked
        offset = self.header.specs.offset(spec.name) + first * size
        for row in range(start, stop):
            self.source.read_into(octets(picked[row - start]), offset + row * stride)
        return picked

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_header(path: Path) -> SafetensorsHeader:
    """Returns the checked header of a safetensors file; CorruptCheckpoint if it is not one."""
    with SafetensorsFile(path) as file:
        return file.header


def _header_of(source: ByteSource, path: Path, most: int) -> SafetensorsHeader:
    name, size = shown(path.name), source.size
    if size < 8:
        raise CorruptCheckpoint(f"{name}: has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(_read(source, 0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpoint(
            f"{name}: claims a header of {length:,} bytes, the format allows {MAX_HEADER_BYTES:,}",
            "fetch the file again: it is damaged, or no safetensors file",
        )
    if length > size - 8:
        raise CorruptCheckpoint(
            f"{name}: claims a header of {length:,} bytes, the file has {size:,}", _CUT_OFF
        )
    return parse_header(_read(source, 8, length), path, size, most)


def _read(source: ByteSource, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def parse_header(
    raw: bytes, path: Path, size: int, most: int = limits.SAFETENSORS_TENSORS
) -> SafetensorsHeader:
    """Checks the JSON bytes of the header of a file of `size` bytes in all (CorruptCheckpoint)."""
    name = shown(path.name)
    scanned = _scanned(raw, path, size, most)
    if scanned is not None:
        return scanned
    fields = parse_json_object(raw, name)
    metadata = _metadata(fields.pop(METADATA_KEY, None), name)
    if len(fields) > most:
        raise CorruptCheckpoint(f"{name}: holds {len(fields):,} tensors (limit {most:,} in one file)")
    arrays, begins, ends = _columns(name, fields, 8 + len(raw))
    warnings = []
    if not raw.startswith(b"{"):
        warnings.append(f"{name}: its header starts with white space, the format asks for '{{'")
    odd = [tensor for tensor, entry in fields.items() if len(entry) > 3]
    if odd:
        warnings.append(
            f"{name}: unknown header fields of {len(odd)} tensors ignored, first in {shown(odd[0])}"
        )
    _check_cover(arrays, begins, ends, size - 8 - len(raw), name)
    return SafetensorsHeader(
        path=path,
        specs=arrays,
        metadata=metadata,
        warnings=tuple(warnings),
        data_start=8 + len(raw),
        size=size,
        header_sha256=hashlib.sha256(raw).hexdigest(),
    )


def _scanned(raw: bytes, path: Path, size: int, most: int) -> SafetensorsHeader | None:
    """The header, where it has the usual form and is valid."""
    found = scan_header(raw, most)
    if found is None or len(found.names) > most:
        return None
    table, numbers, sizes = ArrayTable(8 + len(raw)), dict[str, int](), dict[str, int]()
    try:
        for said in dict.fromkeys(found.kinds):
            entry = parse_json_object(f"{said}0,0]}}".encode(), "")
            spec = tensor_spec("", "", entry["dtype"], entry["shape"])
            numbers[said], sizes[said] = table.kind((spec.dtype, spec.shape)), spec.nbytes
        metadata = _metadata(found.metadata, "")
    except QConvertError:
        return None
    ends = [begin + sizes[said] for begin, said in zip(found.begins, found.kinds, strict=True)]
    if ends != found.ends or [0, *ends] != [*found.begins, size - 8 - len(raw)]:
        return None
    table.extend(found.names, map(numbers.__getitem__, found.kinds), found.begins)
    digest = hashlib.sha256(raw).hexdigest()
    return SafetensorsHeader(path, table, metadata, (), 8 + len(raw), size, digest)


_TWO = [int, int]  # the types of two positions: True is an int, too


def _columns(file: str, fields: Json, data_start: int) -> tuple[ArrayTable, list[int], list[int]]:
    """The arrays of a header in the order of their bytes, and where each begins and ends in the data."""
    table, kinds, found = ArrayTable(data_start), dict[str, tuple[int, int, TensorSpec]](), []
    for tensor, entry in fields.items():
        if not isinstance(entry, dict):
            what = f"its header entry is a {kind_of(entry)}, not an object"
            raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        said = f"{dtype!r} {shape!r}"  # not the values themselves: True equals 1, and is no size
        kind = kinds.get(said)
        if kind is None:
            spec = tensor_spec(file, tensor, dtype, shape)
            kind = kinds[said] = table.kind((spec.dtype, spec.shape)), spec.nbytes, spec
        number, nbytes, spec = kind
        if not (isinstance(offsets, list) and [type(each) for each in offsets] == _TWO and min(offsets) >= 0):
            what = f"data_offsets are {shown(offsets)}, not two byte positions"
            raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
        begin, end = offsets
        if end - begin != nbytes:
            raise CorruptCheckpoint(
                f"{file}: {shown(tensor)}: {spec.dtype.code} {list(spec.shape)} takes {nbytes} bytes,"
                f" its data_offsets {offsets} hold {end - begin}"
            )
        found.append((begin, end, tensor, number))
    found.sort(key=itemgetter(0, 1))
    for begin, _, tensor, number in found:
        table.add(tensor, number, begin)
    return table, [begin for begin, *_ in found], [end for _, end, *_ in found]


def tensor_spec(file: str, tensor: str, dtype: object, shape: object) -> TensorSpec:
    """Returns the spec that a header's `dtype` and `shape` describe.

    Raises CorruptCheckpoint for anything outside the format, UnsupportedModel for element types of the format
    that are not read here.
    """
    if not (isinstance(shape, list) and len(shape) <= MAX_RANK and all(map(_is_size, shape))):
        what = f"shape is {shown(shape)}, not a list of up to {MAX_RANK} sizes"
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
    if prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: shape {shown(shape)} is larger than any file")
    if 0 in shape and prod(size or 1 for size in shape) > limits.EMPTY_ELEMENTS:
        what = f"shape {shown(shape)} has rows or columns without an end, and no bytes"
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
    if dtype in _UNREAD_CODES:
        raise UnsupportedModel(f"{file}: {shown(tensor)}: dtype {dtype} is not read here", _READ_CODES)
    if not (isinstance(dtype, str) and dtype in DTYPE_BY_CODE):
        what = f"dtype {shown(dtype)} is not one of the format's"
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}", _READ_CODES)
    return TensorSpec(tensor, DTYPE_BY_CODE[dtype], tuple(shape))


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0  # not isinstance: True is an int


def _metadata(value: object, file: str) -> dict[str, str]:
    """Returns `__metadata__`; {} for null, which MLX writes."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{file}: {METADATA_KEY} is a {kind_of(value)}, not an object of strings")
    if len(value) > limits.METADATA_KEYS:
        most = limits.METADATA_KEYS
        raise CorruptCheckpoint(f"{file}: {METADATA_KEY} has {len(value):,} keys (limit {most:,})")
    for key, text in value.items():
        if not isinstance(text, str):
            raise CorruptCheckpoint(f"{file}: {METADATA_KEY} {shown(key)} is a {kind_of(text)}, not a string")
    return value


def _check_cover(
    arrays: Iterable[str], begins: Sequence[int], ends: Sequence[int], data_size: int, file: str
) -> None:
    """Raises unless the arrays, in the order of their bytes, cover all of the data section exactly once."""
    if [0, *ends] == [*begins, data_size]:
        return
    names = list(arrays)
    for name, end in zip(names, ends, strict=True):
        if end > data_size:
            what = f"{shown(name)} ends at byte {end} of the data, the file holds {data_size}"
            raise CorruptCheckpoint(f"{file}: {what}", _CUT_OFF)
    if begins and begins[0] > 0:
        raise CorruptCheckpoint(f"{file}: {begins[0]} unused bytes before {shown(names[0])}")
    for number, (end, begin) in enumerate(zip(ends, begins[1:], strict=False)):
        both = f"{shown(names[number])} and {shown(names[number + 1])}"
        if begin < end:
            raise CorruptCheckpoint(f"{file}: {both} share bytes from {begin} on")
        if begin > end:
            raise CorruptCheckpoint(f"{file}: {begin - end} unused bytes between {both}")
    covered = ends[-1] if ends else 0
    raise CorruptCheckpoint(f"{file}: {data_size - covered} bytes after the last tensor")
