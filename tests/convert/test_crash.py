"""Killed at any moment: nothing under the final name, no false claim, and the same bytes when it goes on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from qconvert.convert import batches, runner, writing
from qconvert.convert.job import Job
from qconvert.formats.io.planned_files import FilePlan
from tests.support.commands import qconvert
from tests.support.crashes import (
    JOBS,
    KILLED,
    MOMENTS,
    Moment,
    asked,
    calls_of,
    false_claims,
    groups_of,
    journal_of,
    killed,
    names_of,
    running,
    tree,
)
from tests.support.kills import killed_at, really_killed_at
from tests.support.models import tiny

# `make crash` tries every call in every way, and kills what goes on as well.
KILLS = 8
# Small blocks, one after the other, so that calls come in nearly one order.
HOW = ("-j", 1, "--max-memory", "2MB", "-q")


@pytest.fixture(autouse=True)
def small_groups() -> Iterator[None]:
    with groups_of(200_000):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What runs that nobody kills write."""
    found = {}
    for kind, (command, name) in JOBS.items():
        folder = tmp_path_factory.mktemp(kind)
        assert qconvert(*command, *HOW, "-o", folder / name).code == 0
        found[kind] = tree(folder)
    return found


def planned(kind: str, folder: Path) -> tuple[FilePlan, ...]:
    """The files that a command plans to write, under their final names."""
    command, name = JOBS[kind]
    found: list[FilePlan] = []

    def seen(job: Job, out: Path, *rest: object) -> None:
        found.extend(job.container.files(out))
        raise KeyboardInterrupt

    with patch.object(writing, "facts_of", seen):
        qconvert(*command, *HOW, "-o", folder / name)
    return tuple(found)


def moments(names: Sequence[str]) -> list[tuple[int, Moment]]:
    """Which calls to die at, and how: some of all, and each of those that name the output."""
    every = [(call, moment) for call in range(len(names)) for moment in MOMENTS]
    last = max(number for number, name in enumerate(names) if name == "pwrite")
    naming = [(call, MOMENTS[call % len(MOMENTS)]) for call in range(last, len(names))]
    return list(asked(every, random.Random(20261122).sample(every, KILLS) + naming))


def claims(kind: str, folder: Path, files: Sequence[FilePlan]) -> tuple[int, list[str]]:
    """How much a journal says of what a killed run has left, and what of it is false."""
    out = folder / JOBS[kind][1]
    journal = journal_of(out)
    if journal is None:
        return 0, []
    if out.suffix != ".gguf":
        return len(journal.records), false_claims(journal, out.with_name(f"{out.name}.partial"), files)
    links = [folder / file.name for file in files if not (folder / file.name).exists()]
    for link in links:
        link.symlink_to(f"{link.name}.partial")
    try:
        return len(journal.records), false_claims(journal, folder, files)
    finally:
        for link in links:
            link.unlink()


@pytest.mark.parametrize("kind", JOBS)
def test_a_run_killed_at_any_call_goes_on_with_the_same_bytes(
    kind: str, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    command, name = JOBS[kind]
    (tmp_path / "count").mkdir()
    files, folder = planned(kind, tmp_path), tmp_path / "run"
    first = folder / (files[0].name if name.endswith(".gguf") else name)
    names, resumed = names_of(running(*command, *HOW, "-o", tmp_path / "count" / name)), 0

    def run() -> None:
        assert qconvert(*command, *HOW, "-o", folder / name).code == 0
        assert tree(folder) == whole[kind]

    # Parts that were named before a kill are known by their inodes.
    at = really_killed_at if kind == "parts" else killed_at
    for call, moment in at(folder, run, moments(names)):
        if first.exists() and tree(folder).items() >= whole[kind].items():
            continue
        assert name.endswith(".gguf") or not first.exists(), (call, moment)
        records, false = claims(kind, folder, files)
        assert false == [], (call, moment)
        resumed += bool(records)
        ran = qconvert(*command, *HOW, "-o", folder / name)
        assert ran.code == 0, (call, moment, ran.err)
        assert tree(folder) == whole[kind], (call, moment)
    assert resumed > KILLS // 4


@pytest.mark.parametrize("kind", JOBS)
def test_a_run_killed_as_it_goes_on_goes_on_as_well(
    kind: str, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    """Three times, at any calls; the fourth run comes to its end."""
    command, name = JOBS[kind]
    files, thrice = planned(kind, tmp_path), 0
    (tmp_path / "count").mkdir()
    calls = calls_of(running(*command, *HOW, "-o", tmp_path / "count" / name))
    for number in asked(range(400), range(3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = running(*command, *HOW, "-o", folder / name)
        rng, kills = random.Random(f"{kind} {number}"), 0
        for _ in range(3):
            if tree(folder).items() >= whole[kind].items():
                break
            kills += killed(run, rng.randrange(calls // 4), rng.choice(MOMENTS)) == KILLED
            assert claims(kind, folder, files)[1] == [], number
        thrice += kills == 3
        if not tree(folder).items() >= whole[kind].items():
            ran = qconvert(*command, *HOW, "-o", folder / name)
            assert ran.code == 0, (number, ran.err)
            assert tree(folder) == whole[kind], number
        shutil.rmtree(folder)
    assert thrice


def test_tensors_made_together_go_on_after_a_kill_at_any_call(tmp_path: Path) -> None:
    """At every call of the command, one of the moments in turn: batches of tensors, each a group."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16}
    model, resumed, seen = tiny(tmp_path / "m", **sizes), 0, list[int]()
    command = ("quantize", model, "--bits", 4, "--group-size", 32, *HOW)
    files: list[FilePlan] = []

    def noted(job: Job, *rest: object) -> dict[str, object]:
        files[:] = job.container.files(tmp_path)
        return facts_of(job, *rest)  # type: ignore[arg-type]

    facts_of, together = writing.facts_of, batches.make_batch
    with groups_of(1, together=True):
        with patch.object(writing, "facts_of", noted), patch.object(runner, "make_batch") as made:
            made.side_effect = lambda batch, *rest, **how: (
                seen.append(len(batch.members)) or together(batch, *rest, **how)
            )
            assert qconvert(*command, "-o", tmp_path / "whole" / "out").code == 0
        assert sum(seen) > 56 and len(seen) > 2
        whole = tree(tmp_path / "whole")
        calls = len(names_of(running(*command, "-o", tmp_path / "count" / "out")))
        some = [(call, MOMENTS[call % len(MOMENTS)]) for call in range(calls)]
        kills = asked([(call, moment) for call in range(calls) for moment in MOMENTS], some)
        folder = tmp_path / "run"
        out = folder / "out"

        def run() -> None:
            assert qconvert(*command, "-o", out).code == 0
            assert tree(folder) == whole

        for call, moment in killed_at(folder, run, kills):
            if not out.exists():
                journal = journal_of(out)
                records = 0 if journal is None else len(journal.records)
                assert journal is None or false_claims(journal, folder / "out.partial", files) == []
                resumed += records > 0
                ran = qconvert(*command, "-o", out)
                assert ran.code == 0, (call, moment, ran.err)
            assert tree(folder) == whole, (call, moment)
    assert resumed > len(kills) // 4
