"""Finds a file of a Hub repository: its size, its ETag, and the address its bytes are read from.

One HEAD asks the Hub for all of it. The address is that of the content network, with a signature that
expires, so it is asked for again when it is near its end or refused: once for all threads. The revision is a
commit, so a file whose ETag or size is another one then is an error, never data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from qconvert.checkpoint.hub_errors import explanation, first_line, network_error
from qconvert.checkpoint.network import Attempts, Network
from qconvert.errors import SourceUnavailable, shown

KEEP_SOURCE = "download the whole files with --keep-source"
# Of the life of a signed address; the rest is for the transfers that are under way.
_USABLE = 0.8
_RETRIED = (408, 429, 500, 502, 503, 504)
# How long a rate limit lasts that does not say so, in seconds.
_UNTOLD_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the bytes of a file are, and until when this address serves (seconds of `time.monotonic`)."""

    url: str
    good_until: float
    size: int
    etag: str | None
    is_hub: bool
    xet: Any

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


class HubFile:
    """A file of a commit on the Hub: `name`, `size` in bytes and `etag`, which do not change.

    `served` is the last address that gave bytes; `xet` is what huggingface_hub's client of xet needs to know
    of it, None where that is not offered.
    """

    def __init__(self, repo_id: str, commit: str, name: str, network: Network) -> None:
        self.repo_id, self.commit, self.name, self.network = repo_id, commit, name, network
        self._lock = threading.Lock()
        self.served: str | None = None
        self._address = self._ask()
        self.size, self.etag, self.xet = self._address.size, self._address.etag, self._address.xet

    @property
    def sha256(self) -> str | None:
        """The file's SHA-256, which is the ETag of a large file."""
        tag = self.etag or ""
        return tag if len(tag) == 64 and set(tag) <= set("0123456789abcdef") else None

    @property
    def place(self) -> str:
        """Repository and file, for messages."""
        return f"{self.repo_id}/{shown(self.name)}"

    def address(self, refused: str | None = None) -> Address:
        """The address to read from: another one than the `refused` one, and one that is not near its end.

        Raises SourceUnavailable if the Hub does not give it, or the file there is another one now.
        """
        with self._lock:
            now = self._address
            if now.url == refused or time.monotonic() > now.good_until:
                self._address = self._renewed()
            return self._address

    @property
    def host(self) -> str:
        """The Hub's."""
        return urlsplit(self._url).netloc

    def headers(self, address: Address) -> dict[str, str]:
        """The headers of a request for its bytes; only the Hub gets the token."""
        kept = ("user-agent", "authorization") if address.is_hub else ("user-agent",)
        return {name: value for name, value in self.hub_headers().items() if name.lower() in kept}

    def hub_headers(self) -> dict[str, str]:
        """The headers of a request to the Hub."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        said: Mapping[str, str] = build_hf_headers(library_name="qconvert")
        return dict(said)

    def changed(self, host: str, what: str) -> SourceUnavailable:
        """The error for bytes that are not those of the file that was opened."""
        return SourceUnavailable(
            f"{host}: {self.place}: has changed while it was read: {what};"
            f" commit {self.commit[:12]} cannot change, so this server is out of step",
            f"set HF_ENDPOINT to another server, or {KEEP_SOURCE}",
        )

    def _renewed(self) -> Address:
        try:
            found = self._ask()
        except SourceUnavailable:
            raise
        except Exception as error:
            if not isinstance(error, network_error() | OSError):
                raise
            _, fact, hint = explanation(error)
            raise SourceUnavailable(f"{self.host}: {self.place}: {fact}", hint) from error
        if (found.size, found.etag) != (self.size, self.etag):
            told = f"its ETag was {shown(self.etag)}, {self.size:,} bytes, and is {shown(found.etag)}"
            raise self.changed(self.host, f"{told}, {found.size:,} bytes, now")
        return found

    @property
    def _url(self) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repo_id, self.name, revision=self.commit))

    def _ask(self) -> Address:
        """One HEAD, again where the answer is that a later one may succeed."""
        from huggingface_hub import get_hf_file_metadata

        url = self._url
        host = urlsplit(url).netloc
        attempts = Attempts(self.network, f"{host}: {self.place}")
        while True:
            self.network.wait_turn()
            try:
                found = get_hf_file_metadata(url)
            except Exception as error:
                if not isinstance(error, network_error() | OSError) or not may_pass(error):
                    raise
                wait_after(attempts, host, error)
                continue
            if found.size is None:
                raise SourceUnavailable(
                    f"{host}: {self.place}: the server does not say how long it is", KEEP_SOURCE
                )
            is_hub = urlsplit(found.location).netloc == host
            xet = getattr(found, "xet_file_data", None)
            return Address(found.location, _end_of(found.location), found.size, found.etag, is_hub, xet)


def find_files(repo_id: str, commit: str, names: list[str], network: Network) -> list[HubFile]:
    """The files of these names that there are, asked for together; the errors of huggingface_hub."""
    with ThreadPoolExecutor(network.connections) as pool:
        found = pool.map(partial(_find, repo_id, commit, network), names)
        return [file for file in found if file is not None]


def _find(repo_id: str, commit: str, network: Network, name: str) -> HubFile | None:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return HubFile(repo_id, commit, name, network)
    except EntryNotFoundError:
        return None


def seconds_asked(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to wait: by `RateLimit` ("resolvers";r=0;t=55), or by `Retry-After`."""
    for field in headers.get("ratelimit", "").split(";"):
        key, _, value = field.strip().partition("=")
        if key == "t" and value.isdecimal():
            return float(value)
    after = headers.get("retry-after", "").strip()
    return float(after) if after.isdecimal() else None


def wait_after(attempts: Attempts, host: str, error: BaseException) -> None:
    """Wait for as long as the response of the Hub says, or for the usual time."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    said = {str(key).lower(): str(value) for key, value in getattr(response, "headers", {}).items()}
    asked = seconds_asked(said)
    if status == 429 or (status == 503 and asked is not None):
        attempts.limited(host, _UNTOLD_LIMIT if asked is None else asked)
    else:
        attempts.again(first_line(error))


def may_pass(error: BaseException) -> bool:
    """Whether a repetition may help: a busy server, a lost connection; not a refusal."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", None) in _RETRIED
    return True


def _end_of(url: str) -> float:
    """Until when to use a signed address, which says in its query how long it serves."""
    query = {key.lower(): values[0] for key, values in parse_qs(urlsplit(url).query).items()}
    lasts, ends = query.get("x-amz-expires", ""), query.get("expires", "")
    seconds = float("inf")
    if lasts.isdecimal():
        seconds = float(lasts)
    elif ends.isdecimal():
        seconds = max(0.0, float(ends) - time.time())
    return time.monotonic() + _USABLE * seconds
