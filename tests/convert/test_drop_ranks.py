"""Several processes push one model and keep nothing: at most two shards of each on the disk, one commit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from qconvert.convert.ranks_elsewhere import _Elsewhere
from tests.convert.test_push_ranks import (  # noqa: F401
    BOTH,
    again,
    at_request,
    hub,
    push,
    root,
    visible,
    weights,
    whole,
)
from tests.support.commands import qconvert
from tests.support.crashes import (
    KILLED,
    MOMENTS,
    asked,
    calls_of,
    ended,
    forked,
    killed,
    running,
    started,
    tree,
)
from tests.support.fake_hub import FakeHub
from tests.support.pushing import pushed, uploads
from tests.support.rank_jobs import one_at_a_time

AtRequest = Callable[[Callable[[], object], int, int], int]


def drop(kind: str, number: int, world: int) -> tuple[object, ...]:
    return *push(kind, number, world), "--drop-pushed"


def held(kind: str) -> int:
    """The most weight files of one process that are on the disk."""
    folders = [path for path in Path("made").glob("*.partial-ranks/*") if path.is_dir()]
    return max((len({*map(os.path.basename, path.glob("*"))} & weights(kind)) for path in folders), default=0)


def published(hub: FakeHub, kind: str) -> bool:  # noqa: F811
    """Whether the model is there as one process makes it, by one commit, and nothing else is anywhere."""
    remote = pushed(hub)
    expected = {"README.md": remote.get("README.md", b"")} | whole(kind)
    commits = [ref for _, ref, _ in hub.written.commits if ref == "main"]
    return remote == expected and len(commits) == 1 and not hub.written.branches and not tree(Path("made"))


def requests(hub: FakeHub, kind: str) -> int:  # noqa: F811
    """How many requests it takes to push alone."""
    assert forked(running(*drop(kind, 0, 2))) == 0
    return len(hub.log)


@pytest.mark.parametrize("kind", BOTH)
def test_each_process_has_at_most_two_files_on_the_disk(hub: FakeHub, kind: str) -> None:  # noqa: F811
    seen: set[int] = set()
    here: list[int] = []

    def look(number: int) -> None:
        seen.add(len(visible(hub)))
        with suppress(FileNotFoundError):  # a folder that is removed at this moment
            here.append(held(kind))

    hub.answering = look
    children = [started(running(*drop(kind, number, 2))) for number in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    assert published(hub, kind)
    assert seen == {0, len(weights(kind))}, "none, and then all"
    assert len(weights(kind)) > 5 and 1 <= max(here) <= 2
    assert len(uploads(hub)) == len(set(uploads(hub))) == len(weights(kind))


@pytest.mark.parametrize("kind", BOTH)
def test_duplicates_and_an_absent_process_do_no_harm(hub: FakeHub, kind: str) -> None:  # noqa: F811
    """Rank 1 of 3 never starts; rank 0 runs twice."""
    children = [started(running(*drop(kind, number, 3))) for number in (0, 0, 2)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert published(hub, kind)


@pytest.mark.parametrize("kind", BOTH)
def test_a_process_killed_at_any_request_is_followed_by_another(
    hub: FakeHub,  # noqa: F811
    kind: str,
    at_request: AtRequest,  # noqa: F811
) -> None:
    every = range(1, requests(hub, kind) + 1)
    for request in asked(every, [*every[3::13], every[-2], every[-1]]):
        again(hub)
        code = ended(at_request(running(*drop(kind, 0, 2)), request, signal.SIGKILL))
        assert code in (0, -signal.SIGKILL) and visible(hub) in (set(), weights(kind)), request
        hub.answering = lambda number: None
        assert forked(running(*drop(kind, 1, 2))) == 0, request
        assert published(hub, kind), request
        assert len(uploads(hub)) <= len(weights(kind)) + 1, "at most the file that was under way goes twice"


@pytest.mark.parametrize("kind", BOTH)
def test_a_process_killed_at_any_call_is_followed_by_another(hub: FakeHub, kind: str) -> None:  # noqa: F811
    every = range(calls_of(running(*drop(kind, 0, 2))))
    for call in asked(every, [*every[5 :: len(every) // 6], *every[-4:]]):
        again(hub)
        code = killed(running(*drop(kind, 0, 2)), call, MOMENTS[call % len(MOMENTS)])
        assert code in (0, KILLED) and visible(hub) in (set(), weights(kind)), call
        assert forked(running(*drop(kind, 1, 2))) == 0, call
        assert published(hub, kind), call


@pytest.mark.parametrize("kind", BOTH)
def test_a_stopped_process_is_overtaken_and_wakes_without_harm(
    hub: FakeHub,  # noqa: F811
    kind: str,
    at_request: AtRequest,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_at_a_time(monkeypatch)
    every, overtaken = range(1, requests(hub, kind) + 1), 0
    for request in asked(every, [*every[4::10], *every[-3:]]):
        again(hub)
        child = at_request(running(*drop(kind, 0, 2)), request, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        hub.answering = lambda number: None
        if os.WIFSTOPPED(status):
            assert forked(running(*drop(kind, 1, 2))) == 0, request
            os.kill(child, signal.SIGCONT)
            assert ended(child) == 0, request
            overtaken += 1
        assert published(hub, kind), request
    assert overtaken > 2


def test_a_process_is_done_when_another_finishes_as_it_looks_at_receipts(
    hub: FakeHub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder is removed between the question whether all is sent and the look at what is."""
    real = _Elsewhere.require_sent

    def late(self: _Elsewhere) -> None:
        monkeypatch.setattr(_Elsewhere, "require_sent", real)
        assert forked(running(*drop("shards", 0, 2))) == 0
        real(self)

    monkeypatch.setattr(_Elsewhere, "require_sent", late)
    ran = qconvert(*drop("shards", 1, 2))
    assert _Elsewhere.require_sent is real
    assert ran.code == 0 and published(hub, "shards"), ran.err


