"""Outputs that are sent to a Hub: whole or not at all, whenever the run is killed, and each file once."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint import network
from qconvert.convert.hub_repository import sending_bytes
from tests.support.commands import Ran, files_of, made, qconvert
from tests.support.crashes import asked, forked
from tests.support.crashes import running as running_command
from tests.support.fake_hub import FakeHub, sha256
from tests.support.models import tiny
from tests.support.pushing import (
    DROPS,
    PUSH,
    QUANTIZE,
    SIZES,
    TOKEN,
    answering,
    pushed,
    uploads,
    writable_hub,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("push") / "m", "qwen3", **SIZES)


@pytest.fixture
def hub(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that can be written; the model is `m` in the current folder."""
    (here / "m").symlink_to(folder)
    with writable_hub(here / "cache", monkeypatch) as fake:
        yield fake


def test_a_model_becomes_visible_by_one_commit(hub: FakeHub, here: Path) -> None:
    seen: list[int] = []
    hub.answering = lambda number: seen.append(
        sum(name.endswith(".safetensors") for name in hub.repos.get("org/new", {}))
    )
    ran = qconvert(*PUSH)
    assert ran.code == 0, ran.err
    assert pushed(hub) == files_of(here / "out")
    weights = [name for name in pushed(hub) if name.endswith(".safetensors")]
    assert len(weights) > 2 and set(seen) == {0, len(weights)}, "none, and then all"
    last = [files for repo, ref, files in hub.written.commits if ref == "main"]
    assert len(last) == 1 and set(last[0]) == set(files_of(here / "out"))
    assert not hub.written.branches, "the staging branch is gone"
    assert len(uploads(hub)) == len(weights)
    assert f"now at {hub.url}/org/new" in ran.err and "next: vllm serve org/new" in ran.err
    assert files_of(made(*QUANTIZE, "-o", "alone"))["qconvert.json"] == pushed(hub)["qconvert.json"]


def test_nothing_is_pushed_without_a_token(hub: FakeHub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    ran = qconvert(*PUSH)
    assert (
        ran.code != 0 and "--push-to org/new: no token for the Hub" in ran.err and "hf auth login" in ran.err
    )
    assert not hub.log and not (here / "out").exists(), "before any work"
    assert qconvert(*PUSH, "--dry-run").code == 0


def test_waiting_for_the_network_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(network, "_QUIET", -1.0)
    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    attempts = network.Attempts(network.Network(patience=60, tell=told.append), "hub: org/new")
    for _ in range(3):
        attempts.again("no route to host")
    assert told == ["hub: org/new: no route to host; asking again, for up to 60 s (--patience)"]


def test_what_a_script_reads_of_a_push(hub: FakeHub, here: Path) -> None:
    told = qconvert(*PUSH, "--json", "--drop-pushed").json
    sent = told["sent"]
    assert (sent["to"], sent["url"], told["out"]) == ("org/new", f"{hub.url}/org/new", sent["url"])
    assert sent["commit"] == hub.written.heads["org/new", "main"]
    assert sent["bytes"] == sum(len(b) for n, b in pushed(hub).items() if n.endswith(".safetensors"))


def test_dropped_files_take_no_disk(hub: FakeHub, here: Path) -> None:
    small = ("--shard-size", "60KB")
    local = files_of(made(*QUANTIZE, *small, "-o", "alone"))
    partial, most = here / "out.partial", [0]

    def look(number: int) -> None:
        shards = partial.glob("*.safetensors")
        most.append(sum(shard.stat().st_blocks * 512 > 8192 for shard in shards))

    hub.answering = look
    ran = qconvert(*PUSH, *small, "--drop-pushed", "-q")
    assert (ran.code, ran.out) == (0, f"{hub.url}/org/new\n"), ran.err
    weights = [name for name in local if name.endswith(".safetensors")]
    assert len(weights) > 4 and 1 <= max(most) <= 2
    assert not list(here.glob("out*"))
    remote = pushed(hub)
    assert remote.keys() == local.keys()
    card = remote.pop("README.md"), local.pop("README.md")
    assert card[0] == card[1].replace(b"alone", b"out")
    assert remote == local


@pytest.fixture
def kill(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], int], int]:
    """Does something in a fork that is killed when its request of this number is answered; its exit code."""
    state: dict[str, Any] = {"left": 10**9, "pid": None}
    real = os.fork

    def deadly(number: int) -> None:
        state["left"] -= 1
        if state["left"] == 0:
            os.kill(state["pid"], signal.SIGKILL)

    def fork() -> int:
        pid = real()
        if pid:
            state["pid"] = pid
        return pid

    def killed(command: Callable[[], object], request: int) -> int:
        state["left"] = request
        return forked(command)

    monkeypatch.setattr(os, "fork", fork)
    hub.answering = deadly
    return killed


