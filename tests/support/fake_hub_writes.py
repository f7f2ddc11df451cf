"""What a fake Hub answers to those who write: repositories, branches, uploads, commits.

The endpoints, in the order of a push with huggingface_hub 2.4: repos/create, revision, tree, branch,
preupload, the LFS batch and PUT (or a token for xet), commit, paths-info, validate-yaml. A branch is a
dictionary of whole files; a file is visible in it only by a commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

if TYPE_CHECKING:
    from tests.support.fake_hub import FakeHub, _Answers

LARGE = (".safetensors", ".gguf")
Files = dict[str, bytes]


@dataclass
class Written:
    """What was written to a hub, beside the files of main: other branches, heads, objects, privacy.

    `history` has the commits of each branch: their names, descriptions, and files.

    `wrong` is asked about every request of a writer, by method and path: a status, headers and a body to
    answer with instead.
    """

    branches: dict[tuple[str, str], Files] = field(default_factory=dict)
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)
    history: dict[tuple[str, str], list[tuple[str, str, Files]]] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget all that was written."""
        for each in (self.branches, self.heads, self.objects, self.claimed, self.private, self.history):
            each.clear()
        self.commits.clear()

    def wrong(self, method: str, path: str) -> tuple[int, dict[str, str], bytes] | None:
        return None


def head(fake: FakeHub, repo: str, branch: str, default: str) -> str:
    return fake.written.heads.get((repo, branch), default)


def files_at(fake: FakeHub, repo: str, revision: str) -> Files | None:
    """The files of a branch, or of a commit, which is main's."""
    revision = unquote(revision)
    if (repo, revision) in fake.written.branches:
        return fake.written.branches[repo, revision]
    for (name, _), commits in fake.written.history.items():
        for oid, _, files in commits:
            if (name, oid) == (repo, revision):
                return files
    known = ("main", *fake.written.heads.values())
    return fake.repos.get(repo) if revision in known or re.fullmatch("[0-9a-f]{40}", revision) else None


def listed(name: str, blob: bytes) -> dict[str, Any]:
    """A file as the tree of a revision has it: large ones with the SHA-256 of their bytes."""
    oid = hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(blob), "oid": oid}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(blob).hexdigest(), "size": len(blob), "pointerSize": 130}
    return entry


def committed(oid: str, said: str) -> dict[str, Any]:
    """A commit as the history of a branch has it."""
    date = "2026-11-22T00:00:00.000Z"
    return {"id": oid, "title": "a commit", "message": said, "authors": [{"user": "someone"}], "date": date}


def answer_write(asked: _Answers, fake: FakeHub) -> None:
    """Answer one POST, PUT or DELETE."""
    body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
    path = asked.path.partition("?")[0]
    wrong = fake.written.wrong(asked.command, path)
    if wrong is not None:
        asked.reply(wrong[0], wrong[2], wrong[1])
        return
    with fake.lock:
        status, found = _answer(asked, fake, asked.command, path, body)
    asked.reply(status, json.dumps(found).encode() if status != 204 else b"", {})


def _answer(asked: _Answers, fake: FakeHub, method: str, path: str, body: bytes) -> tuple[int, Any]:
    written = fake.written
    if path == "/api/repos/create":
        return _create(fake, json.loads(body))
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if batch := re.fullmatch(r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch", path):
        return 200, {"objects": [_offer(asked, fake, batch[1], each) for each in json.loads(body)["objects"]]}
    if put := re.fullmatch(r"/upload/([0-9a-f]{64})", path):
        if hashlib.sha256(body).hexdigest() != put[1]:
            return 400, {"error": "other bytes than were announced"}
        written.objects[put[1]] = body
        return 200, {}
    api = re.fullmatch(r"/api/models/(\w+/[\w.-]+)/(branch|preupload|commit|paths-info)/(.+)", path)
    if api is None:
        return 404, {"error": f"no such endpoint: {path}"}
    repo, what, ref = api[1], api[2], unquote(api[3])
    if repo not in fake.repos:
        return 404, {"error": "Repository not found"}
    if what == "branch":
        return _branch(fake, method, repo, ref, json.loads(body or b"{}"))
    files = files_at(fake, repo, ref)
    if files is None:
        return 404, {"error": f"Invalid rev id: {ref}"}
    if what == "preupload":
        return 200, {"files": [_mode(each, files) for each in json.loads(body)["files"]]}
    if what == "paths-info":
        wanted = parse_qs(body.decode())["paths"]
        return 200, [listed(name, files[name]) for name in wanted if name in files]
    return _commit(fake, repo, ref, files, [json.loads(line) for line in body.splitlines()])


def _create(fake: FakeHub, asked: dict[str, Any]) -> tuple[int, Any]:
    name = f"{asked['organization']}/{asked['name']}"
    if name in fake.repos:
        return 409, {"error": "You already created this model repo", "url": f"{fake.url}/{name}"}
    fake.repos[name] = {".gitattributes": b"*.safetensors filter=lfs\n"}
    if asked.get("visibility") == "private" or asked.get("private"):
        fake.written.private.add(name)
    return 200, {"url": f"{fake.url}/{name}"}


def _branch(fake: FakeHub, method: str, repo: str, ref: str, asked: dict[str, Any]) -> tuple[int, Any]:
    branches = fake.written.branches
    if method == "DELETE":
        if branches.pop((repo, ref), None) is None:
            return 404, {"error": "Reference does not exist"}
        return 200, {}
    if ref == "main" or (repo, ref) in branches:
        return 409, {"error": "Reference already exists"}
    start = files_at(fake, repo, asked.get("startingPoint", "main"))
    if start is None:
        return 404, {"error": "Invalid rev id"}
    branches[repo, ref] = dict(start)
    fake.written.heads[repo, ref] = hashlib.sha1(f"{repo} {ref}".encode()).hexdigest()
    return 200, {}


def _mode(asked: dict[str, Any], files: Files) -> dict[str, Any]:
    name = asked["path"]
    large = name.endswith(LARGE) or asked["size"] > 10_000_000
    oid = listed(name, files[name])["oid"] if name in files else None
    return {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}


def _offer(asked: _Answers, fake: FakeHub, repo: str, wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted["oid"] in fake.written.objects:
        return dict(wanted)
    href = f"{fake.cdn_url}/upload/{wanted['oid']}?X-Amz-Signature=secret"
    return {**wanted, "actions": {"upload": {"href": href}}}


def _commit(fake: FakeHub, repo: str, ref: str, files: Files, lines: list[Any]) -> tuple[int, Any]:
    written, changed = fake.written, dict(files)
    header, *operations = lines
    parent = header["value"].get("parentCommit")
    if parent is not None and parent != head(fake, repo, ref, fake.commit):
        return 412, {"error": "A commit has happened since. Please refresh and try again."}
    for each in operations:
        value = each["value"]
        name = value["path"]
        if each["key"] == "deletedFile":
            del changed[name]
        elif each["key"] == "file":
            changed[name] = base64.b64decode(value["content"])
        elif value["oid"] in written.objects:
            changed[name] = written.objects[value["oid"]]
        else:
            return 400, {"error": f"{name}: the object {value['oid']} was never uploaded"}
    files.clear()
    files.update(changed)
    oid = hashlib.sha1(f"{len(written.commits)} {repo} {ref}".encode()).hexdigest()
    written.heads[repo, ref] = oid
    written.commits.append((repo, ref, [each["value"]["path"] for each in operations]))
    said = header["value"].get("description", "")
    written.history.setdefault((repo, ref), []).insert(0, (oid, said, dict(changed)))
    return 200, {"commitUrl": f"{fake.url}/{repo}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}
