"""Reads a range of bytes of a file on the Hub, whatever its servers do on the way.

What an answer means (evidence: huggingface_hub's `http_get`, and issues of xet-core on expired addresses):

- 206 with the range that was asked for, of a file of the same size: data. Of another range or size, or with
  another strong ETag than before, or 416: the file has changed, an error.
- 200: the server ignores ranges; never data.
- 400, 401, 403, 404, 410: the signature has expired, or access is refused: a new address from the Hub; where
  that is refused too, an error with what the server says.
- 429, or 503 that names a time: everybody waits as long as is asked. It does not count as an attempt.
- 408, 5xx, a lost connection, a short answer, a trickle: what came is kept, the rest is asked for again, with
  pauses that grow, until no byte has come for as long as patience lasts.
"""

from __future__ import annotations

import re
import time
from http.client import HTTPException, HTTPResponse
from typing import NoReturn

from qconvert.checkpoint.hub_errors import first_line, without_queries
from qconvert.checkpoint.hub_file import KEEP_SOURCE, HubFile, seconds_asked
from qconvert.checkpoint.network import STALL, Attempts
from qconvert.errors import SourceUnavailable, shown


class Refused(SourceUnavailable):
    """The content network does not give this file to requests of this kind."""


_PIECE = 128 << 10  # what is read at once, and lost with a connection
_LEAST_RATE = 1 << 10  # bytes a second over STALL seconds; a slower connection is given up
_REFUSED = (400, 401, 403, 404, 410)
_BODY_BYTES = 16 << 10
# In a row, by addresses that serve others.
_MOST_REFUSALS = 6
_UNTOLD_LIMIT = 30.0
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def read_range(file: HubFile, buffer: memoryview, offset: int, etags: dict[str, str]) -> None:
    """Fills a buffer with the bytes of a file from `offset` on; any thread may call it.

    `etags` are those that servers have given the file so far, by host. Raises SourceUnavailable, naming host
    and file, for what does not pass; Aborted when the run ends.
    """
    if len(buffer):
        _Transfer(file, buffer, offset, etags).run()


class _Transfer:
    """One range under way: `done` bytes of it are in the buffer."""

    def __init__(self, file: HubFile, buffer: memoryview, offset: int, etags: dict[str, str]) -> None:
        self.file, self.buffer, self.offset, self.etags = file, buffer, offset, etags
        self.network, self.done = file.network, 0
        self.refused: str | None = None
        self.refusals = 0
        self.address = file.address()
        self.attempts = Attempts(self.network, self._what)

    @property
    def _what(self) -> str:
        return f"{self.address.host}: {self.file.place}"

    def run(self) -> None:
        while self.done < len(self.buffer):
            self.network.wait_turn()
            self.address = self.file.address(self.refused)
            try:
                reason = self._answered(self._ask())
            except (OSError, HTTPException) as error:
                reason = f"the connection is lost ({first_line(error)})"
            if reason is not None:
                self.network.drop(self.address.url)
                self.attempts.again(reason)

    def _ask(self) -> HTTPResponse:
        first, last = self.offset + self.done, self.offset + len(self.buffer) - 1
        asked = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        return self.network.get(self.address.url, {**self.file.headers(self.address), **asked})

    def _answered(self, response: HTTPResponse) -> str | None:
        """Handle a response; returns why the request must be repeated after a pause, or None."""
        status = response.status
        if status == 206:
            self._check(response)
            return self._take(response)
        if status == 200 or 300 <= status < 400:
            self._end(
                response,
                "answers a request for a part with all of it"
                if status == 200
                else f"sends the request elsewhere (HTTP {status})",
                f"set HF_ENDPOINT to another server, or {KEEP_SOURCE}",
            )
        if status == 416:
            self.network.drop(self.address.url)
            raise self.file.changed(self.address.host, f"it has no byte {self.offset + self.done:,} now")
        if status in _REFUSED:
            self._refuse(response)
            return None
        asked = seconds_asked({key.lower(): value for key, value in response.getheaders()})
        if status == 429 or (status == 503 and asked is not None):
            self.network.drop(self.address.url)
            self.attempts.limited(self.address.host, _UNTOLD_LIMIT if asked is None else asked)
            return None
        if status == 408 or status >= 500:
            return f"answers HTTP {status}"
        self._end(response, f"answers HTTP {status}", KEEP_SOURCE)

    def _check(self, response: HTTPResponse) -> None:
        """Raises unless the answer is of the range that was asked for, of the file that was opened."""
        first, last = self.offset + self.done, self.offset + len(self.buffer) - 1
        told = response.getheader("Content-Range", "")
        match = _RANGE.fullmatch(told.strip())
        if match is None or tuple(map(int, match.groups())) != (first, last, self.file.size):
            self.network.drop(self.address.url)
            asked = f"bytes {first}-{last}/{self.file.size} are asked for"
            raise self.file.changed(self.address.host, f"{asked}, it gives {shown(told)}")
        if response.getheader("Content-Encoding", "identity") != "identity":
            self._end(response, "compresses what should come as it is", KEEP_SOURCE)
        etag = response.getheader("ETag", "")
        if etag and not etag.startswith("W/"):
            before = self.etags.setdefault(self.address.host, etag)
            if before != etag:
                self.network.drop(self.address.url)
                raise self.file.changed(
                    self.address.host, f"its ETag was {shown(before)}, and is {shown(etag)}"
                )

    def _take(self, response: HTTPResponse) -> str | None:
        """Reads the body into the buffer; the reason if it ends early or comes too slowly."""
        since, counted = time.monotonic(), self.done
        while self.done < len(self.buffer):
            came = response.readinto(self.buffer[self.done : self.done + _PIECE])
            if not came:
                return "the answer ends early"
            self.done, self.refusals = self.done + came, 0
            self.file.served = self.address.url
            self.network.count(nbytes=came)
            self.attempts.got()
            if (now := time.monotonic()) - since > STALL:
                if self.done - counted < _LEAST_RATE * STALL:
                    return f"gives {self.done - counted:,} bytes in {STALL:.0f} s"
                since, counted = now, self.done
        response.read()  # nothing, but the connection is free for the next request then
        return None

    def _refuse(self, response: HTTPResponse) -> None:
        """Send the next request to a new address, unless this one is new and has not been used yet."""
        self.refusals += 1
        used_up = self.file.served == self.address.url and self.refusals < _MOST_REFUSALS
        if self.refusals > 1 and not used_up:
            said = _said(response)
            self.network.drop(self.address.url)
            told = f"HTTP {response.status}{f': {said}' if said else ''}"
            raise Refused(
                f"{self._what}: refuses a new address too ({told})", f"try again later, or {KEEP_SOURCE}"
            )
        self.network.drop(self.address.url)
        self.refused = self.address.url

    def _end(self, response: HTTPResponse, fact: str, hint: str) -> NoReturn:
        self.network.drop(self.address.url)
        raise SourceUnavailable(f"{self._what}: {fact}", hint)


def _said(response: HTTPResponse) -> str:
    """What the body of a refusal says, without anything that was signed: 200 characters of it."""
    try:
        body = response.read(_BODY_BYTES).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    message = re.search(r"<Message>(.*?)</Message>", body, re.DOTALL)
    text = message[1] if message else re.sub(r"<[^>]*>", " ", body)
    return shown(without_queries(" ".join(text.split()))[:200], limit=200)
