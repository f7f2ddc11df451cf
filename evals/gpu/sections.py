"""The sections of a run in their order, and the process that one of them is.

`python -m evals.gpu.sections NAME ROWS SECONDS [--dry-run]` measures one section and adds its
rows to the file ROWS; it is started by `evals/gpu/schedule.py`. A process of its own means that a fault
of the device, or of a peer, costs one section.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from evals.gpu.rows import Note, Row, append, load

if TYPE_CHECKING:
    from evals.gpu.job import Job

CUT = 75
"""Exit code of a section that ran out of time between two rows."""
GRACE = 4.0
"""Seconds before its end in which a section starts nothing new."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run: `function` of a module of this package, and the seconds it has of its own."""

    name: str
    seconds: float
    module: str
    function: str = "measure"

    def measure(self, job: Job) -> Iterator[Row]:
        """Its rows, as they come."""
        rows: Iterator[Row] = getattr(import_module(f"evals.gpu.{self.module}"), self.function)(job)
        return rows


SECTIONS = (
    Section("ceilings", 20, "ceilings"),
    Section("checks", 110, "checks"),
    Section("decode", 100, "decode"),
    Section("kernels", 95, "kernels", "products"),
    Section("crossings", 40, "kernels", "crossings"),
    Section("reading", 65, "reading"),
    Section("peers", 95, "peer_models"),
)
"""525 seconds in all; a section also has what those before it left over."""


def run_section(section: Section, rows: Path, seconds: float, *, dry: bool) -> int:
    """Measure a section and write its rows; the exit code of its process."""
    import torch

    from evals.gpu.job import Job

    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    earlier = tuple(row for _, row in load(rows))
    job = Job(device, time.monotonic() + seconds - min(GRACE, seconds / 10), dry, earlier)
    gc.freeze()  # capturing a graph collects garbage first
    for row in section.measure(job):
        append(rows, section.name, row)
        if job.left < 0:
            append(rows, section.name, Note(f"{section.name}: cut after {seconds:.0f} s"))
            return CUT
    return 0


def main(arguments: list[str]) -> int:
    """The process of one section."""
    name, rows, seconds, *rest = arguments
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    section = next(each for each in SECTIONS if each.name == name)
    return run_section(section, Path(rows), float(seconds), dry="--dry-run" in rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
