"""Holds what all transfers of a run share: open connections, the rate limit, patience, and an end.

The invariant: every thread waits as long as a server says; a transfer that gets no byte for
`patience` seconds ends with SourceUnavailable; `abort` ends every transfer at once. Bytes come through the
standard library, which reads them where they belong: a quarter of the processor time of the Hub's own client,
whatever client its version brings (requests, httpx). Proxies and certificates are those of the environment.
"""

from __future__ import annotations

import base64
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from qconvert.errors import SourceUnavailable

CONNECTIONS = 16
PATIENCE = 600.0
# A connection on which nothing arrives for so long is closed, in seconds.
STALL = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
# After so many seconds without a byte a person is told that something is asked again.
_QUIET = 2.0
_AGAIN = "check the connection"
_CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class Aborted(Exception):
    """The run has ended; this transfer is not needed any more."""


class Network:
    """The connections of one run, at most `connections` transfers at a time; safe for any thread.

    `patience` is in seconds; `tell` is given a sentence about every wait that a user would wonder about, and
    `retried` why something is asked again, from any thread. `requests`, `nbytes` and `retries` count what was
    asked for and what came.
    """

    def __init__(
        self,
        connections: int = CONNECTIONS,
        patience: float = PATIENCE,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.connections, self.patience, self._tell = connections, patience, tell
        self.retried: Callable[[str], None] = lambda reason: None
        self.requests = self.nbytes = self.retries = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._free_at = 0.0
        self._told_waiting = False
        self._mine = threading.local()
        self._open: set[HTTPConnection] = set()

    def count(self, *, requests: int = 0, nbytes: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.nbytes += nbytes
            self.retries += retries

    def begin(self) -> None:
        """Take transfers again after an `abort`."""
        self._ended.clear()

    def abort(self) -> None:
        """End all transfers, also those that wait for bytes."""
        self._ended.set()
        with self._lock:
            for connection in self._open:
                _shut(connection)

    def check(self) -> None:
        if self._ended.is_set():
            raise Aborted

    def pause(self, seconds: float) -> None:
        """Wait, or raise Aborted as soon as the run ends."""
        if self._ended.wait(seconds):
            raise Aborted

    def limit(self, host: str, seconds: float) -> None:
        """Let no thread ask anything for so long, as a server has asked."""
        with self._lock:
            later = time.monotonic() + seconds
            news = later > self._free_at + 1
            self._free_at = max(self._free_at, later)
        if news and seconds > 2:
            self.say(f"{host} limits how often it may be asked: waiting {seconds:.0f} s")

    def waits(self, reason: str) -> None:
        """Tell a person, once in a run, that something is asked again and again."""
        with self._lock:
            news, self._told_waiting = not self._told_waiting, True
        if news:
            self.say(f"{reason}; asking again, for up to {self.patience:.0f} s (--patience)")

    def say(self, line: str) -> None:
        """Tell a person something."""
        if self._tell is not None:
            self._tell(line)

    def wait_turn(self) -> None:
        """Wait until the servers let us ask again."""
        while (left := self._free_at - time.monotonic()) > 0:
            self.pause(left)
        self.check()

    def get(self, url: str, headers: Mapping[str, str]) -> HTTPResponse:
        """Ask for a file; the response has to be read whole, or `drop`ped. OSError or HTTPException."""
        parts = urlsplit(url)
        kept = self._kept()
        reused = kept.get((parts.scheme, parts.netloc))
        self.count(requests=1)
        if reused is not None and reused.sock is not None:
            try:
                return self._asked(reused, parts, headers)
            except (OSError, HTTPException):  # it was closed since the last answer
                self.check()
                self._forget(reused)
        connection = self._connect(parts)
        kept[parts.scheme, parts.netloc] = connection
        return self._asked(connection, parts, headers)

    def drop(self, url: str) -> None:
        """Close this thread's connection to the server of a URL, whose answer was not read whole."""
        parts = urlsplit(url)
        connection = self._kept().pop((parts.scheme, parts.netloc), None)
        if connection is not None:
            self._forget(connection)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def _kept(self) -> dict[tuple[str, str], HTTPConnection]:
        if not hasattr(self._mine, "connections"):
            self._mine.connections = {}
        found: dict[tuple[str, str], HTTPConnection] = self._mine.connections
        return found

    def _forget(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _asked(
        self, connection: HTTPConnection, parts: SplitResult, headers: Mapping[str, str]
    ) -> HTTPResponse:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        proxy = _proxy(parts)
        if proxy is not None and parts.scheme == "http":
            target, headers = f"http://{parts.netloc}{target}", {**headers, **_credentials(proxy)}
        connection.request("GET", target, headers=dict(headers))
        return connection.getresponse()

    def _connect(self, parts: SplitResult) -> HTTPConnection:
        proxy = _proxy(parts)
        at = proxy or parts
        host, port = at.hostname or "", at.port
        if parts.scheme == "https":
            secure = HTTPSConnection(host, port, timeout=STALL, context=self._tls)
            if proxy is not None:
                secure.set_tunnel(parts.hostname or "", parts.port or 443, _credentials(proxy))
            connection: HTTPConnection = secure
        else:
            connection = HTTPConnection(host, port, timeout=STALL)
        with self._lock:
            self._open.add(connection)
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The certificates that the environment names, or the system's; where there are none, certifi's."""
        named = next((os.environ[name] for name in _CERTIFICATES if os.environ.get(name)), None)
        context = ssl.create_default_context(cafile=named)
        if named is None and not context.cert_store_stats()["x509_ca"]:
            with suppress(ImportError):
                import certifi

                context.load_verify_locations(certifi.where())
        return context


class Attempts:
    """How often one transfer was tried since its last byte, and how long it may still be.

    `what` stands before the reason in the error: the host and the file.
    """

    def __init__(self, network: Network, what: str) -> None:
        self._network, self._what = network, what
        self._failed, self._since = 0, time.monotonic()

    def got(self) -> None:
        """Bytes came."""
        self._failed, self._since = 0, time.monotonic()

    def again(self, reason: str) -> None:
        """Wait before the next attempt: longer each time, by chance, so that threads do not ask at once.

        Raises SourceUnavailable when patience is at its end.
        """
        self._network.check()
        self._network.count(retries=1)
        self._network.retried(f"{self._what}: {reason}")
        left = self._left(reason)
        if time.monotonic() - self._since > _QUIET:
            self._network.waits(f"{self._what}: {reason}")
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failed, 10))
        self._failed += 1
        self._network.pause(min(left, random.uniform(0, longest)))

    def limited(self, host: str, seconds: float) -> None:
        """Wait as long as a server has asked; that does not count as an attempt, but takes patience."""
        self._network.limit(host, min(seconds, self._left("asks to wait, again and again")))
        self._network.wait_turn()

    def _left(self, reason: str) -> float:
        left = self._since + self._network.patience - time.monotonic()
        if left <= 0:
            raise SourceUnavailable(
                f"{self._what}: {reason}; no byte has come for {self._network.patience:g} s", _AGAIN
            )
        return left


def _proxy(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a URL, if any."""
    found = getproxies().get(parts.scheme) or getproxies().get("all")
    if not found or not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _shut(connection: HTTPConnection) -> None:
    """Wake the thread that reads from a connection."""
    if connection.sock is not None:
        with suppress(OSError):  # it was closed already
            connection.sock.shutdown(socket.SHUT_RDWR)
