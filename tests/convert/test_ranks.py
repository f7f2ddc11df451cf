"""Several processes make what one makes, whoever is killed, stopped, started twice or absent."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.ranks import Rank, order, owners
from qconvert.formats.io import journal, shared_folder
from tests.convert.test_events import told
from tests.support.commands import made, qconvert
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
    stopping,
    tree,
)  # fmt: skip
from tests.support.rank_jobs import KINDS, impatient, one_at_a_time, rank, same, with_whole, within


def tune(model: Path, tuned: Path) -> None:
    """Make a model that differs in its numbers alone, as a fine-tune does."""
    shutil.copytree(model, tuned)
    raw = (model / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    numbers = np.frombuffer(raw, "<u2", offset=begin) ^ 1
    (tuned / "model.safetensors").write_bytes(raw[:begin] + numbers.tobytes())


def of_another(words: tuple[object, ...]) -> tuple[object, ...]:
    """The command on that model."""
    return tuple("n/m" if word == "m" else word for word in words)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, what one process makes of it, and what it made of another model before."""
    root = with_whole(tmp_path_factory.mktemp("ranks"), KINDS)
    tune(root / "m", root / "n" / "m")
    with within(root):
        for kind, (command, name) in KINDS.items():
            (root / "earlier" / kind).mkdir(parents=True)
            made(*of_another(command), "-o", root / "earlier" / kind / name)
    return root


