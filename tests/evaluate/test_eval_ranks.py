"""Several processes evaluate as one does: the same report, whoever is interrupted, absent or late."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from qconvert.evaluate import lockstep, perplexity, ranks
from qconvert.formats.io import shared_folder
from tests.support.commands import made, qconvert

WORDS = ("eval", "perplexity", "q", "--reference", "embedded", "--text", "text.txt", "--context", 32, "-j", 1)
# 32 windows of 32 tokens visit a layer together: three batches, the last one short.
TOGETHER = 32 * 32
KINDS: dict[str, tuple[object, ...]] = {
    "in memory": (*WORDS, "--chunks", 66, "--noise-floor"),
    "in turn": (*WORDS, "--chunks", 66, "--max-memory", "6GB"),
}
# What no two runs have in common.
OWN = ("date", "command", "tokens_per_second", "expected_bytes", "peak_bytes")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    made("quantize", "embedded", "--bits", 4, "-o", root / "q")
    (root / "text.txt").write_text(
        "".join(f"Line {i} says what {i * i % 97} of them do.\n" for i in range(400))
    )
    return root


@pytest.fixture(autouse=True)
def there(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(root)
    monkeypatch.setattr(shared_folder, "WAIT_SECONDS", (0.02, 0.1))
    monkeypatch.setitem(lockstep.BATCH_TOKENS, "cpu", TOGETHER)
    yield
    for path in root.glob("report*"):
        path.unlink()


def figures(found: Any) -> Any:
    """A report without what no two runs have in common."""
    if isinstance(found, dict):
        return {key: figures(value) for key, value in found.items() if key not in OWN}
    return [figures(each) for each in found] if isinstance(found, list) else found


def measured(kind: str, *words: object) -> Any:
    ran = qconvert(*KINDS[kind], *words)
    assert ran.code == 0, ran.err
    return ran


def report(stem: str) -> Any:
    return figures(json.loads(Path(f"{stem}.json").read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_interrupted_process_has_scored_is_not_scored_again(kind: str) -> None:
    measured(kind, "-o", "report-one")
    scored: list[int] = []
    run = perplexity.run_lockstep

    def counting(tracks: Any, *args: Any, **how: Any) -> int:
        if len(scored) == 1:
            scored.append(-1)
            raise KeyboardInterrupt
        done = run(tracks, *args, **how)
        scored.append(done)
        return done

    with patch.object(perplexity, "run_lockstep", counting):
        assert qconvert(*KINDS[kind], "-o", "report", "--rank", "0/2").code == 130
        assert len(list(Path("report.partial-ranks").glob("*.receipt"))) == 1
        last = measured(kind, "-o", "report", "--rank", "1/2")
    assert len(scored) == len(set(scored)) > 2
    assert "Distance from embedded" in last.out
    assert report("report") == report("report-one")
    assert not Path("report.partial-ranks").exists()
    late = measured(kind, "-o", "report", "--rank", "1/2")
    assert (late.out, late.err) == ("", "")
    first = measured(kind, "-o", "report", "--rank", "0/2")
    assert "Distance from embedded" in first.out and "already complete" in first.err


def test_two_at_once_score_every_window_once() -> None:
    """Each of two threads is a process: they claim, and wait, as processes do."""
    tasks = {f"task-{number}" for number in range(20)}
    done: list[str] = []

    def work(number: int) -> None:
        folder = shared_folder.SharedFolder(Path("report.partial-ranks"), {"a": 1}, {})
        order = ranks.order(dict.fromkeys(sorted(tasks), 1), ranks.Rank(number, 2))
        folder.work(order, lambda task: done.append(task) or [], lambda task, own: None, lambda: False)
        assert folder.receipts.keys() == tasks

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == sorted(tasks)
    shared_folder.SharedFolder(Path("report.partial-ranks"), {"a": 1}, {}).remove()
    assert not Path("report.partial-ranks").exists()


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ((), "--rank: the processes meet beside the report, which has no name"),
        (("-o", "report", "--samples"), "--samples: works in one process only"),
        (("-o", "report", "--save-reference", "r"), "--save-reference: works in one process only"),
    ],
)
def test_what_one_of_several_cannot_do_is_refused(words: tuple[object, ...], fact: str) -> None:
    ran = qconvert(*WORDS, "--rank", "0/2", *words)
    assert ran.code == 2 and fact in ran.err


def test_a_report_of_another_command_is_not_taken_for_this_one() -> None:
    made_by = (*WORDS, "--chunks", 10)
    assert qconvert(*made_by, "-o", "report").code == 0
    ran = qconvert(*WORDS, "--chunks", 20, "-o", "report", "--rank", "0/2")
    assert ran.code == 1 and "chunks was 10, now it is 20" in ran.err and "remove report.json" in ran.err
    ran = qconvert(*made_by, "-o", "report", "--rank", "1/2")
    assert (ran.code, ran.out) == (0, "")
