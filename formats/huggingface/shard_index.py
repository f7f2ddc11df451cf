"""Reads the shard index of a Hugging Face folder and checks it against the shards' headers.

The invariant: a tensor is assigned one file, and that file's header has it. The index cannot point outside
its folder, and no tensor in a shard is dropped silently.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, MAX_HEADER_BYTES, SafetensorsHeader
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
    raw = read_bounded(path, MAX_HEADER_BYTES)
    fields = parse_json_object(raw, path.name)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpoint(f"{path.name}: weight_map is missing or empty")
    for tensor, file in weight_map.items():
        if not (stays_inside(file) and file.endswith(".safetensors")):
            raise CorruptCheckpoint(
                f"{path.name}: {shown(tensor)} maps to {shown(file)}, not to a .safetensors file beside it",
                "an index that points elsewhere is not followed; get the checkpoint from its source again",
            )
    metadata = fields.get("metadata")
    return ShardIndex(
        files=tuple(path.parent / name for name in sorted(set(weight_map.values()))),
        weight_map=weight_map,
        total_size=metadata.get("total_size") if isinstance(metadata, dict) else None,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


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
    homes = {name: home for home, header in enumerate(headers) for name in header.specs}
    if index is None:
        return homes, []
    ordinals = {header.path.name: home for home, header in enumerate(headers)}
    differences = list(_differences(headers, homes, index))
    for name, file in index.weight_map.items():
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
    unlisted = [name for name in homes if name not in index.weight_map]
    if unlisted:
        yield f"{INDEX_FILE}: does not list {_first_of(unlisted)}; read all the same"
    repeated = [name for home, header in enumerate(headers) for name in header.specs if homes[name] != home]
    if repeated:
        yield f"{INDEX_FILE}: several shards hold {_first_of(repeated)}; the index decides which is read"
    nbytes = sum(headers[home].specs[name].nbytes for name, home in homes.items())
    if index.total_size not in (None, nbytes):
        yield f"{INDEX_FILE}: total_size is {shown(index.total_size)}, the tensors have {nbytes} bytes"


def _first_of(names: Sequence[str]) -> str:
    return shown(names[0]) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
