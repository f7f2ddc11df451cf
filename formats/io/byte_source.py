"""Defines where the bytes of a weight file come from: a file on this disk, or whatever reads like one.

A format's parser asks a source for exact ranges and never learns where they came from, so that the header of
a file on a server meets the same checks as that of a local one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from qconvert.errors import shown
from qconvert.formats.io.local_file import open_regular, read_all_exactly, read_exactly

# As many bytes are copied from the page cache in the time that one call takes (2 us).
_LOCAL_CALL_BYTES = 8192


class ByteSource(Protocol):
    """The bytes of one file, at hand for any thread.

    `call_bytes` is how many bytes come in the time that one request takes; `has_bytes` is False where
    only the header may be read. `read_into` fills a buffer with the bytes at an offset, or raises
    QConvertError; `read_all` fills many at rising offsets, and may cost less.
    """

    @property
    def size(self) -> int: ...

    @property
    def call_bytes(self) -> int: ...

    @property
    def has_bytes(self) -> bool: ...

    def read_into(self, buffer: memoryview, offset: int) -> None: ...

    def read_all(self, parts: Sequence[tuple[int, memoryview]]) -> None: ...

    def close(self) -> None: ...


class LocalBytes:
    """An open file of this disk; CorruptCheckpoint for what is no file, or is cut off while it is read."""

    call_bytes = _LOCAL_CALL_BYTES
    has_bytes = True

    def __init__(self, path: Path) -> None:
        self._fd, self._name = open_regular(path), shown(path.name)
        self._closer = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        read_exactly(self._fd, buffer, offset, self._name)

    def read_all(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        read_all_exactly(self._fd, parts, self._name)

    def close(self) -> None:
        self._closer()
