"""The decoder on one NVIDIA GPU: `python evals/speed.py gpu`, or `evals/results/run_gpu.sh` around it.

Sections run one after the other in processes of their own, within a number of minutes. Results are
written after every section: JSON with all figures, and the page made of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from evals.gpu.rows import Fact, Row, load, of_kind, to_json
from evals.gpu.schedule import Outcome, run_sections
from evals.gpu.sections import SECTIONS, Section
from qconvert.core.dtypes import Json

ROWS, LOG = "gpu-rows.jsonl", "gpu-log.txt"
BASIS = ("ceilings", "checks")
"""Sections that all others rest on: nothing is timed that was not checked in the same run."""
_NAMES = [section.name for section in SECTIONS]


@click.command("gpu")
@click.option("--minutes", type=click.FloatRange(0.2, 60), default=9.0, show_default=True, help="At most.")
@click.option(
    "--section", "chosen", type=click.Choice(_NAMES), multiple=True, help="Only these, and what they rest on."
)
@click.option("--dry-run", "dry", is_flag=True, help="On a CPU at tiny sizes; the figures mean nothing.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default=Path(), help="The folder to write into."
)
def gpu(minutes: float, chosen: tuple[str, ...], dry: bool, out: Path) -> None:
    """Check and time the decoder on an NVIDIA GPU, beside its peers, against what the device reaches."""
    if not dry:
        _need_device()
    out.mkdir(parents=True, exist_ok=True)
    rows, log = out / ROWS, out / LOG
    for path in (rows, log):
        path.unlink(missing_ok=True)
    sections = [section for section in SECTIONS if not chosen or section.name in {*BASIS, *chosen}]
    outcomes: list[Outcome] = []

    def command_of(section: Section, seconds: float) -> list[str]:
        command = [sys.executable, "-m", "evals.gpu.sections", section.name, str(rows)]
        return [*command, f"{seconds:.1f}", *(["--dry-run"] if dry else [])]

    def finished(outcome: Outcome) -> None:
        outcomes.append(outcome)
        found = load(rows)
        write(out, found, outcomes, dry=dry)
        click.echo(f"{outcome.section}: {outcome.status}, {outcome.seconds:.0f} s {outcome.message}".rstrip())

    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if dry else {})}
    run_sections(
        sections, command_of, seconds=60 * minutes, log=log, finished=finished, environment=environment
    )
    _conclude(out, [row for _, row in load(rows)], outcomes)


def _need_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException(
            f"torch {torch.__version__} finds no CUDA device; --dry-run goes through the motions on a CPU"
        )


def write(out: Path, found: Sequence[tuple[str, Row]], outcomes: Sequence[Outcome], *, dry: bool) -> None:
    """The record and the page, under the name of the device; a record before this one is replaced."""
    from evals.gpu.report import markdown

    rows = [row for _, row in found]
    stem = out / name_of(rows, dry)
    stem.with_suffix(".json").write_text(record(found, outcomes), encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(rows, outcomes), encoding="utf-8")


def name_of(rows: Sequence[Row], dry: bool) -> str:
    """`gpu-nvidia-h200`: the file that a device's figures are in."""
    device = next((fact.text for fact in of_kind(rows, Fact) if fact.name == "device"), "unknown")
    return "gpu-" + ("dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-"))


def record(found: Sequence[tuple[str, Row]], outcomes: Sequence[Outcome]) -> str:
    """Everything as JSON, one row a line: {"measurement", "sections", "rows"}."""
    head: Json = {"measurement": "gpu", "sections": [asdict(outcome) for outcome in outcomes]}
    lines = ",\n".join("  " + json.dumps(to_json(section, row)) for section, row in found)
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'


def _conclude(out: Path, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    """Print the page; rows and log stay only where a section did not come to its end."""
    from evals.gpu import report

    click.echo("\n" + report.markdown(rows, outcomes))
    if all(outcome.status == "done" for outcome in outcomes):
        (out / ROWS).unlink(missing_ok=True)
        (out / LOG).unlink(missing_ok=True)
