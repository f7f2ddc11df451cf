"""Writes what a conversion does to a file as JSON lines (--events), for programs that watch it from outside.

The shape of a line is fixed by `docs/reference/schemas/events.json`. Lines are appended, each in one write,
so that a file holds all runs that one output took, and runs beside each other may share it: every line names
its run. Whatever the work is at, there is a line every ten seconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    from qconvert.convert.job import Job, OpenedModel, Result
    from qconvert.convert.outcome import BlockDone
    from qconvert.convert.resume import RunJournal
    from qconvert.convert.time_left import Work
    from qconvert.core.dtypes import Json
    from qconvert.core.ranks import Rank

# Seconds between two lines on progress: of work that reports, and of work that does not.
EVERY, SILENT = 2.0, 10.0


@dataclass
class RunLines:
    """Writes the lines of one run, from any thread: none without a file, and none after its end."""

    file: Path | None
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    _began: float = field(init=False)
    _told: float = field(init=False)
    _over: bool = field(default=False, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _run: str = field(default_factory=lambda: uuid4().hex[:12], init=False)

    def __post_init__(self) -> None:
        self._began = self._told = self.clock()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self.clock() - self._began

    def say(self, event: str, **fields: Any) -> None:
        """Write one line."""
        with self._lock:
            if self.file is not None and not self._over:
                _append(self.file, event, self._run, fields)

    def progress(self) -> None:
        """Say how far the work is, unless that was just said."""
        with self._lock:
            if self.file is not None and self.clock() - self._told >= EVERY:
                self._told = self.clock()
                self.say_progress()

    def say_progress(self) -> None:
        """Say how far the work is."""
        raise NotImplementedError

    def end(self, **fields: Any) -> None:
        """Say that the run is over, and what it took."""
        from qconvert.calibrate.memory_limit import peak_resident

        with self._lock:
            self.say("end", seconds=round(self.seconds, 3), peak_memory=peak_resident(), **fields)
            self._over = True

    @contextmanager
    def told(self) -> Iterator[None]:
        """Records progress of work that reports nothing for a while, and the end if it fails."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(SILENT):
                with suppress(QConvertError):  # which the next line of the main thread will raise
                    self.progress()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except QConvertError as error:
            self.end(ok=False, error=error_record(error))
            raise
        except KeyboardInterrupt as error:
            self.end(ok=False, stopped=error.exit_code if isinstance(error, Stopped) else 130)
            raise
        except GeneratorExit:  # what came of the work has met an error
            self.end(ok=False)
            raise
        finally:
            ended.set()
            thread.join()


@dataclass
class Events(RunLines):
    """Passes the events of a run on to the bars, and writes lines on them; none without a file."""

    jobs: Sequence[tuple[Job, Path]]
    work: Work
    bars: Bars
    stage: str = field(default="convert", init=False)

    def listen(self, done: BlockDone) -> None:
        """Take the event of a block."""
        self.bars.listen(done)
        self.progress()

    def verified(self, done: int, total: int) -> None:
        """Take note of how many bytes of how many were read back."""
        self.bars.verified(done, total)
        self.stage = "verify"
        self.progress()

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

    def say_progress(self) -> None:
        from qconvert.calibrate.memory_limit import resident

        work, left = self.work, self.work.left()
        self.say(
            "progress",
            stage=self.stage,
            seconds=round(self.seconds, 3),
            seconds_left=None if left is None else round(left, 1),
            bytes_read=work.read,
            bytes_written=work.written,
            bytes_verified=work.verified,
            memory=resident(),
        )


@dataclass
class StageLines(RunLines):
    """Writes lines on work that writes no output: how much of it is done, of how much, in a `unit`."""

    stage: str
    models: Sequence[str]
    unit: str
    _done: float = field(default=0.0, init=False)
    _total: float | None = field(default=None, init=False)
    _first: tuple[float, float] | None = field(default=None, init=False)

    def tell(self, done: float, total: int) -> None:
        """Take note of how much is done; that may include what an earlier run has done."""
        self._done, self._total = done, total
        if self._first is None:
            self._first = self.seconds, done
        self.progress()

    def say_progress(self) -> None:
        from qconvert.calibrate.memory_limit import resident

        self.say(
            "stage",
            stage=self.stage,
            models=list(self.models),
            unit=self.unit,
            done=round(self._done, 3),
            total=self._total,
            seconds=round(self.seconds, 3),
            seconds_left=self._left(),
            memory=resident(),
        )

    def _left(self) -> float | None:
        """The seconds that are left, at the pace since the first report of the work."""
        if self._first is None or self._total is None:
            return None
        at, before = self._first
        done = self._done - before
        left = (self.seconds - at) * (self._total - self._done) / done if done > 0 else None
        return 0.0 if self._done >= self._total else None if left is None else round(left, 1)


@contextmanager
def stage_to(path: Path | None, stage: str, models: Sequence[str], unit: str) -> Iterator[StageLines]:
    """The lines on work that writes no output: those of a run of its own, which ends with the context."""
    lines = StageLines(path, stage, models, unit)
    with lines.told():
        lines.say_progress()
        yield lines
        lines.say_progress()
        lines.end(ok=True)


def name_of(source: OpenedModel) -> str:
    """What a line calls a model: its repository, or its name."""
    return source.location.repo_id or source.location.name


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
    started: Json = {"command": request.command, "source": name_of(source), "version": __version__}
    if rank is not None:
        started["rank"] = [rank.number, rank.world]
    if candidates_of is not None:
        started["candidates_of"] = str(candidates_of)
    events.say("start", **started, outputs=outputs, bytes=totals)
    with events.told():
        yield events
