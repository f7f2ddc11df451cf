"""Writes what a conversion does to a file as JSON lines (--events), for programs that watch it from outside.

The shape of a line is fixed by `docs/reference/schemas/events.json`. Lines are appended, each in one write,
so that a file holds all runs that one output took, and runs beside each other may share it: every line names
its run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from qconvert.cli.exit_codes import error_record
from qconvert.cli.signals import Stopped
from qconvert.errors import QConvertError

if TYPE_CHECKING:
    from qconvert.cli.progress import Bars
    from qconvert.convert.job import Job, Result
    from qconvert.convert.outcome import BlockDone
    from qconvert.convert.resume import RunJournal
    from qconvert.convert.time_left import Work
    from qconvert.core.dtypes import Json
    from qconvert.core.ranks import Rank

# Seconds between two lines on progress.
EVERY = 2.0


@dataclass
class Events:
    """Passes the events of a run on to the bars, and writes lines on them; none without a file."""

    file: Path | None
    jobs: Sequence[tuple[Job, Path]]
    work: Work
    bars: Bars
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _told: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _run: str = field(default_factory=lambda: uuid4().hex[:12], init=False)

    def __post_init__(self) -> None:
        self._began = self._told = self.clock()

    def listen(self, done: BlockDone) -> None:
        """Take the event of a block."""
        self.bars.listen(done)
        self._progress("convert")

    def verified(self, done: int, total: int) -> None:
        """Take note of how many bytes of how many were read back."""
        self.bars.verified(done, total)
        self._progress("verify")

    def resumed(self, journal: RunJournal) -> None:
        """Say that an output goes on with what an earlier run has done."""
        self.say("resume", partial=str(journal.path), share=round(journal.share, 4))

    def ended(self, results: Sequence[Result]) -> None:
        """Say which files were written, and that all went well."""
        for (job, out), result in zip(self.jobs, results, strict=True):
            folder = out if out.is_dir() else out.parent
            for file in job.container.files(out):
                sha256 = result.hashes.files.get(file.name)
                self.say("file", path=str(folder / file.name), bytes=file.size, sha256=sha256)
        seconds = {stage: round(taken, 3) for stage, taken in results[0].seconds.items()}
        self.end(ok=True, seconds_by_stage=seconds)

    def end(self, **fields: Any) -> None:
        """Say that the run is over, and what it took."""
        from qconvert.calibrate.memory_limit import peak_resident

        taken = round(self.clock() - self._began, 3)
        self.say("end", seconds=taken, peak_memory=peak_resident(), **fields)

    def _progress(self, stage: str) -> None:
        if self.file is None or self.clock() - self._told < EVERY:
            return
        from qconvert.calibrate.memory_limit import resident

        self._told = self.clock()
        work, left = self.work, self.work.left()
        self.say(
            "progress",
            stage=stage,
            seconds=round(self._told - self._began, 3),
            seconds_left=None if left is None else round(left, 1),
            bytes_read=work.read,
            bytes_written=work.written,
            bytes_verified=work.verified,
            memory=resident(),
        )

    def say(self, event: str, **fields: Any) -> None:
        """Write one line; from any thread."""
        if self.file is not None:
            with self._lock:
                _append(self.file, event, self._run, fields)


def say_skipped(path: Path | None, out: str) -> None:
    """Say in an events file that an output was there already, and complete: a run of its own."""
    if path is not None:
        _append(path, "skipped", uuid4().hex[:12], {"path": out})


def _append(path: Path, event: str, run: str, fields: Json) -> None:
    """Append one line in one write. Raises QConvertError where the file does not take it."""
    from qconvert.formats.io.local_file import explained

    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = json.dumps({"schema": 1, "event": event, "run": run, "time": now, **fields}) + "\n"
    with explained(f"{path}: cannot be written"), path.open("ab", buffering=0) as file:
        file.write(line.encode())


@contextmanager
def events_to(
    path: Path | None,
    jobs: Sequence[tuple[Job, Path]],
    work: Work,
    bars: Bars,
    rank: Rank | None = None,
    candidates_of: Path | None = None,
) -> Iterator[Events]:
    """The events of a run of jobs, from the first line of a file to its last, whatever ends it.

    `rank` is the one of this process among several; jobs may be `candidates_of` an output that another run
    finishes.
    """
    if path is None:
        yield Events(None, jobs, work, bars)
        return
    from qconvert.cli.conversion_report import files_json
    from qconvert.core.version import __version__

    events = Events(path, jobs, work, bars)
    outputs = [{"path": str(out), "files": files_json(job, out)} for job, out in jobs]
    source, request = jobs[0][0].source, jobs[0][0].compiled.request
    if source.location.network is not None:
        source.location.network.retried = lambda reason: events.say("retry", reason=reason)
    totals = {"read": work.to_read, "written": work.to_write, "verified": work.to_verify}
    name = source.location.repo_id or source.location.name
    started: Json = {"command": request.command, "source": name, "version": __version__}
    if rank is not None:
        started["rank"] = [rank.number, rank.world]
    if candidates_of is not None:
        started["candidates_of"] = str(candidates_of)
    events.say("start", **started, outputs=outputs, bytes=totals)
    try:
        yield events
    except QConvertError as error:
        events.end(ok=False, error=error_record(error))
        raise
    except KeyboardInterrupt as error:
        events.end(ok=False, stopped=error.exit_code if isinstance(error, Stopped) else 130)
        raise