def none_or_all(hub: FakeHub, reference: dict[str, bytes]) -> bool:
    """Whether no weight file is visible, or all are."""
    visible = {name for name in hub.repos.get("org/new", {}) if name.endswith(".safetensors")}
    return visible in (set(), {name for name in reference if name.endswith(".safetensors")})


def same_but_card(hub: FakeHub, reference: dict[str, bytes]) -> bool:
    """Whether all that is visible is as it should be; the card names the output, which has another name."""
    found = pushed(hub)
    return {**found, "README.md": b""} == {**reference, "README.md": b""} and not hub.written.branches


@DROPS
def test_a_kill_after_every_request_ends_equal(
    hub: FakeHub, here: Path, drop: tuple[str, ...], kill: Callable[[Callable[[], object], int], int]
) -> None:
    """Each run is killed one request later than the one before it, until one gets to its end."""
    reference = files_of(made(*QUANTIZE, "-o", "reference"))
    command = running_command(*PUSH, *drop)
    for request in range(1, 200):
        code = kill(command, request)
        assert none_or_all(hub, reference)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        if any(name.endswith(".safetensors") for name in hub.repos.get("org/new", {})):
            assert kill(command, 10**9) == 0, "the next run finds its own model there"
            break
    assert request > 10
    assert same_but_card(hub, reference)
    assert (here / "out").exists() != bool(drop)
    sent = uploads(hub)
    assert len(sent) <= len(set(sent)) + 2, "what was sent is not sent again"


@DROPS
def test_a_run_that_is_killed_as_it_goes_on_ends_equal(
    hub: FakeHub, here: Path, drop: tuple[str, ...], kill: Callable[[Callable[[], object], int], int]
) -> None:
    """Killed at a request, and the run that goes on with it at another; the third comes to its end."""
    reference = files_of(made(*QUANTIZE, "-o", "reference"))
    command, weights = running_command(*PUSH, *drop), sum(n.endswith(".safetensors") for n in reference)
    assert kill(command, 10**9) == 0
    requests, twice = len(hub.log), 0
    pairs = [(first, second) for first in range(1, requests) for second in range(1, requests)]
    chosen = asked(pairs, random.Random(20261123).sample(pairs, 8))
    for first, second in chosen:
        hub.log.clear()
        hub.repos.clear()
        hub.written.forget()
        shutil.rmtree(here / "out", ignore_errors=True)
        codes = [kill(command, request) for request in (first, second)]
        assert set(codes) <= {-signal.SIGKILL, 0, 1} and none_or_all(hub, reference), (first, second)
        twice += codes == [-signal.SIGKILL] * 2
        if not (here / "out").exists():
            assert kill(command, 10**9) == 0, (first, second)
        assert same_but_card(hub, reference), (first, second)
        assert (here / "out").exists() != bool(drop)
        assert len(uploads(hub)) <= weights + 2, "at most the file that was under way goes twice a kill"
    assert twice > len(chosen) // 3
    assert not list(here.glob("out.*"))


def test_what_was_sent_and_dropped_is_known_to_be_there(hub: FakeHub, here: Path) -> None:
    """The same command again sends nothing; another command, or another model there, is refused."""
    dropping = (*PUSH, "--drop-pushed")
    commit = qconvert(*dropping, "--json").json["sent"]["commit"]
    before, commits = pushed(hub), list(hub.written.commits)
    ran = qconvert(*dropping)
    assert ran.code == 0, ran.err
    assert f"org/new: already complete, by commit {commit}; nothing was sent\n" in ran.err
    told = qconvert(*dropping, "--json").json
    assert told["skipped"] and told["sent"]["commit"] == commit and told["out"] == told["sent"]["url"]
    assert qconvert(*dropping, "-q").out == f"{hub.url}/org/new\n"
    assert (pushed(hub), hub.written.commits) == (before, commits) and not list(here.glob("out*"))
    words = [8 if word == 4 else word for word in dropping]
    assert "org/new: holds model" in qconvert(*words).err
    shard = next(name for name in before if name.endswith(".safetensors"))
    hub.repos["org/new"][shard] = b"somebody else's"
    ran = qconvert(*dropping)
    assert ran.code == 1 and "org/new: holds model" in ran.err, ran.err
    assert qconvert(*dropping, "--overwrite").code == 0
    assert pushed(hub) == before


