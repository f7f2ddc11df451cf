"""Scans headers and shard indexes written in the form that libraries write, without a value for each bracket.

Half a million tensors are a few columns then. Any other form is left to the strict parser
(`formats.io.strict_json`), which reads it, or says what is wrong with it; a scan that succeeds gives what
that parser would.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import open_regular, read_exactly
from qconvert.formats.io.strict_json import parse_json_object

_BLOCK_BYTES = 1 << 20
# Of what comes before a map, and of a line of it.
_MOST_BYTES = 4 * _BLOCK_BYTES
_TEXT = r'"([^"\\\x00-\x1f]+)"'
_NUMBER = r"(0|[1-9]\d{0,15})"
_ARRAY = re.compile(
    rf',{_TEXT}:(\{{"dtype":"\w+","shape":\[[\d,]*\],"data_offsets":\[){_NUMBER},{_NUMBER}\]\}}'
)
_METADATA = '{"__metadata__":'
_SPACE = r"[ \t\n\r]*"
_PAIR = re.compile(rf"({_SPACE}){_TEXT}({_SPACE}):({_SPACE}){_TEXT}({_SPACE}),")
_MAP = re.compile(rb'"weight_map"[ \t\n\r]*:[ \t\n\r]*\{')
_END = re.compile(rf"{_SPACE}\}}{_SPACE}\}}{_SPACE}")


@dataclass(frozen=True, slots=True)
class HeaderColumns:
    """A safetensors header: its metadata, and of every array its name, what is said of its kind up to the
    positions, and these.
    """

    metadata: object
    names: list[str]
    kinds: list[str]
    begins: list[int]
    ends: list[int]


def scan_header(raw: bytes, most: int = limits.SAFETENSORS_TENSORS) -> HeaderColumns | None:
    """The columns of a header of at most so many arrays whose JSON the reference implementation has written.

    None for any other.
    """
    if not raw.isascii() or raw.count(b'"dtype"') > most:
        return None
    text = raw.decode().rstrip(" ")
    metadata: object = None
    start = 1
    if text.startswith(_METADATA):
        start = text.find("}", len(_METADATA)) + 1  # a brace in one of its texts ends it too early: no JSON
        try:
            metadata = parse_json_object(text[len(_METADATA) : start].encode(), "")
        except CorruptCheckpoint:
            return None
    if not text.startswith("{") or not text.endswith("}}"):
        return None
    text = f",{text[start:-1]}" if start == 1 else text[start:-1]
    found = _ARRAY.findall(text)
    names, kinds, begins, ends = map(list, zip(*found, strict=True)) if found else ([], [], [], [])
    length = sum(sum(map(len, column)) for column in (names, kinds, begins, ends)) + 7 * len(names)
    if length != len(text) or len(set(names)) != len(names) or "__metadata__" in names:
        return None
    return HeaderColumns(
        metadata, list(map(sys.intern, names)), kinds, [*map(int, begins)], [*map(int, ends)]
    )


@dataclass(frozen=True, slots=True)
class ScannedIndex:
    """A shard index: what it holds beside its map, and the map; the hash of its bytes."""

    fields: Json
    weight_map: dict[str, str]
    sha256: str


def scan_index(path: Path) -> ScannedIndex | None:
    """The index in a file whose map of plain texts comes last; None for any other spelling.

    No more than its names, and a block of it, is in memory.
    """
    scan, rest = _Scan(), b""
    for block in _blocks(path):
        scan.digest.update(block)
        rest = scan.take(rest + block)
        if scan.fields is None or len(rest) > _MOST_BYTES or scan.count > limits.JSON_KEYS:
            return None
    return scan.ended(rest)


@dataclass(slots=True)
class _Scan:
    """What of an index was read so far; `fields` is None before its map and where it is not plain."""

    digest: Any = field(default_factory=hashlib.sha256)
    fields: Json | None = None
    weight_map: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def take(self, raw: bytes) -> bytes:
        """Read what is whole of these bytes; the rest."""
        if self.fields is None:
            begin = _MAP.search(raw)
            if begin is None:
                return raw
            self.fields, raw = _beside(raw[: begin.end()]), raw[begin.end() :]
        end = raw.rfind(b'",') + 2
        if end < 2:
            return raw
        self._add(raw[:end])
        return raw[end:]

    def ended(self, rest: bytes) -> ScannedIndex | None:
        """The index, whose last line is the rest; None where there is anything else."""
        last = rest.rfind(b'"') + 1
        if last:
            self._add(rest[:last] + b",")
        elif self.count:  # a comma after the last line
            return None
        if self.fields is None or not _END.fullmatch(rest[last:].decode("latin-1")):
            return None
        if len(self.weight_map) != self.count:
            return None
        return ScannedIndex(self.fields, self.weight_map, self.digest.hexdigest())

    def _add(self, raw: bytes) -> None:
        """Take lines that each end with a comma."""
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        first = _PAIR.match(text)
        if first is None:
            self.fields = None
            return
        before, _, one, two, _, after = first.groups()  # the same around every pair, or it is not plain
        pairs: list[tuple[str, str]] = re.findall(f"{before}{_TEXT}{one}:{two}{_TEXT}{after},", text)
        around = len(first[0]) - len(first[2]) - len(first[5])
        names, homes = zip(*pairs, strict=True) if pairs else ((), ())
        if around * len(pairs) + sum(map(len, names)) + sum(map(len, homes)) != len(text):
            self.fields = None
            return
        self.count += len(pairs)
        files = map(self.files.setdefault, homes, homes)  # each text of a file once
        self.weight_map.update(zip(map(sys.intern, names), files, strict=True))


def _blocks(path: Path) -> Iterator[bytes]:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        size = size if size <= limits.INDEX_BYTES else 0
        for offset in range(0, size, _BLOCK_BYTES):
            block = bytearray(min(_BLOCK_BYTES, size - offset))
            read_exactly(fd, memoryview(block), offset, path.name)
            yield bytes(block)
    finally:
        os.close(fd)


def _beside(head: bytes) -> Json | None:
    """What an index holds before its map; None where that is no JSON, or the map is not the index's."""
    try:
        fields = parse_json_object(head + b"}}", "")
    except CorruptCheckpoint:
        return None
    return fields if fields.pop("weight_map", None) == {} else None
