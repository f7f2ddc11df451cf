"""Runs the sections one after the other, each in a process of its own and within its time.

A section may use its own seconds and what those before it left over, but never those of later ones.
Whatever ends one, the rows it had found are in the file.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.gpu.sections import CUT, Section

CLOSING_SECONDS = 5.0
"""Kept for writing the results."""
KILL_SECONDS = 3.0
"""How long after its end a section that does not stop by itself is killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a section ended: `done`, `cut` or `failed`, after how many seconds, and its last words."""

    section: str
    status: str
    seconds: float
    message: str = ""


def run_sections(
    sections: Sequence[Section],
    command_of: Callable[[Section, float], Sequence[str]],
    *,
    seconds: float,
    log: Path,
    finished: Callable[[Outcome], None],
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run all sections within `seconds`; `command_of` gives the command of one and its seconds.

    What the processes print goes to the file `log`; `finished` is told of every outcome at once.
    """
    end = time.monotonic() + seconds - CLOSING_SECONDS
    outcomes = []
    for number, section in enumerate(sections):
        later = sum(each.seconds for each in sections[number + 1 :])
        limit = end - time.monotonic() - KILL_SECONDS - later
        if limit <= 0:
            outcome = Outcome(section.name, "cut", 0.0, "no time was left to start it")
        else:
            outcome = _run(section, command_of(section, limit), limit, log, environment)
        outcomes.append(outcome)
        finished(outcome)
    return outcomes


def _run(
    section: Section, command: Sequence[str], limit: float, log: Path, environment: dict[str, str] | None
) -> Outcome:
    begin = time.monotonic()
    start = log.stat().st_size if log.is_file() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code: int | None = process.wait(limit + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    took = time.monotonic() - begin
    if code == 0:
        return Outcome(section.name, "done", took)
    if code == CUT:
        return Outcome(section.name, "cut", took, f"its {limit:.0f} s were over")
    if took >= limit:
        return Outcome(section.name, "cut", took, f"stopped within a measurement after {limit:.0f} s")
    return Outcome(section.name, "failed", took, f"exit code {code}: {_last_line(log, start)}")


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")[:300]
