"""Gives a weight file on a server the interface of a file on this disk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from qconvert.errors import NotDownloaded
from qconvert.formats.huggingface.safetensors_file import MAX_HEADER_BYTES

# What a request costs on a usual line, in bytes that come in the meantime.
_CALL_BYTES = 4 << 20


class RemoteFile(Protocol):
    """A file on a server: its name, and its address for messages; its size, and what tells versions apart.

    `fetch` fills a buffer with the bytes from an offset on, or raises SourceUnavailable; from any thread.
    """

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def etag(self) -> str | None: ...

    @property
    def sha256(self) -> str | None: ...

    def fetch(self, buffer: memoryview, offset: int) -> None: ...


class Held(Protocol):
    """What has fetched bytes of files before they are asked for (`windows.Windows`)."""

    def read_into(self, file: RemoteBytes, buffer: memoryview, offset: int) -> None: ...


class RemoteBytes:
    """The bytes of a file on a server (a `ByteSource`): its first ones, and others on demand.

    With `has_bytes` False, its header alone may be read. While it has `windows`, ranges are taken from what
    they hold.
    """

    call_bytes = _CALL_BYTES

    def __init__(self, file: RemoteFile, first_bytes: int, *, has_bytes: bool) -> None:
        self.file, self.size, self.has_bytes = file, file.size, has_bytes
        self.windows: Held | None = None
        self._lock = threading.Lock()
        self._kept_at, self._kept, self._header_end = 0, b"", 0
        self._fetch_header(first_bytes)

    @property
    def at_hand(self) -> int:
        """The bytes before this offset need no request."""
        return self._kept_at + len(self._kept)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        taken = self._take_kept(buffer, offset)
        buffer, offset = buffer[taken:], offset + taken
        if not len(buffer):
            return
        if not self.has_bytes and offset + len(buffer) > self._header_end:
            raise NotDownloaded(
                f"{self.file.place}: its bytes are not here, only its header",
                "download the weights, with `hf download` or by converting the model",
            )
        if self.windows is not None:
            self.windows.read_into(self, buffer, offset)
        else:
            self.fetch(buffer, offset)

    def read_all(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffer in parts:
            self.read_into(buffer, offset)

    def fetch(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer by a request of its own."""
        self.file.fetch(buffer, offset)

    def close(self) -> None:
        """Nothing is open: connections belong to the network."""

    def _fetch_header(self, first_bytes: int) -> None:
        """Fetch so many bytes, and the rest of the header where it is longer: at most two requests.

        A length that the format forbids is left to the parser to refuse.
        """
        first = bytearray(min(self.size, max(8, first_bytes)))
        self.fetch(memoryview(first), 0)
        length = int.from_bytes(first[:8], "little")
        self._header_end = 8 + length
        if length <= min(MAX_HEADER_BYTES, self.size - 8) and self._header_end > len(first):
            rest = bytearray(self._header_end - len(first))
            self.fetch(memoryview(rest), len(first))
            first += rest
        self._kept = bytes(first)

    def _take_kept(self, buffer: memoryview, offset: int) -> int:
        """Copy what is at hand; how much. The header is forgotten once it was read."""
        with self._lock:
            begin = offset - self._kept_at
            if not 0 <= begin < len(self._kept):
                return 0
            part = self._kept[begin : begin + len(buffer)]
            buffer[: len(part)] = part
            if offset == 8 and offset + len(part) == self._header_end:
                self._kept_at, self._kept = self._header_end, self._kept[self._header_end - self._kept_at :]
        return len(part)