REFUSALS = [
    ("POST", "repos/create", 401, "Invalid credentials", "the Hub knows neither you nor the repository"),
    (
        "POST",
        "repos/create",
        403,
        "You don't have the rights",
        "you may not write there (HTTP 403: You",
    ),
    ("POST", "preupload", 403, "Private repository storage limit reached", "the account's storage is full"),
    ("POST", "preupload", 413, "Payload too large", "a file is too large for the Hub (HTTP 413"),
    ("POST", "commit/main", 412, "A commit has happened", "somebody else has changed it meanwhile"),
    ("POST", "commit/main", 409, "Conflict", "somebody else has changed it meanwhile (HTTP 409"),
    ("PUT", "upload", 403, f"no {TOKEN} ?X-Amz-Signature=secret", "you may not write there (HTTP 403"),
]


@pytest.mark.parametrize(("method", "path", "status", "said", "told"), REFUSALS)
def test_a_refusal_is_one_sentence_and_the_next_run_goes_on(
    hub: FakeHub, here: Path, method: str, path: str, status: int, said: str, told: str
) -> None:
    hub.written.wrong = lambda m, p: (  # type: ignore[method-assign]
        answering(status, said) if m == method and path in p else None
    )
    ran = qconvert(*PUSH)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("Error: ") == 1 and f"Error: org/new: {told}" in ran.err, ran.err
    assert "Traceback" not in ran.err and TOKEN not in ran.err and "secret" not in ran.err
    assert not (here / "out").exists()
    assert not any(name.endswith(".safetensors") for name in hub.repos.get("org/new", {}))
    hub.written.wrong = lambda m, p: None  # type: ignore[method-assign]
    done = qconvert(*PUSH)
    assert done.code == 0, done.err
    assert pushed(hub) == files_of(here / "out")


def busy(hub: FakeHub, times: int, answer: Any) -> None:
    left = iter(range(times))

    def wrong(method: str, path: str) -> Any:
        return answer if "commit" in path and next(left, None) is not None else None

    hub.written.wrong = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("answer", [answering(503), answering(429, "slow", {"Retry-After": "0"})])
def test_a_busy_hub_is_asked_again(hub: FakeHub, here: Path, answer: Any) -> None:
    busy(hub, 3, answer)
    ran = qconvert(*PUSH)
    assert ran.code == 0, ran.err
    assert pushed(hub) == files_of(here / "out")


def test_a_hub_that_stays_busy_ends_patience(hub: FakeHub, here: Path) -> None:
    busy(hub, 10**9, answering(429, "slow", {"Retry-After": "1"}))
    ran = qconvert(*PUSH, "--patience", 1)
    failed_at = "org/new: the Hub limits how often it may be asked (HTTP 429: slow)"
    assert ran.code == 1 and f"Error: {failed_at}" in ran.err, ran.err
    assert "to continue" in ran.err and (here / "out.partial").exists()


def test_a_commit_whose_answer_was_lost_is_known_again(hub: FakeHub, here: Path) -> None:
    def lost(number: int) -> None:
        if hub.log[number].path.endswith("commit/main") and hub.log[number].status == 200:
            hub.answering = lambda number: None
            raise ConnectionResetError

    hub.answering = lost
    ran = qconvert(*PUSH)
    assert ran.code == 0, ran.err
    assert len([ref for _, ref, _ in hub.written.commits if ref == "main"]) == 1


def test_another_model_is_not_replaced_unasked(hub: FakeHub, here: Path, folder: Path) -> None:
    old = {"model.safetensors": b"x" * 100, "config.json": b"{}", "notes.txt": b"mine"}
    hub.repos["org/new"] = dict(old)
    fact = "org/new: holds model.safetensors already"
    ran = qconvert(*PUSH)
    assert ran.code == 1 and f"Error: {fact}\nHint: use --overwrite" in ran.err, ran.err
    assert hub.repos["org/new"] == old and not list(here.glob("out*"))
    assert qconvert(*PUSH, "--overwrite").code == 0
    found = pushed(hub)
    assert found.pop("notes.txt") == b"mine"
    assert found == files_of(here / "out"), "what a loader would have taken for the model is gone"


