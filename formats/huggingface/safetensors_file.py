"""Reads safetensors headers and rows strictly, and plans files to be written.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, then the
tensors' bytes without gaps. What the reference implementation refuses is refused here, with the tensor's
name, and so are two things it accepts, because readers disagree about them: a repeated name, and shapes of
more than 8 dimensions. Headers are checked in exact integers before anything is allocated. A planned file is
byte for byte what the reference implementation writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import DTYPE_BY_CODE, DType, TensorSpec
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.io import limits
from qconvert.formats.io.byte_source import ByteSource, LocalBytes
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.planned_files import FilePlan
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
# The order of `Dtype` in the reference implementation, by rising alignment; files are laid out in reverse.
_ALIGNMENT_ORDER = (
    DType.BOOL, DType.U8, DType.I8, DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.I16, DType.U16,
    DType.F16, DType.BF16, DType.I32, DType.U32, DType.F32, DType.F64, DType.I64, DType.U64,
)  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_ALIGNMENT_ORDER)}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file, checked against the file's size.

    `specs` are in the order of their bytes; `offsets` count from the start of the file; `metadata` is
    `__metadata__`; `warnings` are oddities that every reader tolerates; `size` is the file's, `header_sha256`
    the hash of the header's JSON bytes.
    """

    path: Path
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]
    warnings: tuple[str, ...]
    data_start: int
    size: int
    header_sha256: str


