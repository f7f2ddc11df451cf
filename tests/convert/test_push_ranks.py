"""Several processes push one model: whole or not at all, each file once, whoever is killed or stopped."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import files_of, made, qconvert
from tests.support.crashes import KILLED, MOMENTS, asked, calls_of, ended, forked, killed, running, started
from tests.support.fake_hub import FakeHub
from tests.support.pushing import answering, pushed, uploads, writable_hub
from tests.support.rank_jobs import impatient, one_at_a_time, rank, same, with_whole

BOTH = ("shards", "parts")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_whole(tmp_path_factory.mktemp("push-ranks"), BOTH)


@pytest.fixture
def hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that can be written, in the folder of the model; no process waits for long."""
    patient = impatient(root, monkeypatch)
    next(patient)
    with writable_hub(root / "cache", monkeypatch) as fake:
        yield fake
    next(patient, None)


def push(kind: str, number: int, world: int) -> tuple[object, ...]:
    return *rank(kind, number, world), "--push-to", "org/new"


def again(hub: FakeHub) -> None:
    """Forget all that was made and sent."""
    shutil.rmtree("made", ignore_errors=True)
    hub.answering = lambda number: None
    hub.log.clear()
    hub.repos.clear()
    hub.written.forget()


def whole(kind: str) -> dict[str, bytes]:
    """What one process makes: the files of a folder, or the parts of a GGUF."""
    folder = Path("whole") / kind
    return files_of(folder / "out" if (folder / "out").is_dir() else folder)


def weights(kind: str) -> set[str]:
    return {name for name in whole(kind) if name.endswith((".safetensors", ".gguf"))}


def visible(hub: FakeHub) -> set[str]:
    return {name for name in hub.repos.get("org/new", {}) if name.endswith((".safetensors", ".gguf"))}


def published(hub: FakeHub, kind: str) -> bool:
    """Whether the model is here and there as one process makes it, by one commit, and nothing else."""
    remote = pushed(hub)
    local = {"README.md": remote.get("README.md", b"")} | whole(kind)  # no card is beside a GGUF here
    commits = [ref for _, ref, _ in hub.written.commits if ref == "main"]
    return same(kind) and remote == local and len(commits) == 1 and not hub.written.branches


