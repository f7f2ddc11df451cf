"""Whole conversions against copying the bytes they read: `python evals/speed.py convert`.

Every figure is of a fresh process; ratios are taken within one round, and the median over rounds
is printed, because machines drift. Peak memory is the process's own high-water mark.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from qconvert import __version__
from qconvert.evals.synthetic import SHAPES, make_checkpoint
from qconvert.tables import size, table
from qconvert.tensors import Json

VARIANTS = {
    "min-max": ["--min-max", "--no-verify"],
    "min-max, verified": ["--min-max"],
    "scale search": ["--no-verify"],
    "scale search, verified": [],
}


@dataclass(frozen=True, slots=True)
class Run:
    """One finished process: wall seconds and peak resident bytes."""

    seconds: float
    peak_bytes: int


@click.command("convert")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-1.5b", show_default=True)
@click.option("--layer-factor", type=click.IntRange(1, 8), default=1, help="That many times the layers.")
@click.option("--bits", type=click.IntRange(2, 8), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--max-memory", default="512MB", show_default=True)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Keep the checkpoint here for reuse.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def convert(
    shape: str,
    layer_factor: int,
    bits: int,
    rounds: int,
    max_memory: str,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time `quantize` on a checkpoint of a real model's shapes against copying its files."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        source = make_checkpoint(
            (folder or work) / f"{shape}-x{layer_factor}", shape, layer_factor=layer_factor
        )
        shards = sorted(source.glob("*.safetensors"))
        nbytes = sum(shard.stat().st_size for shard in shards)
        command = [sys.executable, "-m", "qconvert", "quantize", str(source), "--bits", str(bits), "-q"]
        command += ["--max-memory", max_memory, "--overwrite", "-o", str(work / "out")]
        timed([*command, "--no-verify"])  # compiles the kernels and warms the page cache
        rows: dict[str, list[Run]] = {"copy": [], **{name: [] for name in VARIANTS}}
        for _ in range(rounds):
            rows["copy"].append(copied(shards, work / "copy"))
            for name, flags in VARIANTS.items():
                shutil.rmtree(work / "out", ignore_errors=True)
                rows[name].append(timed([*command, *flags]))
    print_ratios(shape, rows, max_memory, nbytes)
    if out is not None:
        record(
            out, {"shape": shape, "layer_factor": layer_factor, "bits": bits, "max_memory": max_memory}, rows
        )


def copied(shards: list[Path], target: Path) -> Run:
    """`cat` of all shards into a new file, plus sync."""
    target.unlink(missing_ok=True)
    script = f"cat {' '.join(map(str, shards))} > {target} && sync {target}"
    run = timed(["sh", "-c", script])
    target.unlink()
    return run


def timed(command: list[str]) -> Run:
    """Run a command in a process of its own; ClickException when it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) != 0:
        raise click.ClickException(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return Run(seconds, usage.ru_maxrss * 1024)


def record(out: Path, asked: Json, rows: dict[str, list[Run]]) -> None:
    """Write what was asked, the machine, and every run as JSON."""
    runs = {name: [asdict(run) for run in done] for name, done in rows.items()}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "qconvert": __version__}
    out.write_text(json.dumps({**asked, **machine, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def print_ratios(shape: str, rows: dict[str, list[Run]], max_memory: str, nbytes: int) -> None:
    """Print medians of all rows: seconds, the ratio to the copy of the same round, peak memory."""
    base = [run.seconds for run in rows["copy"]]
    cells = []
    for name, runs in rows.items():
        ratio = statistics.median(run.seconds / copy for run, copy in zip(runs, base, strict=True))
        seconds = statistics.median(run.seconds for run in runs)
        cells.append([name, f"{seconds:.2f}", f"{ratio:.2f}", size(max(run.peak_bytes for run in runs))])
    click.echo(
        f"{shape} ({size(nbytes)}), {os.cpu_count()} cores, --max-memory {max_memory}, {len(base)} rounds"
    )
    click.echo("\n".join(table(["what", "seconds", "times copy", "peak memory"], cells)))
