"""Reads ranges of a file through xet, the Hub's storage of chunks, where plain HTTP does not give them.

The content network refuses files above 50 GB (`MAX_HTTP_DOWNLOAD_SIZE` in huggingface_hub), and some servers
offer nothing else. The client is the Hub's own, hf_xet, used nowhere but here; it retries, and holds chunks
against their hashes. Its buffers are set small, and few streams run at once, since by default it takes
gigabytes. A stream that fails may just end, so its length is what counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from qconvert.checkpoint.hub_errors import first_line
from qconvert.checkpoint.hub_file import HubFile
from qconvert.checkpoint.network import Attempts
from qconvert.errors import SourceUnavailable

LARGEST_BY_HTTP = 50_000_000_000
_STREAMS = 4
_BUFFERS = {
    "reconstruction.download_buffer_size": 64 << 20,
    "reconstruction.download_buffer_perfile_size": 32 << 20,
    "reconstruction.download_buffer_limit": 64 << 20,
    "reconstruction.min_prefetch_buffer": 16 << 20,
}


def has_xet(file: HubFile) -> bool:
    """Whether the Hub offers a file through xet, and the client is there and not forbidden."""
    from huggingface_hub import constants

    if file.xet is None or getattr(constants, "HF_HUB_DISABLE_XET", False):
        return False
    try:
        from hf_xet import XetConfig, XetSession
    except ImportError:
        return False
    return hasattr(XetSession, "new_download_stream_group") and hasattr(XetConfig, "with_config")


class XetRanges:
    """The streams of one file; any thread may read."""

    def __init__(self, file: HubFile) -> None:
        self.file, self._group = file, None
        self._lock, self._free = threading.Lock(), threading.Semaphore(_STREAMS)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from `offset` on; SourceUnavailable when patience ends."""
        network, done = self.file.network, 0
        what = f"{self.file.host}: {self.file.place}"
        attempts = Attempts(network, what)
        while done < len(buffer):
            network.check()
            reason = "xet gives fewer bytes than the file has"
            try:
                with self._free:
                    for chunk in self._stream(offset + done, offset + len(buffer)):
                        network.check()
                        if done + len(chunk) > len(buffer):
                            raise SourceUnavailable(
                                f"{what}: xet gives more bytes than were asked for",
                                "set HF_HUB_DISABLE_XET=1",
                            )
                        buffer[done : done + len(chunk)] = chunk
                        done += len(chunk)
                        network.count(nbytes=len(chunk))
                        attempts.got()
            except (OSError, RuntimeError, ValueError) as error:
                reason = f"xet fails ({first_line(error)})"
            if done < len(buffer):
                attempts.again(reason)

    def _stream(self, begin: int, end: int) -> Iterator[bytes]:
        from hf_xet import XetFileInfo

        self.file.network.count(requests=1)
        info = XetFileInfo(self.file.xet.file_hash, self.file.size)
        chunks: Iterator[bytes] = self._opened().download_stream(info, start=begin, end=end)
        return chunks

    def _opened(self) -> Any:
        """The group of streams, which gets tokens from the Hub by itself."""
        from hf_xet import XetConfig, XetSession

        with self._lock:
            if self._group is None:
                session = XetSession(XetConfig().with_config(_BUFFERS))
                self._group = session.new_download_stream_group(
                    token_refresh_url=self.file.xet.refresh_route,
                    token_refresh_headers=self.file.hub_headers(),
                )
            return self._group