@pytest.mark.parametrize("kind", BOTH)
def test_processes_that_begin_at_once_send_each_file_once(hub: FakeHub, kind: str) -> None:
    seen: set[int] = set()
    hub.answering = lambda number: seen.add(len(visible(hub)))
    children = [started(running(*push(kind, number, 3))) for number in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert published(hub, kind)
    assert seen == {0, len(weights(kind))}, "none, and then all"
    assert len(uploads(hub)) == len(set(uploads(hub))) == len(weights(kind))


@pytest.mark.parametrize("kind", BOTH)
def test_duplicates_and_an_absent_process_do_no_harm(hub: FakeHub, kind: str) -> None:
    """Rank 1 of 3 never starts; rank 0 runs twice."""
    children = [started(running(*push(kind, number, 3))) for number in (0, 0, 2)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert published(hub, kind)


@pytest.fixture
def at_request(hub: FakeHub) -> Callable[[Callable[[], object], int, int], int]:
    """Begins work in a fork, and sends it a signal when a request of this number is answered."""

    def begun(work: Callable[[], object], request: int, signum: int) -> int:
        state = {"left": request, "pid": 0}

        def answered(number: int) -> None:
            state["left"] -= 1
            if state["left"] == 0:
                os.kill(state["pid"], signum)

        hub.answering = answered
        state["pid"] = started(work)
        return state["pid"]

    return begun


def requests(hub: FakeHub, kind: str) -> int:
    """How many requests it takes to push alone."""
    assert forked(running(*push(kind, 0, 2))) == 0
    return len(hub.log)


@pytest.mark.parametrize("kind", BOTH)
def test_a_process_killed_at_any_request_is_followed_by_another(
    hub: FakeHub, kind: str, at_request: Callable[[Callable[[], object], int, int], int]
) -> None:
    every = range(1, requests(hub, kind) + 1)
    for request in asked(every, [*every[3::13], every[-2], every[-1]]):
        again(hub)
        code = ended(at_request(running(*push(kind, 0, 2)), request, signal.SIGKILL))
        assert code in (0, -signal.SIGKILL) and visible(hub) in (set(), weights(kind)), request
        hub.answering = lambda number: None
        assert forked(running(*push(kind, 1, 2))) == 0, request
        assert published(hub, kind), request
        assert len(uploads(hub)) <= len(weights(kind)) + 1, "at most the file that was under way goes twice"


@pytest.mark.parametrize("kind", BOTH)
def test_a_process_killed_at_any_call_is_followed_by_another(hub: FakeHub, kind: str) -> None:
    every = range(calls_of(running(*push(kind, 0, 2))))
    for call in asked(every, every[5 :: len(every) // 6]):
        again(hub)
        code = killed(running(*push(kind, 0, 2)), call, MOMENTS[call % len(MOMENTS)])
        assert code in (0, KILLED) and visible(hub) in (set(), weights(kind)), call
        assert forked(running(*push(kind, 1, 2))) == 0, call
        if not same(kind):  # killed between the name and the removal of what lay beside
            assert forked(running(*push(kind, 0, 2))) == 0, call
        assert published(hub, kind), call


@pytest.mark.parametrize("kind", BOTH)
def test_a_stopped_process_is_overtaken_and_wakes_without_harm(
    hub: FakeHub,
    kind: str,
    at_request: Callable[[Callable[[], object], int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_at_a_time(monkeypatch)
    every, overtaken = range(1, requests(hub, kind) + 1), 0
    for request in asked(every, [*every[4::10], every[-3]]):
        again(hub)
        child = at_request(running(*push(kind, 0, 2)), request, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        hub.answering = lambda number: None
        if os.WIFSTOPPED(status):
            assert forked(running(*push(kind, 1, 2))) == 0, request
            os.kill(child, signal.SIGCONT)
            assert ended(child) == 0, request
            overtaken += 1
        assert published(hub, kind), request
    assert overtaken > 2


@pytest.mark.parametrize("status", [409, 412])
def test_a_file_is_sent_again_where_another_process_was_faster(hub: FakeHub, status: int) -> None:
    left = iter(range(2))

    def wrong(method: str, path: str) -> object:
        staged = "commit/qconvert-" in path and next(left, None) is not None
        return answering(status, "A commit has happened since") if staged else None

    hub.written.wrong = wrong  # type: ignore[assignment,method-assign]
    ran = qconvert(*push("shards", 0, 2))
    assert ran.code == 0 and next(left, None) is None, ran.err
    assert published(hub, "shards")


def test_what_is_whole_is_left_and_what_is_here_alone_is_sent(hub: FakeHub) -> None:
    made(*rank("shards", 0, 2))
    assert not hub.log
    assert qconvert(*push("shards", 1, 2)).code == 0
    assert published(hub, "shards")
    done = len(uploads(hub))
    assert [qconvert(*push("shards", number, 2)).code for number in range(2)] == [0, 0]
    assert published(hub, "shards") and len(uploads(hub)) == done


def test_another_model_is_refused_before_anything_is_made(hub: FakeHub) -> None:
    hub.repos["org/new"] = {"model.safetensors": b"x" * 100}
    ran = qconvert(*push("shards", 0, 2))
    assert ran.code == 1 and "Error: org/new: holds model.safetensors already" in ran.err, ran.err
    assert not list(Path("made").iterdir())
    assert qconvert(*push("shards", 0, 2), "--overwrite").code == 0
    assert published(hub, "shards")


def test_a_process_that_is_alone_goes_on_with_what_several_have_sent(hub: FakeHub) -> None:
    every = calls_of(running(*push("shards", 0, 2)))
    again(hub)
    assert killed(running(*push("shards", 0, 2)), every // 2, "after") == KILLED
    sent = len(uploads(hub))
    words = push("shards", 0, 1)
    assert 0 < sent < len(weights("shards")) and qconvert(*words).code == 0
    assert published(hub, "shards") and len(uploads(hub)) <= len(weights("shards")) + 1
