"""A Hub behind TLS with a private authority, and behind a proxy: each command in a process of its own."""

from __future__ import annotations

import base64
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from tests.support.commands import files_of, made
from tests.support.fake_hub import FakeHub, running
from tests.support.models import tiny

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "num_hidden_layers": 2}
HOW = ("--bits", "4", "--group-size", "32", "--min-max", "-j", "1", "-o")
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Proxy(ThreadingTCPServer):
    """Forwards to whoever is named by CONNECT; `asked` has what was, and with which credentials."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Forwards)
        self.asked: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class _Forwards(BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            came = self.request.recv(4096)
            if not came:
                return
            head += came
        lines = head.decode().split("\r\n")
        method, target, _ = lines[0].split()
        said = [line.partition(": ")[2] for line in lines if line.lower().startswith("proxy-authorization")]
        self.server.asked.append((f"{method} {target}", said[0] if said else ""))
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            self.request.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            ends = {self.request: there, there: self.request}
            while True:
                for end in select.select([*ends], [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("secured") / "m", "qwen3", shards=2, **SIZES)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificate of a private authority, and one that it has signed for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificates")
    root = tmp_path_factory.mktemp("authority")

    def request(name: str, *more: str) -> None:
        keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        out = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
        subprocess.run(["openssl", "req", "-x509", *keys, *out, *more], cwd=root, check=True, stderr=-3)

    request("authority")
    address = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    request("server", "-CA", "authority.pem", "-CAkey", "authority.key", *address)
    (root / "both.pem").write_text((root / "server.pem").read_text() + (root / "server.key").read_text())
    return root


@pytest.fixture
def hub(folder: Path, authority: Path) -> Iterator[FakeHub]:
    with running() as fake:
        fake.secure(authority / "both.pem")
        fake.add("org/m", folder)
        yield fake


@contextmanager
def proxied() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy
        proxy.shutdown()


def called(hub: FakeHub, here: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tool in a process that knows the Hub, and no certificates and proxies but those it is given."""
    cleared = {name for name in os.environ if name.lower() in PROXIES or name in CERTIFICATES}
    kept = {name: value for name, value in os.environ.items() if name not in cleared}
    told = {
        "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(here / "cache"), "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]), "HF_TOKEN": "hf_private",
    }  # fmt: skip
    command = [sys.executable, "-m", "qconvert", *words]
    return subprocess.run(
        command, env={**kept, **told, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def weights(folder: Path) -> dict[str, bytes]:
    return {name: blob for name, blob in files_of(folder).items() if name.endswith(".safetensors")}


def test_a_private_authority_is_trusted_where_the_environment_names_it(
    hub: FakeHub, folder: Path, authority: Path, here: Path
) -> None:
    trusted = {"SSL_CERT_FILE": str(authority / "authority.pem")}
    ran = called(hub, here, "quantize", "org/m", *HOW, "out", "--push-to", "org/new", **trusted)
    assert ran.returncode == 0, ran.stderr
    assert weights(here / "out") == weights(made("quantize", folder, *HOW, "local"))
    assert weights(here / "out").items() <= hub.repos["org/new"].items()
    assert {a.authorization for a in hub.log if a.server == "cdn"} == {None}


def test_an_unknown_authority_is_one_sentence(hub: FakeHub, here: Path) -> None:
    ran = called(hub, here, "quantize", "org/m", *HOW, "out")
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert ran.stderr.count("Error: ") == 1 and "certificate" in ran.stderr, ran.stderr
    assert not (here / "out").exists() and hub.sent("cdn") == 0


def test_a_proxy_is_asked_where_the_environment_names_one(
    hub: FakeHub, folder: Path, authority: Path, here: Path
) -> None:
    trusted = {"SSL_CERT_FILE": str(authority / "authority.pem")}
    with proxied() as proxy:
        address = f"127.0.0.1:{proxy.server_address[1]}"
        named = {**trusted, "HTTPS_PROXY": f"http://me:p%40ss@{address}"}
        ran = called(hub, here, "quantize", "org/m", *HOW, "out", **named)
        assert ran.returncode == 0, ran.stderr
        servers = {f"CONNECT {url.partition('//')[2]}" for url in (hub.url, hub.cdn_url)}
        assert {asked for asked, _ in proxy.asked} == servers, "the Hub and where it redirects to"
        assert {said for _, said in proxy.asked} == {f"Basic {base64.b64encode(b'me:p@ss').decode()}"}
        assert "p@ss" not in ran.stderr and "p%40ss" not in ran.stderr
        proxy.asked.clear()
        shutil.rmtree(here / "cache")
        ran = called(hub, here, "quantize", "org/m", *HOW, "direct", **named, NO_PROXY="127.0.0.1")
        assert ran.returncode == 0 and not proxy.asked, ran.stderr
    assert weights(here / "out") == weights(here / "direct")
