"""Times processes that make one output against one process: `python evals/speed.py ranks`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from filecmp import cmpfiles
from pathlib import Path

import click

from evals.processes import reused_folder
from evals.speed_tensors import Cost, cost, cost_cells
from evals.synthetic import SHAPES, make_checkpoint
from qconvert.core.version import __version__
from qconvert.report.tables import table


@click.command("ranks")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-1.5b", show_default=True)
@click.option("--factor", type=click.IntRange(1), default=1, show_default=True, help="Times its layers.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--processes", type=click.IntRange(2), default=2, show_default=True, help="With one thread.")
@click.option("--bits", default="4", show_default=True, help="Of `quantize`.")
@click.option("--shard-size", default="250MB", show_default=True)
@reused_folder
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def ranks(
    shape: str,
    factor: int,
    rounds: int,
    processes: int,
    bits: str,
    shard_size: str,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time torchrun's processes, with one thread each, and one process with as many threads, by turns.

    The outputs must be equal, byte for byte.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        name = shape if factor == 1 else f"{shape}-times-{factor}"
        source = make_checkpoint((folder or Path(scratch)) / name, shape, layer_factor=factor)
        job = ["qconvert", "quantize", str(source), "--bits", bits, "--shard-size", shard_size, "-q"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        commands = {
            f"one process, {processes} threads": ["-m", *job, "-j", str(processes)],
            f"{processes} processes, 1 thread": [*launcher, "-m", *job, "-j", "1"],
        }
        rows: dict[str, list[Cost]] = {name: [] for name in commands}
        made = [Path(scratch) / str(number) / "out" for number in range(len(commands))]  # cards say its name
        for turn in range(rounds + 1):  # the first one compiles kernels
            for path, (name, words) in zip(made, commands.items(), strict=True):
                shutil.rmtree(path.parent, ignore_errors=True)
                path.parent.mkdir()
                taken = cost([sys.executable, *words, "-o", str(path)])
                if turn:
                    rows[name].append(taken)
        _check_equal(*made)
    _print(f"{shape}, {factor} times its layers, int{bits}", rows)
    if out is not None:
        found = {name: [asdict(run) for run in costs] for name, costs in rows.items()}
        said = {"shape": shape, "layer_factor": factor, "bits": bits, "shard_size": shard_size}
        text = {**said, "cores": os.cpu_count(), "qconvert": __version__, "runs": found}
        out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _check_equal(one: Path, many: Path) -> None:
    names = sorted({path.name for folder in (one, many) for path in folder.iterdir()})
    _, *differing = cmpfiles(one, many, names, shallow=False)
    if found := [name for some in differing for name in some]:
        raise click.ClickException(f"the outputs differ in {', '.join(found)}")


def _print(title: str, rows: dict[str, list[Cost]]) -> None:
    """Medians, and the ratio of the seconds, taken round by round."""
    cells = [cost_cells(name, costs) for name, costs in rows.items()]
    one, many = rows.values()
    ratio = statistics.median(b.seconds / a.seconds for a, b in zip(one, many, strict=True))
    click.echo(f"{title}, {os.cpu_count()} cores, {len(one)} rounds")
    click.echo("\n".join(table(["run", "seconds", "processor seconds", "peak of a process"], cells)))
    click.echo(f"several processes take {ratio:.2f} times the seconds of one")
