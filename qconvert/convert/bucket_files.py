"""Looks at the files of an output that are objects of a bucket, by their sizes, first bytes and ETags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from qconvert.checkpoint.network import Network
from qconvert.checkpoint.object_store import Missing, ObjectFile, Place
from qconvert.convert.gguf_sidecars import MANIFEST, sidecar
from qconvert.convert.manifest import FILE_NAME
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.io.strict_json import parse_json_object

MARK = "config.json"
"""The object that comes last: without it, a folder in a bucket is no model."""

# Of an object that is read whole, so much is asked for at a time, over every connection.
_WINDOW = 4 << 20


class BucketFiles:
    """Those below a bucket's prefix (a `files_at.FilesAt`); of a GGUF file (`is_file`), beside others."""

    def __init__(self, place: Place, network: Network, *, is_file: bool) -> None:
        self._place, self._network, self._is_file = place, network, is_file
        self._heads: dict[str, Any | None] = {}

    def is_output(self, names: Collection[str]) -> bool:
        """Whether all is there: files come one after another, and of a folder the mark comes last."""
        there = set(self._place.names())
        return there >= set(names) if self._is_file else MARK in there

    def size(self, name: str) -> int | None:
        head = self._head(name)
        return None if head is None else int(head["size"])

    def begins_with(self, name: str, parts: Iterable[bytes]) -> bool:
        begin = 0
        for window in _windows(parts):
            if self._read(name, begin, len(window)) != window:
                return False
            begin += len(window)
        return True

    def manifest(self, first: str) -> Json:
        name = sidecar(Path(first), MANIFEST).name if self._is_file else FILE_NAME
        raw = self._place.text(name)
        try:
            return {} if raw is None else parse_json_object(raw, name)
        except CorruptCheckpoint:
            return {}

    def changed_ns(self, name: str) -> int:
        """The end of the second that storages name: what was written earlier in that second is no newer."""
        head = self._head(name)
        return 0 if head is None else (int(head["last_modified"].timestamp()) + 1) * 10**9 - 1

    def sha256(self, name: str) -> str:
        size, digest = self.size(name) or 0, sha256()
        starts = iter(range(0, size, _WINDOW))
        with ThreadPoolExecutor(self._network.connections) as pool:
            while some := list(islice(starts, self._network.connections)):
                reads = [pool.submit(self._read, name, at, min(_WINDOW, size - at)) for at in some]
                for each in reads:
                    digest.update(each.result())
        return digest.hexdigest()

    def _head(self, name: str) -> Any | None:
        if name not in self._heads:
            self._heads[name] = self._place.head(name)
        return self._heads[name]

    def _read(self, name: str, begin: int, length: int) -> bytes:
        """Bytes of the object whose ETag was seen first; SourceUnavailable where that has changed."""
        head = self._head(name)
        if head is None:
            raise Missing(f"{self._place.url}/{shown(name)}: is not there", "check the address")
        buffer = bytearray(length)
        ObjectFile(self._place, name, head, self._network).fetch(memoryview(buffer), begin)
        return bytes(buffer)


def _windows(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, so many at a time that each is worth a request."""
    waiting: list[bytes] = []
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= _WINDOW:
            yield b"".join(waiting)
            waiting = []
    if rest := b"".join(waiting):
        yield rest
