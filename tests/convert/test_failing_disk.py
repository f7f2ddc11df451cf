"""A disk that is full or fails at any call: one sentence, no half output, and the next run ends equal."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.commands import qconvert
from tests.support.crashes import JOBS, asked, failing, groups_of, names_of, running, tree

# `make crash` has every call fail in every way.
SOME = 6
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
HOW = ("-j", 1, "--max-memory", "2MB")


@pytest.mark.parametrize("number", ERRORS, ids=[errno.errorcode[number] for number in ERRORS])
@pytest.mark.parametrize("kind", JOBS)
def test_an_error_of_any_call_is_one_sentence_and_the_next_run_ends_equal(
    kind: str, number: int, here: Path
) -> None:
    """Each call fails once, or with all that come after it in the same run."""
    command, name = JOBS[kind]
    (here / "whole").mkdir()
    with groups_of(200_000):
        names = names_of(running(*command, *HOW, "-q", "-o", here / "whole" / name))
        whole = tree(here / "whole")
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