@pytest.mark.parametrize("words", [push, drop], ids=["kept", "dropped"])
def test_a_file_that_others_have_removed_is_not_waited_for(
    hub: FakeHub,  # noqa: F811
    words: Callable[[str, int, int], tuple[object, ...]],
) -> None:
    """Stopped as it looks at the branch that it has made for its first file, which is gone when it wakes."""
    child, seen = [0], list[int]()

    def stops(number: int) -> None:
        if child and hub.written.branches:
            seen.append(number)
            if len(seen) == 2:  # the branch was made, and is looked at
                while not child[0]:
                    time.sleep(0.01)
                os.kill(child.pop(), signal.SIGSTOP)

    hub.answering = stops
    child[0] = pid = started(running(*words("shards", 0, 2), "--patience", 60))
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    assert forked(running(*words("shards", 1, 2))) == 0
    os.kill(pid, signal.SIGCONT)
    began = time.monotonic()
    assert ended(pid) == 0 and time.monotonic() - began < 30
    remote = pushed(hub)
    assert {name for name in remote if name.endswith(".safetensors")} == weights("shards")
    assert not hub.written.branches


def test_one_process_tells_and_what_is_there_is_left(hub: FakeHub) -> None:  # noqa: F811
    words = [word for word in drop("shards", 0, 2) if word != "-q"]
    first = qconvert(*words)
    assert first.code == 0 and f"now at {hub.url}/org/new" in first.err, first.err
    done = len(uploads(hub))
    second = [word if word != "0/2" else "1/2" for word in words]
    for more in ((), ("--skip-existing",), ("--overwrite",)):
        ran = qconvert(*words, *more)
        assert (ran.code, ran.err.splitlines()[-1]) == (0, "org/new: complete"), ran.err
        late = qconvert(*second, *more)
        assert (late.code, late.out, late.err) == (0, "", "")
    assert published(hub, "shards") and len(uploads(hub)) == done


def test_what_was_sent_and_is_lost_is_told(hub: FakeHub) -> None:  # noqa: F811
    calls = calls_of(running(*drop("shards", 0, 2)))
    again(hub)
    assert killed(running(*drop("shards", 0, 2)), calls // 2, "after") == KILLED
    assert 0 < len(uploads(hub)) < len(weights("shards"))
    hub.written.forget()
    ran = qconvert(*drop("shards", 1, 2))
    assert ran.code == 1 and "was sent there, and is gone" in ran.err, ran.err
    assert "Hint: remove made/out.partial-ranks, and run the same command again" in ran.err
    shutil.rmtree("made/out.partial-ranks")
    assert qconvert(*drop("shards", 1, 2)).code == 0 and published(hub, "shards")


def test_a_process_that_is_alone_goes_on_with_what_several_have_sent(hub: FakeHub) -> None:  # noqa: F811
    calls = calls_of(running(*drop("shards", 0, 2)))
    again(hub)
    assert killed(running(*drop("shards", 0, 2)), calls // 2, "after") == KILLED
    sent = len(uploads(hub))
    assert 0 < sent < len(weights("shards")) and qconvert(*drop("shards", 0, 1)).code == 0
    assert published(hub, "shards") and len(uploads(hub)) <= len(weights("shards")) + 1


def test_processes_of_torchrun_push_and_keep_nothing(hub: FakeHub) -> None:  # noqa: F811
    words = drop("shards", 0, 2)
    place = words.index("--rank")
    command = ("-m", "qconvert", *words[:place], *words[place + 2 :])
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    told = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    ran = subprocess.run(
        [sys.executable, *map(str, (*launch, *command))],
        env={**os.environ, **told, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert published(hub, "shards") and ran.stdout.count(f"{hub.url}/org/new") == 1