def test_a_branch_and_a_private_repository(hub: FakeHub, here: Path) -> None:
    ran = qconvert(*PUSH[:-1], "org/new@int4", "--private")
    assert ran.code == 0, ran.err
    assert "org/new" in hub.written.private
    assert not pushed(hub) and pushed(hub, branch="int4") == files_of(here / "out")
    hub.repos["org/open"] = {}
    ran = qconvert(*PUSH[:-3], "b", "--push-to", "org/open", "--private")
    assert "org/open: is public, and --private was asked for" in ran.err
    assert not pushed(hub, "org/open")


def test_gguf_parts_and_their_card(hub: FakeHub, here: Path) -> None:
    command = ("to-gguf", "m", "--type", "q8_0", "--split-max-size", "300KB", "-o", "m-q8_0.gguf")
    ran = qconvert(*command, "--push-to", "org/new", "--drop-pushed")
    assert ran.code == 0, ran.err
    remote = pushed(hub)
    assert remote.pop("README.md").startswith(b"---\n")
    assert not list(here.glob("*.gguf*"))
    assert qconvert(*command).code == 0
    assert remote == {path.name: path.read_bytes() for path in here.glob("*.gguf")}
    hub.repos["org/new"]["README.md"] = b"my own words"
    ran = qconvert("to-gguf", "m", "--type", "q4_0", "-o", "m-q4_0.gguf", "--push-to", "org/new")
    assert ran.code == 0, ran.err
    assert {"m-q4_0.gguf", "m-q8_0-00001-of-00002.gguf"} <= pushed(hub).keys()
    assert pushed(hub)["README.md"] == b"my own words"


def test_through_xet_where_it_is_installed(hub: FakeHub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Hub's own client of xet, whose storage is a folder; it is read back from there."""
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.chunks = here / "chunks"
    local = files_of(made(*QUANTIZE, "-o", "alone"))
    # The hub knows by the chunks what a commit speaks of; the fake one is told.
    hub.written.objects = {sha256(blob): blob for blob in local.values()}
    ran = qconvert(*PUSH)
    assert ran.code == 0, ran.err
    assert not uploads(hub)
    assert sorted(hub.repos["org/new"].keys() - {".gitattributes"}) == sorted(files_of(here / "out"))
    weights = sum(len(b) for n, b in files_of(here / "out").items() if n.endswith(".safetensors"))
    assert sum(path.stat().st_size for path in hub.chunks.rglob("*") if path.is_file()) > 0.5 * weights


def test_what_sends_is_within_the_memory_that_was_asked_for(
    hub: FakeHub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than 1 GB by plain HTTP, though xet is there; what does not fit is refused with a number."""
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    assert [sending_bytes(memory) for memory in (None, 10**9, 10**9 - 1)] == [4e8, 4e8, 24e6]
    ran = qconvert(*PUSH, "--max-memory", "900MB")
    assert ran.code == 0 and "Xet" not in ran.err, ran.err
    assert len(uploads(hub)) == len([name for name in pushed(hub) if name.endswith(".safetensors")])
    assert pushed(hub) == files_of(here / "out")
    call = [sys.executable, "-m", "qconvert", *map(str, QUANTIZE), "-o", "b", "--max-memory", "70MB"]
    least = [
        subprocess.run([*call, *to], check=False, capture_output=True, text=True).stderr
        for to in ((), ("--push-to", "org/b"))
    ]
    alone, sent = (int(re.findall(r"needs at least ([\d,]+) MB", err)[0].replace(",", "")) for err in least)
    assert "this conversion, with what sends it, needs" in least[1] and 10 <= sent - alone <= 40


def test_options_that_do_not_go_together(hub: FakeHub, here: Path) -> None:
    def refused(fact: str, *more: object) -> None:
        ran: Ran = qconvert(*QUANTIZE, *more)
        assert ran.code == 2 and ran.err.startswith(f"Error: {fact}"), ran.err

    refused("--drop-pushed: nothing is pushed", "--drop-pushed")
    refused("--private: nothing is pushed", "--private")
    refused("--no-verify: given together with --push-to", "--push-to", "org/new", "--no-verify")
    refused("--push-to a b: not a repository on the Hub", "--push-to", "a b")
    assert not hub.log
