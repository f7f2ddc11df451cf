"""Times whole commands as a user meets them: each run a fresh process, beside copying the bytes it reads.

Ratios are taken within one round, and the median over rounds is printed, because machines drift. Peak
memory is the process's own high-water mark.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import click

from evals.synthetic import SHAPES
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.report.tables import size, table


@dataclass(frozen=True, slots=True)
class Run:
    """One finished process: wall seconds, peak resident bytes, and seconds of processor time in user mode."""

    seconds: float
    peak_bytes: int
    user_seconds: float = 0.0


Runs = dict[str, list[Run]]
max_memory = click.option("--max-memory", default="512MB", show_default=True)


def _made(context: click.Context, parameter: click.Parameter, folder: Path | None) -> Path | None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


reused_folder = click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_made,
    help="Keep what is measured here for reuse.",
)


def options(shape: str, rounds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that all commands share, with these defaults."""
    declared = (
        click.option("--shape", type=click.Choice(list(SHAPES)), default=shape, show_default=True),
        click.option("--rounds", type=click.IntRange(1), default=rounds, show_default=True),
        reused_folder,
        click.option(
            "-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too."
        ),
    )
    return lambda command: reduce(lambda inner, option: option(inner), reversed(declared), command)


def timed(command: list[str]) -> Run:
    """Run a command in a process of its own; ClickException when it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) != 0:
        raise click.ClickException(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return Run(seconds, usage.ru_maxrss * 1024, usage.ru_utime)


def copied(shards: Sequence[Path], target: Path) -> Run:
    """`cat` of all shards into a new file, plus sync."""
    target.unlink(missing_ok=True)
    script = 'target=$1; shift; cat -- "$@" > "$target" && sync "$target"'
    run = timed(["sh", "-c", script, "sh", str(target), *map(str, shards)])
    target.unlink()
    return run


def record(out: Path, asked: Json, rows: Runs) -> None:
    """Write what was asked, the machine, and every run as JSON."""
    runs = {name: [asdict(run) for run in done] for name, done in rows.items()}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "qconvert": __version__}
    out.write_text(json.dumps({**asked, **machine, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def print_ratios(title: str, rows: Runs, faster: Mapping[str, str] | None = None) -> None:
    """Print medians of all rows: seconds, the ratio to the copy of the same round, peak memory.

    `faster` adds how many times faster a row is than two steps are.
    """
    cells = []
    for name, runs in rows.items():
        ratio = statistics.median(
            run.seconds / copy.seconds for run, copy in zip(runs, rows["copy"], strict=True)
        )
        seconds = statistics.median(run.seconds for run in runs)
        column = [] if faster is None else [faster.get(name, "")]
        peak = size(max(run.peak_bytes for run in runs))
        cells.append([name, f"{seconds:.2f}", f"{ratio:.2f}", *column, peak])
    click.echo(f"{title}, {os.cpu_count()} cores, {len(rows['copy'])} rounds")
    head = ["what", "seconds", "times copy", *([] if faster is None else ["times two steps"]), "peak memory"]
    click.echo("\n".join(table(head, cells)))