class SafetensorsFile:
    """An open safetensors file whose rows any thread may read.

    Its bytes come from `source`, by default the file at `path` on this disk.
    """

    def __init__(self, path: Path, source: ByteSource | None = None) -> None:
        self.source = source or LocalBytes(path)
        self.header = _header_of(self.source, path)

    def close(self) -> None:
        self.source.close()

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a tensor, or their columns [first, last): a new array `[rows,
        columns]` in the carrier type of its dtype. CorruptCheckpoint if the file has been truncated since it
        was opened.
        """
        spec = self.header.specs[name]
        if not 0 <= start <= stop <= spec.rows:
            raise ValueError(f"{name}: rows [{start}, {stop}) of {spec.rows}")
        if columns is not None and columns != (0, spec.width):
            return self._read_columns(spec, start, stop, *columns)
        rows = np.empty((stop - start, spec.width), spec.dtype.carrier)
        offset = self.header.offsets[name] + start * spec.width * spec.dtype.nbytes
        self.source.read_into(octets(rows), offset)
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
        offset = self.header.offsets[spec.name] + first * size
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


def _header_of(source: ByteSource, path: Path) -> SafetensorsHeader:
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
    return parse_header(_read(source, 8, length), path, size)


def _read(source: ByteSource, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def parse_header(raw: bytes, path: Path, size: int) -> SafetensorsHeader:
    """Checks the JSON bytes of the header of a file of `size` bytes in all (CorruptCheckpoint)."""
    name = shown(path.name)
    fields = parse_json_object(raw, name)
    metadata = _metadata(fields.pop(METADATA_KEY, None), name)
    if len(fields) > limits.SAFETENSORS_TENSORS:
        most = limits.SAFETENSORS_TENSORS
        raise CorruptCheckpoint(f"{name}: holds {len(fields):,} tensors (limit {most:,} in one file)")
    extents = sorted((_extent(name, *field) for field in fields.items()), key=lambda extent: extent[:2])
    data_start = 8 + len(raw)
    warnings = []
    if not raw.startswith(b"{"):
        warnings.append(f"{name}: its header starts with white space, the format asks for '{{'")
    odd = [tensor for tensor, entry in fields.items() if len(entry) > 3]
    if odd:
        warnings.append(
            f"{name}: unknown header fields of {len(odd)} tensors ignored, first in {shown(odd[0])}"
        )
    _check_cover(extents, size - data_start, name)
    return SafetensorsHeader(
        path=path,
        specs={spec.name: spec for _, _, spec in extents},
        offsets={spec.name: data_start + begin for begin, _, spec in extents},
        metadata=metadata,
        warnings=tuple(warnings),
        data_start=data_start,
        size=size,
        header_sha256=hashlib.sha256(raw).hexdigest(),
    )


# The byte range [begin, end) of a tensor in the data section.
_Extent = tuple[int, int, TensorSpec]


def _extent(file: str, tensor: str, entry: object) -> _Extent:
    if not isinstance(entry, dict):
        what = f"its header entry is a {kind_of(entry)}, not an object"
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
    spec = tensor_spec(file, tensor, entry.get("dtype"), entry.get("shape"))
    offsets = entry.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
        what = f"data_offsets are {shown(offsets)}, not two byte positions"
        raise CorruptCheckpoint(f"{file}: {shown(tensor)}: {what}")
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise CorruptCheckpoint(
            f"{file}: {shown(tensor)}: {spec.dtype.code} {list(spec.shape)} takes {spec.nbytes} bytes,"
            f" its data_offsets {offsets} hold {end - begin}"
        )
    return begin, end, spec


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
        what = f"dtype {shown(dtype)} is none of the format's"
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


def _check_cover(extents: Sequence[_Extent], data_size: int, file: str) -> None:
    """Raises unless the extents, sorted, cover every byte of the data section exactly once."""
    for _, end, spec in extents:
        if end > data_size:
            what = f"{shown(spec.name)} ends at byte {end} of the data, the file holds {data_size}"
            raise CorruptCheckpoint(f"{file}: {what}", _CUT_OFF)
    if extents and extents[0][0] > 0:
        first, _, spec = extents[0]
        raise CorruptCheckpoint(f"{file}: {first} unused bytes before {shown(spec.name)}")
    for (_, end, before), (begin, _, after) in pairwise(extents):
        names = f"{shown(before.name)} and {shown(after.name)}"
        if begin < end:
            raise CorruptCheckpoint(f"{file}: {names} share bytes from {begin} on")
        if begin > end:
            raise CorruptCheckpoint(f"{file}: {begin - end} unused bytes between {names}")
    covered = extents[-1][1] if extents else 0
    if covered < data_size:
        raise CorruptCheckpoint(f"{file}: {data_size - covered} bytes after the last tensor")


def plan_files(
    specs: Iterable[TensorSpec],
    shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
) -> tuple[FilePlan, ...]:
    """Plans files for tensors of these specs: one, or shards and the index that lists them.

    Shards are filled in the order of `specs` up to `shard_size` bytes of tensors (None: no limit), a larger
    tensor gets one of its own, as in huggingface_hub's `split_state_dict_into_shards_factory`. `metadata`
    goes into the header of each file, `total_parameters` only into the index.
    """
    shards = _shards(specs, shard_size)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = [_plan_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True)]
    if len(files) > 1:
        files.append(_plan_index(files, total_parameters))
    return tuple(files)


def _shards(specs: Iterable[TensorSpec], shard_size: int | None) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        if shard_size is not None and spec.nbytes > shard_size:
            shards.append([spec])
            continue
        if shard_size is not None and filled + spec.nbytes > shard_size:
            shards.append(current)
            current, filled = [], 0
        current.append(spec)
        filled += spec.nbytes
    return [*shards, current] if current or not shards else shards


def _plan_file(name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None) -> FilePlan:
    """Plans one file with the order and JSON format of the reference implementation's `prepare`."""
    ordered = sorted(specs, key=lambda spec: (-_RANK[spec.dtype], spec.name))
    fields: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for spec in ordered:
        begin, end = end, end + spec.nbytes
        offsets[spec.name] = begin
        fields[spec.name] = {"dtype": spec.dtype.code, "shape": spec.shape, "data_offsets": (begin, end)}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return FilePlan(
        name=name,
        head=head,
        specs={spec.name: spec for spec in ordered},
        offsets={tensor: len(head) + begin for tensor, begin in offsets.items()},
        size=len(head) + end,
    )


def _plan_index(files: Sequence[FilePlan], total_parameters: int | None) -> FilePlan:
    """Plans the index, formatted as by transformers' `save_pretrained`; it holds no tensors."""
    totals = {"total_size": sum(spec.nbytes for file in files for spec in file.specs.values())}
    if total_parameters is not None:
        totals["total_parameters"] = total_parameters
    weight_map = {tensor: file.name for file in files for tensor in file.specs}
    text = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    head = text.encode()
    return FilePlan(name=INDEX_FILE, head=head, specs={}, offsets={}, size=len(head))
