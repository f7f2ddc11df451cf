"""Looks at the files of an output where they are: in a folder, or as objects of a bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from qconvert.convert.manifest import manifest_path
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io.local_file import explained
from qconvert.formats.io.read_back import file_sha256
from qconvert.formats.io.strict_json import read_json_object

_MOST_RECORDED = 1 << 30


class FilesAt(Protocol):
    """The files of one output, whole or not, by their names."""

    def is_output(self, names: Collection[str]) -> bool:
        """Whether there is an output: of these names, or another one in its place."""
        ...

    def size(self, name: str) -> int | None:
        """The bytes of a file; None where there is none."""
        ...

    def begins_with(self, name: str, parts: Iterable[bytes]) -> bool:
        """Whether a file that is there has these first bytes."""
        ...

    def manifest(self, first: str) -> Json:
        """The manifest of the output whose first file this is; empty where there is none that can be read."""
        ...

    def changed_ns(self, name: str) -> int:
        """When a file was last written, in nanoseconds since 1970."""
        ...

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file, which is read for it."""
        ...


class LocalFiles:
    """Those of a folder `out`, or of the GGUF file `out` (`is_file`), whose parts lie beside that name."""

    def __init__(self, out: Path, *, is_file: bool) -> None:
        self._out, self._is_file = out, is_file
        self._folder = out.parent if is_file else out

    def is_output(self, names: Collection[str]) -> bool:
        there = any((self._folder / name).exists() for name in names)
        return there or (not self._is_file and self._out.exists())

    def size(self, name: str) -> int | None:
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def begins_with(self, name: str, parts: Iterable[bytes]) -> bool:
        path = self._folder / name
        with explained(f"{path}: cannot be read"), path.open("rb") as file:
            return all(file.read(len(part)) == part for part in parts)

    def manifest(self, first: str) -> Json:
        path = self._folder / first if self._is_file else self._out
        try:
            return read_json_object(manifest_path(path), max_bytes=_MOST_RECORDED)
        except (CorruptCheckpoint, OSError):
            return {}

    def changed_ns(self, name: str) -> int:
        return (self._folder / name).stat().st_mtime_ns

    def sha256(self, name: str) -> str:
        return file_sha256(self._folder / name)
