"""Killed at any moment: nothing under the final name, no false claim, and the same bytes when it goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import qconvert as library
from qconvert.formats.io.planned_files import FilePlan
from tests.commands import qconvert
from tests.crashes import (
    KILLED,
    MOMENTS,
    Moment,
    calls_of,
    false_claims,
    groups_of,
    journal_of,
    killed,
    running,
    tree,
)

# `make crash` tries every call in every way, and kills what goes on as well.
EVERYTHING = os.environ.get("QCONVERT_CRASH") == "all"
KILLS = 24
FOLDER = ("quantize", "embedded", "--bits", 4)
GGUF = ("to-gguf", "embedded", "--type", "q4_k_m")
# Small blocks, one after the other, so that calls come in nearly one order.
HOW = ("-j", 1, "--max-memory", "2MB", "-q")
JOBS = {"folder": (FOLDER, "out"), "gguf": (GGUF, "m.gguf")}


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


def planned(kind: str, out: Path) -> tuple[FilePlan, ...]:
    """The weight files under the names that they have while they are written."""
    model = library.open_model("embedded")
    if kind == "gguf":
        request = library.Request("to-gguf", target=library.GGUFTarget("q4_k_m"))
    else:
        request = library.Request("quantize", library.Recipe(scheme=library.parse_scheme("int4-g128")))
    return library.prepare(model, request, library.RunOptions()).container.files(out)


def moments(calls: int) -> list[tuple[int, Moment]]:
    """Which calls to die at, and how."""
    every = [(call, moment) for call in range(calls) for moment in MOMENTS]
    return every if EVERYTHING else random.Random(20261122).sample(every, KILLS)


@pytest.mark.parametrize("kind", JOBS)
def test_a_run_killed_at_any_call_goes_on_with_the_same_bytes(
    kind: str, tmp_path: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    command, name = JOBS[kind]
    (tmp_path / "count").mkdir()
    calls, resumed = calls_of(running(*command, *HOW, "-o", tmp_path / "count" / name)), 0
    for call, moment in moments(calls):
        folder = tmp_path / f"{call}{moment}"
        folder.mkdir()
        out = folder / name
        code = killed(running(*command, *HOW, "-o", out), call, moment)
        if code == 0:  # after its last call
            assert tree(folder) == whole[kind]
            continue
        assert code == KILLED
        if out.exists():
            assert tree(folder).items() >= whole[kind].items()
            continue
        journal = journal_of(out)
        if journal is not None:
            files = planned(kind, out)
            inside = folder / "out.partial" if kind == "folder" else folder
            if kind == "gguf":
                (folder / files[0].name).symlink_to(f"{files[0].name}.partial")
            assert false_claims(journal, inside, files) == []
            if kind == "gguf":
                (folder / files[0].name).unlink()
            resumed += bool(journal.records)
        ran = qconvert(*command, *HOW, "-o", out)
        assert ran.code == 0, (call, moment, ran.err)
        assert tree(folder) == whole[kind], (call, moment)
        shutil.rmtree(folder)
    assert resumed > KILLS // 4
