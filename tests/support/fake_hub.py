"""A server that answers as the Hub and its content network do, and misbehaves on demand.

Two listeners, so that it shows what goes to the wrong one: the Hub (API, texts, and for weights a redirect to
a signed address with `X-Linked-Size` and `X-Linked-Etag`), and the content network, which serves ranges of
whoever brings a signature that is still good. Every request is logged with the bytes that were sent.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.fake_hub_writes import Written, answer_write, committed, files_at, head, listed

COMMIT = "c0ffee" * 6 + "c0ff"
GATED, BROKEN = "org/gated", "org/broken"


@dataclass(frozen=True)
class Asked:
    """One request: to the `hub` or the `cdn`, its method and path, the bytes it wanted and those it got."""

    server: str
    method: str
    path: str
    first: int | None
    status: int
    sent: int
    authorization: str | None


@dataclass(frozen=True)
class Answer:
    """What the content network does instead of serving a range.

    `status` 206 serves it, with other `headers`, `keep` bytes of it, and then a reset where `reset`.
    """

    status: int = 206
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep: int | None = None
    reset: bool = False
    whole: bool = False
    content_range: str | None = None


Fault = Callable[[int], "Answer | None"]
"""What happens to a request of weights, by its number from 0 on; None serves it as asked."""


class FakeHub:
    """Repositories by name, each of files by name; `weights` are served by the content network.

    An address serves `uses` requests. Files `in_xet` are offered through xet as well, by their hash there,
    from the folder `chunks`. `fault` is asked about every range, `resolve_fault` about every HEAD;
    `answering` is told of every request by its number, when its work is done and before its answer goes out.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.log: list[Asked] = []
        self.uses = 10**9
        self.fault: Fault = lambda number: None
        self.resolve_fault: Callable[[int], tuple[int, dict[str, str]] | None] = lambda number: None
        self.etag_of: Callable[[bytes], str] = sha256
        self.closed_to: set[str] = set()
        self.commit, self.written = COMMIT, Written()
        self.answering: Callable[[int], None] = lambda number: None
        self.lock = threading.Lock()
        self.signatures: dict[str, int] = {}
        self.ranges = self.resolved = 0
        self.in_xet: dict[str, str] = {}
        self.chunks: Path | None = None
        self.claimed_size: int | None = None
        self.scheme = "http"
        self.hub = _Server(_HubAnswers, self)
        self.cdn = _Server(_CdnAnswers, self)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.hub.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.cdn.server_port}"

    def secure(self, certificate: Path) -> None:
        """Speak TLS from now on, with a certificate and its key in one file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.scheme = "https"
        for server in (self.hub, self.cdn):
            server.socket = context.wrap_socket(server.socket, server_side=True)

    def sign(self, repo: str, file: str) -> str:
        with self.lock:
            secret = f"secret-{len(self.signatures)}"
            self.signatures[secret] = 0
        where = f"{self.cdn_url}/blobs/{repo}/{file}"
        return f"{where}?X-Amz-Expires=3600&X-Amz-Signature={secret}"

    def good(self, query: str) -> bool:
        secret = parse_qs(query).get("X-Amz-Signature", [""])[0]
        with self.lock:
            if secret not in self.signatures:
                return False
            self.signatures[secret] += 1
            return self.signatures[secret] <= self.uses

    def sent(self, server: str = "cdn") -> int:
        """The bytes of bodies that a server sent."""
        return sum(asked.sent for asked in self.log if asked.server == server)

    def heads(self) -> list[str]:
        """The weight files whose address was asked for, each time."""
        return [
            asked.path.rsplit("/", 1)[-1]
            for asked in self.log
            if asked.method == "HEAD" and asked.path.endswith(".safetensors") and asked.status == 302
        ]

    def add_to_xet(self, file: str, blob: bytes, chunks: Path) -> None:
        """Store a file in a folder as xet's own client does, and offer it through xet."""
        from hf_xet import XetSession

        with XetSession().new_upload_commit(endpoint=f"local://{chunks}") as commit:
            stored = commit.start_upload_bytes(blob, name=file)
        self.in_xet[file], self.chunks = stored.result().xet_info.hash, chunks

    def add(self, name: str, folder: Path) -> dict[str, bytes]:
        """Publish a folder as a repository."""
        self.repos[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.repos[name]


@contextmanager
def running() -> Iterator[FakeHub]:
    fake = FakeHub()
    for server in (fake.hub, fake.cdn):
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield fake
    finally:
        for server in (fake.hub, fake.cdn):
            server.shutdown()
            server.server_close()


@contextmanager
def known(fake: FakeHub, cache: Path) -> Iterator[None]:
    """Lets huggingface_hub in this process take a server for the Hub, and a folder for its cache.

    A new process would be told by HF_ENDPOINT and HF_HUB_CACHE, which it reads once.
    """
    from unittest.mock import patch

    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    with (
        patch.object(constants, "ENDPOINT", fake.url),
        patch.object(constants, "HF_HUB_CACHE", str(cache)),
        patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
        patch.object(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, create=True),
    ):
        yield
    if not silent:
        enable_progress_bars()


@lru_cache(256)
def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answers: type[BaseHTTPRequestHandler], fake: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), answers)
        self.fake = fake

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away is no news."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for the client to acknowledge its headers
    server: _Server
    where = ""

    @property
    def fake(self) -> FakeHub:
        return self.server.fake

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def do_POST(self) -> None:
        answer_write(self, self.fake)

    do_PUT = do_DELETE = do_POST

    def reply(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, keep: int | None = None
    ) -> None:
        part = b"" if self.command == "HEAD" else body if keep is None else body[:keep]
        first = re.match(r"bytes=(\d+)", self.headers.get("Range", ""))
        asked = Asked(
            self.where,
            self.command,
            urlsplit(self.path).path,
            int(first[1]) if first else None,
            status,
            len(part),
            self.headers.get("Authorization"),
        )
        with self.fake.lock:
            self.fake.log.append(asked)
            number = len(self.fake.log) - 1
        self.fake.answering(number)
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(part)


