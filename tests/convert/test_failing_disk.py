"""A disk that is full or fails at any call: one sentence, no half output, and the next run ends equal."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.commands import qconvert
from tests.support.crashes import JOBS, asked, failing, groups_of, names_of, running, tree

# `make crash` has every call fail in every way.
SOME = 4
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
HOW = ("-j", 1, "--max-memory", "2MB")


@functools.cache
def names_and_files(kind: str, folder: Path) -> tuple[list[str], dict[str, bytes]]:
    """The calls of a run that nothing disturbs, and what it writes."""
    command, name = JOBS[kind]
    with groups_of(200_000):
        return names_of(running(*command, *HOW, "-q", "-o", folder / kind / name)), tree(folder / kind)


@pytest.fixture(scope="module")
def whole_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in JOBS:
        (folder / kind).mkdir()
    return folder


@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
@pytest.mark.parametrize("kind", JOBS)
def test_an_error_of_any_call_is_one_sentence_and_the_next_run_ends_equal(
    kind: str, number: int, here: Path, whole_in: Path
) -> None:
    """Each call fails once, or with all that come after it in the same run."""
    command, name = JOBS[kind]
    names, whole = names_and_files(kind, whole_in)
    with groups_of(200_000):
        cases = [(call, lasting) for call in range(len(names)) for lasting in (False, True)]
        chosen = asked(cases, random.Random(f"{kind} {number}").sample(cases, SOME))
        failed = 0
        for call, lasting in chosen:
            shutil.rmtree(here / "made", ignore_errors=True)
            (here / "made").mkdir()
            told = (kind, names[call], call, lasting)
            with failing(call, number, lasting=lasting):
                ran = qconvert(*command, *HOW, "-q", "-o", here / "made" / name)
            assert ran.code in (0, 1) and "Traceback" not in ran.err, (told, ran.err)
            if ran.code == 1:
                failed += 1
                assert ran.err.count("Error: ") == 1 and ran.err.count("Hint: ") == 1, (told, ran.err)
                assert os.strerror(number) in ran.err, (told, ran.err)
            if tree(here / "made").items() >= whole.items():
                continue  # it has its name, and failed later if at all
            # Of a GGUF in parts the first, which loaders open, gets its name last.
            last = {min(whole)} if kind == "parts" else whole.keys()
            assert ran.code == 1 and not tree(here / "made").keys() & last, told
            ran = qconvert(*command, *HOW, "-q", "-o", here / "made" / name)
            assert ran.code == 0, (told, ran.err)
            assert tree(here / "made") == whole, told
    assert failed