@pytest.fixture(autouse=True)
def there(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the model, in which nobody waits for long."""
    yield from impatient(root, monkeypatch)


def over(kind: str, number: int, world: int) -> tuple[object, ...]:
    """The same, in place of an earlier output."""
    return *rank(kind, number, world), "--overwrite"


def earlier(kind: str) -> None:
    """Have only an output of another model under the name."""
    shutil.rmtree("made", ignore_errors=True)
    shutil.copytree(Path("earlier") / kind, "made")


# Who does what


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 10**12), max_size=30), st.integers(1, 20))
def test_every_task_has_one_owner_and_no_owner_too_much(costs: dict[str, int], world: int) -> None:
    found = owners(costs, world)
    held = [sum(costs[name] for name in found if found[name] == number) for number in range(world)]
    assert found.keys() == costs.keys()
    assert max(held) <= sum(costs.values()) / world + max(costs.values(), default=0)
    taken = [order(costs, Rank(number, world)) for number in range(world)]
    assert all(sorted(each) == sorted(costs) for each in taken)
    first = [each[: list(found.values()).count(number)] for number, each in enumerate(taken)]
    assert sorted(name for own in first for name in own) == sorted(costs)


# The same output


@pytest.mark.parametrize("kind", KINDS)
def test_three_processes_make_what_one_makes(kind: str) -> None:
    children = [started(running(*rank(kind, number, 3))) for number in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert same(kind)


def test_duplicates_and_an_absent_process_do_no_harm() -> None:
    """Rank 1 of 3 never starts; rank 0 runs twice."""
    children = [started(running(*rank("shards", number, 3))) for number in (0, 0, 2)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert same("shards")


def moments(calls: int, number: int) -> list[int]:
    """Calls to end at: some of all, and of those that name things at the end."""
    chosen = random.Random(20261122)
    some = chosen.sample(range(calls), number) + chosen.sample(range(calls - 60, calls), number)
    return list(asked(range(calls), some))


@pytest.mark.parametrize("kind", ["shards", "parts"])
def test_what_a_killed_process_leaves_is_finished_by_another(kind: str) -> None:
    """Killed at any call, while it writes or finishes; what it has finished is not done again."""
    calls = calls_of(running(*rank(kind, 0, 2)))
    for number, call in enumerate(moments(calls, 6)):
        shutil.rmtree("made")
        code = killed(running(*rank(kind, 0, 2)), call, MOMENTS[number % len(MOMENTS)])
        assert code in (0, KILLED)
        assert code == 0 or forked(running(*rank(kind, 1, 2))) == 0, call
        if not same(kind):  # killed between its name and the removal of what lay beside
            assert tree(Path("made")).items() >= tree(Path("whole") / kind).items()
            assert forked(running(*rank(kind, 0, 2))) == 0
        assert same(kind), call


@pytest.mark.parametrize("kind", ["shards", "parts"])
def test_a_stopped_process_is_overtaken_and_wakes_without_harm(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was at when it was stopped, another finishes; then it ends as if it had been done."""
    one_at_a_time(monkeypatch)
    calls = calls_of(running(*rank(kind, 0, 2)))
    overtaken = 0
    for call in moments(calls, 4):
        shutil.rmtree("made")
        child = started(stopping(running(*rank(kind, 0, 2)), call))
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            assert forked(running(*rank(kind, 1, 2))) == 0, call
            os.kill(child, signal.SIGCONT)
            assert ended(child) == 0, call
            overtaken += 1
        assert same(kind), call
    assert overtaken > 4


# In place of an earlier output


@pytest.mark.parametrize("kind", ["shards", "one file", "gguf", "parts"])
def test_an_earlier_output_is_replaced_once(kind: str) -> None:
    earlier(kind)
    children = [started(running(*over(kind, number, 3))) for number in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert same(kind)
    before = {path: path.stat().st_ino for path in Path("made").rglob("*")}
    assert forked(running(*over(kind, 1, 3))) == 0
    assert {path: path.stat().st_ino for path in Path("made").rglob("*")} == before, "it came too late"
    assert forked(running(*of_another(over(kind, 0, 3)))) == 0
    assert tree(Path("made")) == tree(Path("earlier") / kind), "another job replaces it"


@pytest.mark.parametrize("kind", ["shards", "parts"])
def test_a_kill_while_an_output_is_replaced_leaves_one_of_the_two(kind: str) -> None:
    earlier(kind)
    calls = calls_of(running(*over(kind, 0, 2)))
    for number, call in enumerate(moments(calls, 6)):
        earlier(kind)
        code = killed(running(*over(kind, 0, 2)), call, MOMENTS[number % len(MOMENTS)])
        assert code in (0, KILLED)
        assert code == 0 or forked(running(*over(kind, 1, 2))) == 0, call
        if not same(kind):  # killed between its name and the removal of what lay beside
            assert tree(Path("made")).items() >= tree(Path("whole") / kind).items(), call
            assert forked(running(*over(kind, 0, 2))) == 0
        assert same(kind), call


@pytest.mark.parametrize("kind", ["shards", "parts"])
def test_a_process_that_was_stopped_while_it_replaced_an_output_wakes_without_harm(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_at_a_time(monkeypatch)
    earlier(kind)
    calls = calls_of(running(*over(kind, 0, 2)))
    for call in moments(calls, 4):
        earlier(kind)
        child = started(stopping(running(*over(kind, 0, 2)), call))
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            assert forked(running(*over(kind, 1, 2))) == 0, call
            assert same(kind), call
            os.kill(child, signal.SIGCONT)
            assert ended(child) == 0, call
        assert same(kind), call


def test_what_is_not_ours_is_not_replaced() -> None:
    Path("made/out").mkdir(parents=True)
    Path("made/out/theirs").write_text("x")
    ran = qconvert(*over("shards", 0, 2))
    assert ran.code == 1 and "not written by qconvert" in ran.err
    assert tree(Path("made")) == {"out/theirs": b"x"}
    ran = qconvert(*over("shards", 0, 2), "-o", "m")
    assert ran.code == 1 and "is or holds the source" in ran.err, ran.err


def test_each_process_has_events_of_its_own() -> None:
    children = [started(running(*rank("shards", n, 3), "--events", "made/e")) for n in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    lines = [told(Path(f"made/e.{number}")) for number in range(3)]
    assert [own[0]["rank"] for own in lines] == [[0, 3], [1, 3], [2, 3]]
    assert all((own[0]["event"], own[-1]["event"], own[-1]["ok"]) == ("start", "end", True) for own in lines)
    files = [line["path"] for own in lines for line in own if line["event"] == "file"]
    assert sorted(files) == sorted(f"made/out/{p.name}" for p in Path("whole/shards/out").glob("model*"))


@pytest.mark.parametrize("reading", range(2))
def test_a_process_is_done_when_another_finishes_as_it_reads_whose_job_it_is(
    reading: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed between the look for its file and the opening of that."""
    calls = calls_of(running(*rank("shards", 0, 2)))
    shutil.rmtree("made")
    assert killed(running(*rank("shards", 0, 2)), calls // 2, "before") == KILLED
    left, real = iter(range(reading, -1, -1)), journal.read_bounded

    def late(path: Path, most: int) -> bytes:
        if path.name == "job" and next(left, -1) == 0:
            monkeypatch.setattr(journal, "read_bounded", real)
            assert forked(running(*rank("shards", 0, 2))) == 0
            assert not path.exists()
        return real(path, most)

    monkeypatch.setattr(journal, "read_bounded", late)
    ran = qconvert(*rank("shards", 1, 2))
    assert next(left, None) is None  # there were so many readings
    assert ran.code == 0 and same("shards"), ran.err


def test_a_process_that_waits_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stopped process has claimed is left to it for a while; what is done by then stays."""
    monkeypatch.setattr(shared_folder, "STALE_SECONDS", 600.0)
    work, name_new = running(*rank("shards", 0, 2)), shared_folder.name_new

    def stopped_with_a_claim(path: Path, name: Path) -> None:
        if name.suffix == ".receipt":  # it has made the file that it claimed, and nobody knows
            os.kill(os.getpid(), signal.SIGSTOP)
        name_new(path, name)

    with monkeypatch.context() as patched:
        patched.setattr(shared_folder, "name_new", stopped_with_a_claim)
        holds = started(work)
    assert os.WIFSTOPPED(os.waitpid(holds, os.WUNTRACED)[1])
    waits, folder = started(running(*rank("shards", 1, 2))), Path("made/out.partial-ranks")
    files = len(list(Path("whole/shards/out").glob("model*")))
    while len(list(folder.glob("*.receipt"))) < files - 1:
        assert os.waitpid(waits, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    time.sleep(0.2)
    assert os.waitpid(waits, os.WNOHANG) == (0, 0)  # it waits for the last
    os.kill(waits, signal.SIGTERM)
    assert ended(waits) == 128 + signal.SIGTERM
    os.kill(holds, signal.SIGCONT)
    assert ended(holds) == 0 and same("shards")


def test_a_signal_right_after_a_receipt_got_its_name_leaves_what_it_speaks_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = shared_folder.sync

    def interrupted(path: Path) -> None:
        real(path)
        if list(path.glob("*.receipt")) and path.name == "out.partial-ranks":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shared_folder, "sync", interrupted)
        ran = qconvert(*rank("shards", 0, 2))
    assert ran.code == 130 and "run the same command to continue" in ran.err
    assert len(list(Path("made/out.partial-ranks").glob("*.receipt"))) == 1
    assert forked(running(*rank("shards", 1, 2))) == 0 and same("shards")


def test_finished_files_are_not_made_again(root: Path) -> None:
    """What a killed process has receipts for keeps its inode until it has its name."""
    calls = calls_of(running(*rank("shards", 0, 2)))
    shutil.rmtree("made")
    assert killed(running(*rank("shards", 0, 2)), calls // 2, "before") == KILLED
    folder = Path("made/out.partial-ranks")
    done = {p.name.removesuffix(".receipt") for p in folder.glob("*.receipt")}
    inodes = {p.name: p.stat().st_ino for p in folder.glob("*/model*") if p.name in done}
    assert len(done) > 2 and inodes.keys() == done
    assert forked(running(*rank("shards", 1, 2))) == 0 and same("shards")
    assert {name: (Path("made/out") / name).stat().st_ino for name in done} == inodes


# What is said


def test_one_process_tells_and_the_others_are_quiet() -> None:
    words = [word for word in rank("shards", 0, 2) if word != "-q"]
    first = qconvert(*words)
    assert (first.code, "int4-g32" in first.out, "verified" in first.err) == (0, True, True)
    assert first.err.startswith("process 0 of 2, ")
    late = qconvert(*[word if word != "0/2" else "1/2" for word in words])
    assert (late.code, late.out, late.err) == (0, "", "")
    again = qconvert(*words)
    assert (again.code, again.out, again.err.splitlines()[-1]) == (0, "", "made/out: complete")


def test_a_process_alone_goes_on_with_what_several_began() -> None:
    calls = calls_of(running(*rank("shards", 0, 2)))
    shutil.rmtree("made")
    assert killed(running(*rank("shards", 0, 2)), calls // 2, "before") == KILLED
    command, name = KINDS["shards"]
    made(*command, "-o", f"made/{name}")
    assert same("shards")


def test_another_job_is_refused() -> None:
    assert killed(running(*rank("shards", 0, 2)), 80, "before") == KILLED
    before = tree(Path("made"))
    words = [8 if word == 4 else word for word in rank("shards", 1, 2)]
    ran = qconvert(*words)
    assert ran.code == 1 and tree(Path("made")) == before
    assert "whose request recipe scheme was int4-g32, and is int8-g32 now" in ran.err


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("-o", "s3://bucket/out"), "an object storage: works in one process only"),
        (("--restart",), "--restart: works in one process only, and this is one of 2"),
        (("--rank", "2/2"), "Invalid value for '--rank': '2/2' is not a rank"),
        (("--rank", "auto"), "auto: the environment has none of RANK and WORLD_SIZE"),
        (("--method", "feedback", "--text", "m/config.json"), "--method feedback: chooses codes layer after"),
    ],
)
def test_what_cannot_be_divided_is_refused(words: tuple[str, ...], fact: str) -> None:
    ran = qconvert(*rank("shards", 0, 2), *words)
    assert ran.code in (1, 2) and fact in ran.err, ran.err
    assert tree(Path("made")) == {}


def test_a_taken_name_is_refused() -> None:
    Path("made/out").mkdir(parents=True)
    Path("made/out/theirs").write_text("x")
    ran = qconvert(*rank("shards", 0, 2))
    assert ran.code == 1 and "already exists" in ran.err
    assert tree(Path("made")) == {"out/theirs": b"x"}


def test_several_models_as_json_are_refused() -> None:
    ran = qconvert("quantize", "m", "m", "--bits", 4, "--rank", "0/2", "--json")
    assert ran.code == 2 and "convert them one by one" in ran.out
