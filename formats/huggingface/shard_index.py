"""Reads the shard index of a Hugging Face folder and checks it against the shards' headers.

The invariant: a tensor is assigned one file, and that file's header has it. The index cannot point outside
its folder, and no tensor in a shard is dropped silently.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import eq
from pathlib import Path

from qconvert.core.dtypes import Json, TensorSpec
from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.huggingface.plain_json import scan_index
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, SafetensorsHeader
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import Kind
from qconvert.formats.io.strict_json import parse_json_object, read_bounded

_PLAIN_NAME = re.compile(r"[^/\\:\0]+")


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """model.safetensors.index.json: the file of each tensor, all in the folder of the index."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, str]
    total_size: object
    sha256: str


def stays_inside(name: object) -> bool:
    """True if a value from a file is a plain file name, which cannot leave the folder."""
    return isinstance(name, str) and bool(_PLAIN_NAME.fullmatch(name)) and name not in (".", "..")


def read_index(path: Path) -> ShardIndex:
    """Reads a shard index; CorruptCheckpoint unless every tensor maps to a plain file name."""
    scanned = scan_index(path)
    if scanned is not None and scanned.weight_map and all(map(_is_shard, set(scanned.weight_map.values()))):
        return _index_of(path, scanned.fields, scanned.weight_map, scanned.sha256)
    raw = read_bounded(path, limits.INDEX_BYTES)
    fields = parse_json_object(raw, path.name)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpoint(f"{path.name}: weight_map is missing or empty")
    files: dict[str, str] = {}  # so that their names are held once
    for tensor, file in weight_map.items():
        if not (isinstance(file, str) and (file in files or _is_shard(file))):
            raise CorruptCheckpoint(
                f"{path.name}: {shown(tensor)} maps to {shown(file)}, not to a .safetensors file beside it",
                "an index that points elsewhere is not followed; get the checkpoint from its source again",
            )
        weight_map[tensor] = files.setdefault(file, file)
    return _index_of(path, fields, weight_map, hashlib.sha256(raw).hexdigest())


def _index_of(path: Path, fields: Json, weight_map: Mapping[str, str], sha256: str) -> ShardIndex:
    metadata = fields.get("metadata")
    return ShardIndex(
        files=tuple(path.parent / name for name in sorted(set(weight_map.values()))),
        weight_map=weight_map,
        total_size=metadata.get("total_size") if isinstance(metadata, dict) else None,
        sha256=sha256,
    )


def _is_shard(name: str) -> bool:
    return stays_inside(name) and name.endswith(".safetensors")


def require_shards(index: ShardIndex, elsewhere: Container[str] = ()) -> None:
    """Raises CorruptCheckpoint, naming the first, unless every shard of the index is here or elsewhere."""
    missing = [file.name for file in index.files if file.name not in elsewhere and not file.exists()]
    if missing:
        raise CorruptCheckpoint(
            f"{shown(missing[0])}: named by {INDEX_FILE}, but not there"
            f" ({len(missing)} of {len(index.files)} shards are missing)",
            "the download is incomplete; run it again",
        )


def locate(
    headers: Sequence[SafetensorsHeader], index: ShardIndex | None
) -> tuple[dict[str, int], list[str]]:
    """Returns the number of the file that holds each tensor, and the differences between index and headers.

    Where a tensor is in several shards the index decides. Raises CorruptCheckpoint for a tensor that is not
    where the index says.
    """
    homes: dict[str, int] = {}
    for home, header in enumerate(headers):
        homes.update(zip(header.specs, repeat(home), strict=False))
    if index is None:
        return homes, []
    ordinals = {header.path.name: home for home, header in enumerate(headers)}
    differences = list(_differences(headers, homes, index))
    if all(map(eq, map(homes.get, index.weight_map), map(ordinals.__getitem__, index.weight_map.values()))):
        return homes, differences
    for name, file in index.weight_map.items():
        if homes.get(name) == ordinals[file]:
            continue
        if name not in headers[ordinals[file]].specs:
            found = headers[homes[name]].path.name if name in homes else "no shard"
            raise CorruptCheckpoint(
                f"{shown(name)}: {INDEX_FILE} says it is in {shown(file)}, but {shown(found)} holds it"
            )
        homes[name] = ordinals[file]
    return homes, differences


def _differences(
    headers: Sequence[SafetensorsHeader], homes: Mapping[str, int], index: ShardIndex
) -> Iterator[str]:
    if not homes.keys() <= index.weight_map.keys():
        unlisted = [name for name in homes if name not in index.weight_map]
        yield f"{INDEX_FILE}: does not list {_first_of(unlisted)}; read anyway"
    repeated = []
    if sum(len(header.specs) for header in headers) != len(homes):
        repeated = [
            (n, header) for home, header in enumerate(headers) for n in header.specs if homes[n] != home
        ]
    if repeated:
        names = [name for name, _ in repeated]
        yield f"{INDEX_FILE}: several shards hold {_first_of(names)}; the index decides which is read"
    nbytes = sum(header.specs.nbytes for header in headers)
    nbytes -= sum(header.specs[name].nbytes for name, header in repeated)
    if index.total_size not in (None, nbytes):
        yield f"{INDEX_FILE}: total_size is {shown(index.total_size)}, the tensors have {nbytes} bytes"


class ShardedSpecs(Mapping[str, TensorSpec]):
    """The specs of all tensors of some files, each of the file where it is; made when they are asked for."""

    __slots__ = ("_headers", "_homes")

    def __init__(self, headers: Sequence[SafetensorsHeader], homes: Mapping[str, int]) -> None:
        self._headers, self._homes = headers, homes

    def __getitem__(self, name: str) -> TensorSpec:
        return self._headers[self._homes[name]].specs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def items(self) -> ItemsView[str, TensorSpec]:
        return _Items(self)

    def located_kinds(self) -> Iterator[tuple[str, Kind]]:
        """Yields name and kind of every tensor in the order of the bytes, file by file."""
        found = [header.specs.located_kinds() for header in self._headers]
        if sum(len(header.specs) for header in self._headers) == len(self._homes):  # each is in one file
            return chain.from_iterable(found)
        homes = self._homes
        return (row for home, rows in enumerate(found) for row in rows if homes[row[0]] == home)


class _Items(ItemsView[str, TensorSpec]):
    """Specs with their names, without looking each name up."""

    _mapping: ShardedSpecs

    def __iter__(self) -> Iterator[tuple[str, TensorSpec]]:
        return ((name, TensorSpec(name, *kind)) for name, kind in self._mapping.located_kinds())


def _first_of(names: Sequence[str]) -> str:
    return shown(names[0]) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
