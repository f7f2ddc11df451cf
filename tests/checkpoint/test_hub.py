"""Names on the Hub, asked of a small server that answers as the Hub does, each time in a new process."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.checkpoint import hub, hub_errors
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import DiskFull, QConvertError
from qconvert.formats.huggingface.folder import open_hf_folder
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io.planned_files import FileSink

COMMIT = "c0ffee" * 6 + "c0ff"
SPECS = [TensorSpec(f"layer.{i}.weight", DType.F32, (200, 300)) for i in range(3)]


class Hub(ThreadingHTTPServer):
    """The endpoints of the Hub that a download uses; `asked` lists the files whose bytes it sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.replace("/api/models/", "/api/")
        api = re.fullmatch(r"/api/((?:datasets/)?\w+/\w+)/(revision|tree)/([^/?]+)(\?.*)?", path)
        file = re.fullmatch(r"/((?:datasets/)?\w+/\w+)/resolve/([^/]+)/(.+)", path)
        name = (api or file)[1] if api or file else ""
        repo = self.server.repos.get(name)
        if name == "org/broken":
            self._send(500, b"{}")
        elif repo is None:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api and api[3] not in ("main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif api and api[2] == "revision":
            self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        elif api:
            tree = [{"type": "file", "path": p, "size": len(b), "oid": _hash(b)} for p, b in repo.items()]
            self._send(200, json.dumps(tree).encode())
        elif name == "org/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif file and file[3] in repo:
            self._send_file(file[3], repo[file[3]])
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send_file(self, name: str, blob: bytes) -> None:
        headers = {"ETag": f'"{_hash(blob)}"', "X-Repo-Commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.command == "GET":
            self.server.asked.append(f"{name} in part" if wanted else name)
        if wanted:
            headers["Content-Range"] = f"bytes {wanted[1]}-{wanted[2]}/{len(blob)}"
            blob = blob[int(wanted[1]) : int(wanted[2]) + 1]
        self._send(206 if wanted else 200, blob, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _hash(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository of three shards, and of files that are none of our business."""
    folder = tmp_path_factory.mktemp("repo")
    sink = FileSink(folder, plan_files(SPECS, shard_size=SPECS[0].nbytes))
    for spec in SPECS:
        sink.write(spec.name, 0, np.full((spec.rows, spec.width), 1, "<f4"))
    sink.commit()
    texts = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "README.md": b"# hi", "LICENSE": b"free"}
    others = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/model.json": b"{}"}
    return {path.name: path.read_bytes() for path in folder.iterdir()} | texts | others


@pytest.fixture
def server(sharded: dict[str, bytes]) -> Iterator[Hub]:
    with Hub() as running:
        running.repos = {"org/tiny": sharded, "org/gated": {"config.json": b"{}"}, "org/broken": {}}
        running.repos["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


SCRIPT = """
import json, sys
from qconvert.errors import DiskFull, QConvertError
from qconvert.checkpoint.hub import resolve
from qconvert.formats.huggingface.folder import open_hf_folder
for model, options in json.loads(sys.argv[1]):
    try:
        found = resolve(model, **options)
        files = found.remote and open_hf_folder(found.path, found.remote)
        headers = files and {name: spec.shape for name, spec in files.specs.items()}
        print(json.dumps([str(found.path), found.repo_id, found.revision, found.commit, headers]))
    except QConvertError as error:
        print(json.dumps({"fact": error.fact, "hint": error.hint}))
"""


def ask(
    url: str, home: Path, *calls: tuple[str, dict[str, Any]], script: str = SCRIPT, **env: str
) -> list[Any]:
    """What `resolve` answers to each call, in one new process of this Hub and this cache."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env}
    command = [sys.executable, "-c", script, json.dumps(calls)]
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/tiny") == hub.ResolvedModel(Path("org/tiny"))


@pytest.mark.parametrize("model", ["nothing", "a/b/c", "./org/tiny", "hf://tiny", "x" * 5000, "a\0/b"])
def test_what_is_no_path_and_no_name_is_told_at_once(model: str) -> None:
    with pytest.raises(QConvertError, match="no such file or folder") as missing:
        hub.resolve(model)
    assert missing.value.hint == "a model on the Hub is written org/name"
    assert len(missing.value.fact) < 200


def test_a_model_is_downloaded_once_and_then_found_offline(server: Hub, tmp_path: Path) -> None:
    (path, *names), *_ = ask(
        server.url, tmp_path, ("hf://org/tiny@v1", {}), ("org/tiny", {"revision": "main"})
    )
    assert names == ["org/tiny", "v1", COMMIT, None]
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    texts = ["LICENSE", "README.md", "config.json", "tokenizer.json", "model.safetensors.index.json"]
    assert sorted(server.asked) == sorted([*shards, *texts])
    with open_hf_folder(Path(path)) as checkpoint:
        assert list(checkpoint.specs.values()) == SPECS
        assert checkpoint.read(SPECS[2].name, 0, 1)[0, 0] == 1
    assert ask("http://127.0.0.1:9", tmp_path, ("org/tiny", {}), HF_HUB_OFFLINE="1")[0][0] == path


def test_headers_alone_are_fetched_when_weights_are_not_wanted(server: Hub, tmp_path: Path) -> None:
    call = ("org/tiny", {"weights": False})
    ((path, _, _, _, headers),) = ask(server.url, tmp_path, call)
    assert headers == {spec.name: list(spec.shape) for spec in SPECS}
    assert all(name.endswith("in part") for name in server.asked if name.endswith(".safetensors"))
    assert not list(Path(path).glob("*.safetensors"))
    _, (_, *_, headers) = ask(server.url, tmp_path, ("org/tiny", {}), call)
    assert headers is None, "the files are here now"


def test_every_refusal_is_one_sentence_and_a_hint(server: Hub, tmp_path: Path) -> None:
    names = ("org/none", "org/gated", "org/broken", "org/tiny@v9", "org/--", "org/pickled")
    facts = [answer["fact"] for answer in ask(server.url, tmp_path, *((name, {}) for name in names))]
    assert facts[0] == "org/none: not a local folder, and there is no such model on the Hub"
    assert facts[1] == "org/gated: is gated, and not open to you"
    assert facts[2].startswith("org/broken: not a local folder, and not fully downloaded (Server error '500")
    assert facts[3] == "org/tiny@v9: has no such revision on the Hub"
    assert facts[4] == "org/--: not a local folder, and not a valid name for a model on the Hub"
    assert facts[5].startswith("org/pickled: has no model.safetensors and no index")
    assert not [name for name in server.asked if name.endswith(".bin")]


def test_a_repository_of_pickles_can_be_inspected_by_its_config(server: Hub, tmp_path: Path) -> None:
    ((path, *_, headers),) = ask(server.url, tmp_path, ("org/pickled", {"weights": False}))
    assert headers is None
    assert not open_hf_folder(Path(path)).has_weights


def test_what_cannot_be_reached_is_told(server: Hub, tmp_path: Path) -> None:
    (offline,) = ask(server.url, tmp_path, ("org/tiny", {}), HF_HUB_OFFLINE="1")
    assert offline == {
        "fact": "org/tiny: not a local folder, and not fully downloaded; "
        "HF_HUB_OFFLINE forbids downloading it",
        "hint": "unset HF_HUB_OFFLINE to download it",
    }
    (refused,) = ask("http://127.0.0.1:9", tmp_path, ("org/tiny", {}))
    assert (
        refused["fact"]
        == "org/tiny: not a local folder, and not fully downloaded ([Errno 111] Connection refused)"
    )
    (tmp_path / "file").touch()
    (unwritable,) = ask(server.url, tmp_path / "file", ("org/tiny", {}))
    assert re.fullmatch(r"org/tiny: the cache .*file/hub cannot be written: .+", unwritable["fact"])


def test_a_full_disk_is_told() -> None:
    raised, fact, hint = hub_errors.explanation(OSError(errno.ENOSPC, "No space left on device"))
    assert raised is DiskFull and raised.retryable
    assert fact.endswith("cannot be written: No space left on device")
    assert "HF_HOME" in hint


@pytest.mark.parametrize(("flags", "drawn"), [((), True), (("-q",), False), (("--json",), False)])
def test_a_quiet_command_draws_no_bars_of_the_hub(
    flags: tuple[str, ...], drawn: bool, server: Hub, tmp_path: Path
) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    hub_at = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_XET_DISABLE": "1"}
    words = [sys.executable, "-m", "qconvert", "inspect", "org/tiny", *flags]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(words, env=kept | hub_at, cwd=root, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "config.json" in said  # an empty object
    assert ("%|" in done.stderr) == drawn, done.stderr
