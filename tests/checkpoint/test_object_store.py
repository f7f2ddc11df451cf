"""Models in object storage and on web servers: read by ranges, written file by file, the mark last."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import failed, files_of, made, qconvert, without_source
from tests.support.models import tiny

obstore = pytest.importorskip("obstore", reason="the extra `cloud` is not installed")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "num_hidden_layers": 2}
HOW = ("--bits", 4, "--group-size", 32, "--min-max", "-j", 2, "--shard-size", "150KB")
SECRET = "verysecretaccesskey"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("objects") / "m", "qwen3", shards=3, **SIZES)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A local S3."""
    moto = pytest.importorskip("moto.server", reason="moto or flask is not installed")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket with the model at `models/m`, which the environment gives access to; the same model is `m`."""
    from obstore.store import S3Store

    for key, value in {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": server,
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }.items():
        monkeypatch.setenv(key, value)
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).read()
    urllib.request.urlopen(urllib.request.Request(f"{server}/bucket", method="PUT")).read()
    store = S3Store("bucket", client_options={"allow_http": True})
    for path in folder.iterdir():
        obstore.put(store, f"models/m/{path.name}", path)
    (here / "m").symlink_to(folder)
    yield store


def objects(store: Any, prefix: str) -> dict[str, bytes]:
    found = [each["path"] for page in obstore.list(store, prefix) for each in page]
    return {path.removeprefix(f"{prefix}/"): bytes(obstore.get(store, path).bytes()) for path in found}


def recorded(monkeypatch: pytest.MonkeyPatch, real: Any) -> list[str]:
    """The names of what is put from now on, in order."""
    names: list[str] = []

    def put(store: Any, name: str, *args: Any, **more: Any) -> Any:
        names.append(name)
        return real(store, name, *args, **more)

    monkeypatch.setattr(obstore, "put", put)
    return names


def without_names(files: dict[str, bytes]) -> dict[str, Any]:
    """The files of an output, without what says where its source was found."""
    return without_source(files, "name")


def test_from_a_bucket_into_a_bucket_equals_the_local_run(bucket: Any, here: Path) -> None:
    local = files_of(made("quantize", "m", *HOW, "-o", "out"))
    ran = qconvert("quantize", "s3://bucket/models/m/", *HOW, "-o", "s3://bucket/made/out/", "--json")
    assert ran.code == 0, ran.err
    assert without_names(objects(bucket, "made/out")) == without_names(local)
    weights = sum(p.stat().st_size for p in (here / "m").glob("*.safetensors"))
    assert weights * 0.99 <= ran.json["fetched"]["bytes"] <= 1.02 * weights
    assert ran.json["out"] == "s3://bucket/made/out" == ran.json["sent"]["url"]
    assert not list(here.glob("out.*")), "nothing is left here"
    source = json.loads(objects(bucket, "made/out")["qconvert.json"])["source"]
    assert source["name"] == "s3://bucket/models/m"
    assert SECRET not in str(objects(bucket, "made/out"))


def test_what_has_changed_in_the_bucket_is_not_skipped(bucket: Any, here: Path, tmp_path: Path) -> None:
    """Told by ETag where the size is the same, by size where it is not; an older manifest has no ETag."""
    command = ("quantize", "s3://bucket/models/m", *HOW, "-o", "out", "--skip-existing")
    made(*command)
    ran = qconvert(*command)
    assert ran.code == 0 and "already complete, skipped" in ran.err
    manifest = here / "out" / "qconvert.json"
    record = json.loads(manifest.read_text())
    assert all(file["etag"] for file in record["source"]["files"])
    other = tiny(tmp_path / "other", "qwen3", shards=3, seed=1, **SIZES)
    first = sorted(path.name for path in other.glob("*.safetensors"))[0]
    obstore.put(bucket, f"models/m/{first}", other / first)
    why = f"out: already exists, and is not what this command writes (the source's {first} has another ETag)"
    redo = "add --overwrite: it then writes again what is not complete, and leaves the rest"
    failed(qconvert(*command), why, redo)
    for file in record["source"]["files"]:
        file.pop("etag")
    manifest.write_text(json.dumps(record))
    assert qconvert(*command).code == 0, "nothing was recorded to compare"
    record["source"]["files"][0]["bytes"] += 1
    manifest.write_text(json.dumps(record))
    failed(qconvert(*command), why.replace("ETag", "size"), redo)
    made(*command, "--overwrite")
    assert qconvert(*command).code == 0


def test_the_mark_comes_last_and_is_not_replaced_unasked(
    bucket: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = recorded(monkeypatch, obstore.put)
    command = ("quantize", "m", *HOW, "-o", "s3://bucket/made")
    assert qconvert(*command).code == 0
    assert puts[-1] == "config.json" and len(puts) > 6
    assert all(name.endswith(".safetensors") for name in puts[:3])
    before = objects(bucket, "made")
    ran = qconvert(*command)
    assert ran.code == 1 and ran.err.count("Error: s3://bucket/made: holds config.json already") == 1, ran.err
    assert objects(bucket, "made") == before
    bigger = ("quantize", "m", *HOW[:-1], "5GB", "-o", "s3://bucket/made", "--overwrite")
    assert qconvert(*bigger).code == 0
    now = objects(bucket, "made")
    assert "model.safetensors" in now and not any("-of-" in name for name in now)


def test_a_stopped_upload_is_no_model_and_goes_on(
    bucket: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = files_of(made("quantize", "m", *HOW, "-o", "local"))
    real, left = obstore.put, iter(range(2))

    def fails(store: Any, name: str, *args: Any, **more: Any) -> Any:
        if next(left, None) is None:
            raise obstore.exceptions.GenericError(
                f"Generic S3 error: Error after 3 retries, source: 503 Service Unavailable {SECRET}"
            )
        return real(store, name, *args, **more)

    monkeypatch.setattr(obstore, "put", fails)
    command = ("quantize", "m", *HOW, "-o", "s3://bucket/made/local")
    ran = qconvert(*command)
    assert ran.code == 1 and "run the same command to continue" in ran.err
    assert re.search(r"Error: s3://bucket/made/local/\S+: the server answers HTTP 503", ran.err), ran.err
    assert SECRET not in ran.err
    assert "config.json" not in objects(bucket, "made/local")
    puts = recorded(monkeypatch, real)
    ran = qconvert(*command)
    assert ran.code == 0 and "resuming" in ran.err, ran.err
    assert sum(name.endswith(".safetensors") for name in puts) == 1, "what was there is not sent again"
    remote = objects(bucket, "made/local")
    assert {k: v for k, v in remote.items() if k != "README.md"} == {
        k: v for k, v in local.items() if k != "README.md"
    }


def test_a_gguf_into_a_bucket(bucket: Any, here: Path) -> None:
    ran = qconvert("to-gguf", "s3://bucket/models/m", "--type", "q8_0", "-o", "s3://bucket/gguf/m.gguf")
    assert ran.code == 0, ran.err
    assert list(objects(bucket, "gguf")) == ["m.gguf"]
    from gguf import GGUFReader

    (here / "back.gguf").write_bytes(objects(bucket, "gguf")["m.gguf"])
    made("to-gguf", "m", "--type", "q8_0", "-o", "local.gguf")
    back, local = (GGUFReader(here / name) for name in ("back.gguf", "local.gguf"))
    assert {t.name: bytes(t.data) for t in back.tensors} == {t.name: bytes(t.data) for t in local.tensors}


def test_an_object_that_changes_is_never_data(bucket: Any, here: Path) -> None:
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.network import Network
    from qconvert.errors import SourceUnavailable

    found = resolve("s3://bucket/models/m", network=Network())
    assert found.remote is not None
    name, remote = next(iter(found.remote.items()))
    obstore.put(bucket, f"models/m/{name}", b"x" * remote.size)
    with pytest.raises(SourceUnavailable, match=f"s3://bucket/models/m/{name}: has changed meanwhile"):
        remote.fetch(memoryview(bytearray(100)), remote.size - 100)


def test_what_reads_a_model_several_times_is_refused(bucket: Any, here: Path) -> None:
    for command in (
        ("generate", "s3://bucket/models/m", "-p", "x"),
        ("quantize", "s3://bucket/models/m", *HOW[:2], "--method", "feedback"),
    ):
        ran = qconvert(*command)
        assert ran.code == 1 and ran.err.startswith(
            "Error: s3://bucket/models/m: is read once, while it is converted; "
        ), ran.err


def test_what_is_not_there_is_one_sentence(bucket: Any, here: Path) -> None:
    ran = qconvert("inspect", "s3://bucket/nothing")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Error: s3://bucket/nothing: has no "), ran.err
    ran = qconvert("inspect", "s3://absent/m")
    assert ran.code == 1 and "Error: s3://absent/m: " in ran.err and "Traceback" not in ran.err, ran.err


def test_a_plain_web_server(folder: Path, here: Path) -> None:
    (here / "m").symlink_to(folder)
    asked: list[str] = []

    class Ranges(SimpleHTTPRequestHandler):
        """Files with ranges and an ETag, as every web server serves them."""

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = here / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            raw, status = path.read_bytes(), 200
            total, tag = len(raw), f'"{len(raw)}"'
            asked.append(f"{self.command} {path.name}")
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            self.send_response(206 if wanted else status)
            if wanted:
                first, last = int(wanted[1]), min(int(wanted[2]), total - 1)
                self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
                raw = raw[first : last + 1]
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(here))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}/m"
        ran = qconvert("quantize", url, *HOW, "-o", "streamed")
        assert ran.code == 0, ran.err
        failed(
            qconvert("quantize", f"{url}/absent", *HOW, "-o", "absent"),
            f"{url}/absent: has no model.safetensors",
            "name the folder with config.json and model.safetensors, or all shards and their "
            "model.safetensors.index.json",
        )
        web.shutdown()
    local = made("quantize", "m", *HOW, "-o", "local")
    assert without_names(files_of(here / "streamed")) == without_names(files_of(local))


def test_without_the_extra_one_line_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    failed(
        qconvert("inspect", "s3://bucket/m"),
        "s3://bucket/m: object storage needs a package that is not installed",
        "pip install 'qconvert[cloud]'",
    )
    assert not list(here.iterdir())
