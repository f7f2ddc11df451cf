"""Outputs that are here, or on the Hub, or both, when they are to be sent: nothing is made or sent twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.convert.test_push import folder, hub  # noqa: F401
from tests.support.commands import files_of, made, qconvert
from tests.support.fake_hub import FakeHub, sha256
from tests.support.pushing import DROPS, PUSH, QUANTIZE, counted, pushed


def test_what_is_here_and_there_is_skipped(hub: FakeHub, here: Path) -> None:  # noqa: F811
    skipping = (*PUSH, "--skip-existing")
    commit = qconvert(*skipping, "--json").json["sent"]["commit"]
    before, done, local = pushed(hub), counted(hub), files_of(here / "out")
    said = f"org/new: already complete, by commit {commit}; nothing was sent\n"
    for option in ("--skip-existing", "--verify-existing"):
        ran = qconvert(*PUSH, option, "--events", "e.jsonl")
        assert (ran.code, ran.err) == (0, f"out: already complete, skipped\n{said}"), ran.err
    assert [json.loads(line)["path"] for line in (here / "e.jsonl").read_text().splitlines()] == ["out"] * 2
    told = qconvert(*skipping, "--overwrite", "--json").json
    assert told["skipped"] and (told["out"], told["sent"]["commit"]) == ("out", commit)
    assert told["sha256"].items() >= {
        (name, sha256(blob)) for name, blob in local.items() if name.endswith(".safetensors")
    }
    assert (pushed(hub), counted(hub), files_of(here / "out")) == (before, done, local)
    ran = qconvert(*[8 if word == 4 else word for word in skipping])
    assert ran.code == 1 and "out: already exists, and is not what this command writes" in ran.err


def test_what_is_here_alone_is_sent_and_not_made_again(hub: FakeHub, here: Path) -> None:  # noqa: F811
    made(*QUANTIZE, "-o", "out")
    local, skipping = files_of(here / "out"), (*PUSH, "--skip-existing")
    times = {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    told = qconvert(*skipping, "--json").json
    assert told["skipped"] and told["sent"]["bytes"] == sum(
        len(blob) for name, blob in local.items() if name.endswith(".safetensors")
    )
    assert pushed(hub) == local and not hub.written.branches and counted(hub)[1] == 1
    assert "nothing was sent" in qconvert(*skipping).err
    assert times == {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    hub.repos.clear()
    hub.written.forget()
    shard = here / "out" / min(name for name in local if name.endswith(".safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    ran = qconvert(*skipping)
    assert ran.code == 1 and f"{shard.name}: is not what was recorded of it" in ran.err, ran.err
    assert not any(name.endswith(".safetensors") for name in pushed(hub))


@DROPS
def test_what_is_there_alone_is_not_sent_again(hub: FakeHub, here: Path, drop: tuple[str, ...]) -> None:  # noqa: F811
    """Dropped here, there is nothing to make; else it is made, and what is there is known as one's own."""
    skipping = (*PUSH, "--skip-existing")
    assert qconvert(*skipping).code == 0
    before, done, local = pushed(hub), counted(hub), files_of(here / "out")
    shutil.rmtree(here / "out")
    ran = qconvert(*skipping, *drop, "--events", "e.jsonl")
    assert ran.code == 0, ran.err
    assert (pushed(hub), counted(hub)) == (before, done)
    if drop:
        assert "already complete" in ran.err and not list(here.glob("out*"))
        assert json.loads((here / "e.jsonl").read_text())["path"] == f"{hub.url}/org/new"
    else:
        assert files_of(here / "out") == local


def test_a_gguf_is_skipped_here_and_there(hub: FakeHub, here: Path) -> None:  # noqa: F811
    command = ("to-gguf", "m", "--type", "q8_0", "--split-max-size", "300KB", "-o", "m-q8_0.gguf")
    pushing = (*command, "--push-to", "org/new", "--skip-existing")
    made(*command)
    assert "now at" in qconvert(*pushing).err
    assert "nothing was sent" in qconvert(*pushing).err
    remote = pushed(hub)
    assert remote.pop("README.md").startswith(b"---\n")
    assert remote == {path.name: path.read_bytes() for path in here.glob("*.gguf")}


def test_a_dry_run_that_skips_asks_nothing(hub: FakeHub, here: Path) -> None:  # noqa: F811
    made(*QUANTIZE, "-o", "out")
    ran = qconvert(*PUSH, "--skip-existing", "--dry-run")
    assert ran.code == 0 and "nothing was written" in ran.err and not hub.log
