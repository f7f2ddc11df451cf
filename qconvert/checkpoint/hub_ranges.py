"""Fetches ranges of a file on the Hub: by plain HTTP, or through xet what is not to be had so."""

from __future__ import annotations

import threading

from qconvert.checkpoint.http_ranges import Refused, read_range
from qconvert.checkpoint.hub_file import HubFile
from qconvert.checkpoint.xet_ranges import LARGEST_BY_HTTP, XetRanges, has_xet


class HubRanges:
    """A file of a commit on the Hub, whose bytes any thread may fetch (a `remote_bytes.RemoteFile`)."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        self.name, self.size, self.etag, self.sha256 = file.name, file.size, file.etag, file.sha256
        self.place = file.place
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._xet: XetRanges | None = None
        if file.size > LARGEST_BY_HTTP and has_xet(file):
            self._use_xet(f"{file.place}: {file.size / 1e9:.0f} GB are too large for plain HTTP")

    def fetch(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer by a request of its own."""
        if self._xet is None:
            try:
                return read_range(self._file, buffer, offset, self._etags)
            except Refused as refused:
                if not has_xet(self._file):
                    raise
                self._use_xet(refused.fact)
        assert self._xet is not None
        self._xet.read(buffer, offset)
        return None

    def _use_xet(self, why: str) -> None:
        with self._lock:
            if self._xet is None:
                self._xet = XetRanges(self._file)
                self._file.network.say(f"{why}; reading through xet")
