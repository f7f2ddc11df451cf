"""Times several outputs of one reading against runs of their own: `python evals/speed.py together`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from evals.processes import reused_folder
from evals.speed_tensors import Cost, cost, cost_cells
from evals.synthetic import SHAPES, make_checkpoint
from qconvert.report.tables import table


@click.command("together")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-0.5b", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--bits", default="4,8", show_default=True, help="Outputs of `quantize`.")
@click.option("--types", help="Outputs of `to-gguf` instead; --tokenizer has its files.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A folder with tokenizer.json.")
@click.option("--cold", is_flag=True, help="Drop the source from the page cache before each run.")
@click.option("--no-verify", is_flag=True, help="Write only.")
@reused_folder
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def together(
    shape: str,
    rounds: int,
    bits: str,
    types: str | None,
    tokenizer: Path | None,
    cold: bool,
    no_verify: bool,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time outputs of random weights of a model's shapes, by turns: each by itself, then all in one call."""
    asked, command, option = (types, "to-gguf", "--type") if types else (bits, "quantize", "--bits")
    names = asked.split(",")
    rows: dict[str, list[Cost]] = {name: [] for name in (*names, asked)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, made = make_checkpoint((folder or Path(scratch)) / shape, shape), Path(scratch) / "out"
        for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
            shutil.copy(tokenizer / name, source)  # type: ignore[operator]
        words = [sys.executable, "-m", "qconvert", command, str(source), "-q", option]
        more = ["--no-verify"] if no_verify else []
        for turn in range(rounds + 1):  # the first one compiles kernels
            for value, runs in rows.items():
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                single = f"{value}.gguf" if types else value
                named = made if value == asked else made / single
                if cold:
                    _forget(sorted(source.glob("*.safetensors")))
                taken = cost([*words, value, "-o", str(named), *more])
                if turn:
                    runs.append(taken)
    _print(f"{shape}, {command}{', source not cached' if cold else ''}", asked, rows)
    if out is not None:
        found = {name: [asdict(run) for run in costs] for name, costs in rows.items()}
        text = {"shape": shape, "command": command, "cold": cold, "cores": os.cpu_count(), "runs": found}
        out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _print(title: str, asked: str, rows: dict[str, list[Cost]]) -> None:
    """Medians, and the ratio of one call to the sum of single ones, taken round by round."""
    alone = [rows[name] for name in rows if name != asked]
    cells = [cost_cells(name, costs, 2) for name, costs in rows.items()]
    wall = [
        one.seconds / sum(run.seconds for run in sums) for one, *sums in zip(rows[asked], *alone, strict=True)
    ]
    cpu = [
        (one.user + one.system) / sum(run.user + run.system for run in sums)
        for one, *sums in zip(rows[asked], *alone, strict=True)
    ]
    click.echo(f"{title}, {os.cpu_count()} cores, {len(wall)} rounds")
    click.echo("\n".join(table(["outputs", "seconds", "processor seconds", "peak memory"], cells)))
    ratios = statistics.median(wall), statistics.median(cpu)
    click.echo("one call takes {:.2f} of the sum of the seconds, {:.2f} of the processor's".format(*ratios))


def _forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
