"""The command line in this process: what a command printed, and the code it left with."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from qconvert.cli import main
from qconvert.convert import run_memory


@dataclass(frozen=True)
class Ran:
    """One command that ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that stdout holds."""
        return strict_json(self.out)


def strict_json(text: str) -> Any:
    """The value, without the NaN and Infinity that Python's parser lets through."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def of_any_size() -> AbstractContextManager[object]:
    """A conversion takes what it is given: what this process has, with all its tests, is not the command's.

    So a tiny --max-memory makes tiny blocks.
    """
    return mock.patch.object(run_memory, "require_memory", lambda jobs: None)


def qconvert(*args: object) -> Ran:
    """Run `qconvert ARGS` as the console script does."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(arg) for arg in args])
    except SystemExit as ending:
        assert isinstance(ending.code, int), ending.code
        return Ran(ending.code, out.getvalue(), err.getvalue())
    finally:
        signal.signal(signal.SIGTERM, before)
    raise AssertionError("the command returned instead of leaving")


def made(*args: object) -> Path:
    """Run a writing command that must succeed; the folder it made."""
    ran = qconvert(*args, "-q")
    assert ran.code == 0, ran.err
    return Path(ran.out.strip())


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, whole."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def without_source(files: dict[str, bytes], *keys: str) -> dict[str, Any]:
    """The files of an output, without these keys of its source, which say where that was found."""
    found: dict[str, Any] = {**files, "qconvert.json": json.loads(files["qconvert.json"])}
    for key in keys:
        found["qconvert.json"]["source"].pop(key)
    for file in found["qconvert.json"]["source"]["files"]:  # which only files on this machine have
        file.pop("sample_sha256")
        file.pop("etag", None)
    found.pop("README.md")
    return found


def failed(ran: Ran, fact: str, hint: str | None = None, code: int = 1) -> None:
    """Assert that a command said exactly this on stderr, and nothing on stdout."""
    wanted = f"Error: {fact}\n" + (f"Hint: {hint}\n" if hint else "")
    assert (ran.code, ran.out, ran.err) == (code, "", wanted)


def refused(folder: Path, *flags: object) -> str:
    """What a failing to-gguf said; nothing may be left in the folder it was to write to."""
    before = sorted(folder.iterdir())
    ran = qconvert("to-gguf", *flags, "-o", folder / "m.gguf")
    assert ran.code == 1, ran
    assert sorted(folder.iterdir()) == before
    return ran.err


_INTERPRETED = ("interpreted_step.py", "interpreted_matmul.py")


def check_interpreted(file: str, shared: Path) -> None:
    """Assert that a file of tests passes in triton's interpreter; `shared` is of all workers of a run.

    TRITON_INTERPRET counts only before the first import of triton, so in a process of its own: one for all
    files, which starts up once. Who comes second reads what it said.
    """
    with (shared / "interpreted.json").open("a+") as told:
        fcntl.flock(told, fcntl.LOCK_EX)
        if not told.seek(0, os.SEEK_END):
            json.dump(_interpreted(), told)
        told.seek(0)
        code, said = json.load(told)
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert code == 0 or (lines and not any(file in line for line in lines)), said[-10000:]


def _interpreted() -> tuple[int, str]:
    root = Path(__file__).resolve().parents[2]
    files = [f"tests/runtime/{file}" for file in _INTERPRETED]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