class _HubAnswers(_Answers):
    where = "hub"

    def do_GET(self) -> None:
        api = re.fullmatch(
            r"/api/models/(\w+/[\w.-]+)(?:/(revision|tree|commits)/([^/?]+))?(\?.*)?", self.path
        )
        file = re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([^/]+)/([^?]+)", self.path)
        name = (api or file)[1] if api or file else ""  # type: ignore[index]
        asked = (api[3] if api else file[2] if file else "") or "main"
        repo = files_at(self.fake, name, asked)
        if "/xet-read-token/" in self.path or "/xet-write-token/" in self.path:
            token = {
                "accessToken": "t",
                "exp": int(time.time()) + 3600,
                "casUrl": f"local://{self.fake.chunks}",
            }
            self.reply(200, json.dumps(token).encode())
        elif repo is None and name in self.fake.repos and name not in self.fake.closed_to:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif repo is None or name in self.fake.closed_to:
            self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api and api[2] == "tree":
            self.reply(200, json.dumps([listed(path, blob) for path, blob in repo.items()]).encode())
        elif api and api[2] == "commits":
            made = self.fake.written.history.get((name, unquote(asked)), [])
            self.reply(200, json.dumps([committed(oid, said) for oid, said, _ in made]).encode())
        elif api:
            sha = head(self.fake, name, unquote(asked), COMMIT)
            info = {"id": name, "sha": sha, "siblings": [], "private": name in self.fake.written.private}
            self.reply(200, json.dumps(info).encode())
        elif file and file[3] in repo:
            self._file(name, file[3], repo[file[3]])
        else:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _file(self, repo: str, file: str, blob: bytes) -> None:
        headers = {"X-Repo-Commit": COMMIT}
        if not file.endswith(".safetensors"):
            self.reply(200, blob, {**headers, "ETag": f'"{sha256(blob)}"'})
            return
        with self.fake.lock:
            number = self.fake.resolved
            self.fake.resolved += 1
        if repo == GATED:
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        wrong = self.fake.resolve_fault(number)
        if wrong is not None:
            self.reply(wrong[0], b"{}", wrong[1])
            return
        if file in self.fake.in_xet:
            route = f"{self.fake.url}/api/models/{repo}/xet-read-token/{COMMIT}"
            headers |= {"X-Xet-Hash": self.fake.in_xet[file], "X-Xet-Refresh-Route": route}
        size = self.fake.claimed_size or len(blob)
        linked = {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{self.fake.etag_of(blob)}"'}
        self.reply(302, b"", {**headers, **linked, "Location": self.fake.sign(repo, file)})


class _CdnAnswers(_Answers):
    where = "cdn"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, _, org, name, file = parts.path.split("/")
        blob = self.fake.repos[f"{org}/{name}"][file]
        with self.fake.lock:
            number = self.fake.ranges
            self.fake.ranges += 1
        if not self.fake.good(parts.query):
            self.reply(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self.reply(200, blob)
            return
        first, last = int(wanted[1]), int(wanted[2])
        how = self.fake.fault(number) or Answer()
        if how.status != 206:
            self.reply(how.status, blob if how.whole else how.body, how.headers)
            return
        headers = {"Content-Range": how.content_range or f"bytes {first}-{last}/{len(blob)}"}
        tag = {"ETag": f'"{sha256(blob)[:32]}"'}
        self.reply(206, blob[first : last + 1], {**tag, **headers, **how.headers}, how.keep)
        if how.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how.keep is not None:
            self.close_connection = True
            self.connection.close()
