"""Azure's and Google's storage: the real clients against emulators, from a bucket into a bucket."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_object_store import HOW, SIZES, without_names
from tests.support.commands import files_of, made, qconvert
from tests.support.models import tiny

obstore = pytest.importorskip("obstore", reason="the extra `cloud` is not installed")

# Every emulator of Azure's storage has this account and this key (Azurite's README).
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("stores") / "m", "qwen3", shards=3, **SIZES)


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    """Microsoft's emulator (`npm install -g azurite`), with the container `bucket`."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed: npm install -g azurite")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    how = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    with subprocess.Popen([program, "--blobPort", str(port), *how], stdout=-3, stderr=-3) as running:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with socket.socket() as trying:
                if trying.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        _make_container(url, "bucket")
        yield url
        running.terminate()


def _make_container(url: str, name: str) -> None:
    """Create a container, by a request that is signed with the shared key."""
    said = {
        "x-ms-date": datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "x-ms-version": "2021-08-06",
    }
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in said.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signed = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers = {**said, "Authorization": f"SharedKey {ACCOUNT}:{signed}", "Content-Length": "0"}
    address = f"{url}/{ACCOUNT}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers)).read()


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """The XML interface that Google's storage shares with S3, by moto, which knows no bearer tokens."""
    moto = pytest.importorskip("moto.server", reason="moto or flask is not installed")
    from werkzeug.serving import make_server

    inside = moto.DomainDispatcherApplication(moto.create_backend_app)

    scope = "Credential=someone/20261123/us-east-1/s3/aws4_request"

    def known(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"
        return inside(environ, start)

    server = make_server("127.0.0.1", 0, known, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).read()
    yield url
    server.shutdown()


@pytest.fixture(params=["az", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scheme of a store that the environment gives access to."""
    if request.param == "az":
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", request.getfixturevalue("azurite"))
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    else:
        key = {"gcs_base_url": request.getfixturevalue("google"), "disable_oauth": True}
        empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**key, **empty}))
    return str(request.param)


def test_from_a_bucket_into_a_bucket_equals_the_local_run(store: str, folder: Path, here: Path) -> None:
    place = obstore.store.from_url(f"{store}://bucket", client_options={"allow_http": True})
    for path in folder.iterdir():
        obstore.put(place, f"models/m/{path.name}", path)
    local = files_of(made("quantize", folder, *HOW, "-o", "out"))
    command = ("quantize", f"{store}://bucket/models/m", *HOW, "-o", f"{store}://bucket/made/out", "--json")
    ran = qconvert(*command)
    assert ran.code == 0, ran.err + ran.out
    found = [each["path"] for page in obstore.list(place, "made/out") for each in page]
    remote = {path.rpartition("/")[2]: bytes(obstore.get(place, path).bytes()) for path in found}
    assert without_names(remote) == without_names(local)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert weights * 0.99 <= ran.json["fetched"]["bytes"] <= 1.02 * weights
    assert not list(here.glob("out.*"))
    again = qconvert(*command)
    assert again.code == 1 and "holds config.json already" in again.json["error"]["fact"], again.out
    name = next(path.name for path in folder.glob("*.safetensors"))
    _require_changes_are_seen(place, f"{store}://bucket/models/m", name)


def _require_changes_are_seen(place: Any, url: str, name: str) -> None:
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.network import Network
    from qconvert.errors import SourceUnavailable

    found = resolve(url, network=Network())
    assert found.remote is not None
    remote = found.remote[name]
    obstore.put(place, f"models/m/{name}", b"x" * remote.size)
    with pytest.raises(SourceUnavailable, match="has changed meanwhile"):
        remote.fetch(memoryview(bytearray(100)), remote.size - 100)
