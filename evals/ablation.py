"""What each step of choosing codes together brings: `python evals/ablation.py MODEL --calibration-text A`.

A row is one conversion in a process of its own, by the functions that the commands call: a method, with the
inputs of linears taken from the original layers or from those quantized before, tokens of calibration text,
the seed of the order of its pieces, and damping. It says KL divergence on each text with its standard error,
seconds and peak memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.accuracy import measured
from evals.processes import timed
from evals.targets import FILE_TYPES
from qconvert.calibrate.calibration import DAMPING, Calibration, Method
from qconvert.calibrate.run import calibrate, read_text
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import parse_ggml_type
from qconvert.core.schemes import parse_scheme
from qconvert.core.version import __version__
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import GGUFTarget, Request
from qconvert.report.tables import table

WEIGHTED = "weighted"
"""Nearest codes, whose scales are weighed by statistics of the same text."""


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion; `shift` as in `Calibration`, `seed` that of the order in which text is read."""

    encoding: str
    method: str = "feedback"
    tokens: int = 16384
    shift: bool = True
    seed: int = 0
    damping: float = DAMPING

    @property
    def name(self) -> str:
        """What it is called as a file."""
        parts = (self.encoding, self.method, self.tokens, "shift" if self.shift else "plain", self.seed)
        return f"{'-'.join(map(str, parts))}-{self.damping}" + (".gguf" if self.in_gguf else "")

    @property
    def in_gguf(self) -> bool:
        return not self.encoding.startswith("int")


def cases(
    encodings: Sequence[str], tokens: Sequence[int], seeds: int, dampings: Sequence[float]
) -> list[Case]:
    """Every step with all tokens for all encodings; the rest for the first of them."""
    most, first = max(tokens), encodings[0]
    found = [
        case
        for each in encodings
        for case in (
            Case(each, "nearest", 0),
            Case(each, WEIGHTED, most),
            Case(each, "feedback", most, shift=False),
            Case(each, "feedback", most),
            Case(each, "two-sided", most),
        )
    ]
    found += [Case(first, "feedback", count) for count in tokens if count != most]
    found += [Case(first, "two-sided", count) for count in tokens if count != most]
    found += [Case(first, "feedback", min(tokens), seed=seed) for seed in range(1, seeds)]
    found += [Case(first, "feedback", min(tokens), damping=share) for share in dampings if share != DAMPING]
    return found


@click.command("ablation")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What codes are chosen on.")
@click.option("--text", "texts", multiple=True, help="What files are measured on.")
@click.option("--encoding", "encodings", multiple=True, default=("int4-g128", "q4_k"), show_default=True)
@click.option("--tokens", multiple=True, type=int, default=(8192, 32768, 65536), show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--damping", "dampings", multiple=True, type=float, default=(0.001, 0.01, 0.05), show_default=True
)
@click.option("--window", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=16, show_default=True, help="Evaluation windows of each text.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
@click.option("--one", help="Make this one case at --out, and nothing else.", hidden=True)
def ablation(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    encodings: tuple[str, ...],
    tokens: tuple[int, ...],
    seeds: int,
    dampings: tuple[float, ...],
    window: int,
    chunks: int,
    out: Path | None,
    one: str | None,
) -> None:
    """Measure the steps of calibrated quantization one by one."""
    if one is not None and out is not None:
        make(model, calibration_text, window, Case(**json.loads(one)), out)
        return
    rows: list[Json] = []
    command = [
        sys.executable,
        __file__,
        model,
        "--calibration-text",
        calibration_text,
        "--window",
        str(window),
    ]
    for case in cases(encodings, tokens, seeds, dampings):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / case.name
            run = timed([*command, "--one", json.dumps(asdict(case)), "-o", str(path)])
            found = {
                Path(text).name: measured(model, [path], text, window, chunks)[path.name] for text in texts
            }
        kls = {name: each["versus"]["kl"]["mean"] for name, each in found.items()}
        rows.append(
            asdict(case) | {"seconds": round(run.seconds, 1), "peak_bytes": run.peak_bytes, "kl": kls}
        )
        click.echo("\n".join(_lines(rows[-1:])[-1:]))
        if out is not None:  # after every case, so that a run that is stopped leaves its figures
            asked = {"model": Path(model).name, "calibration": Path(calibration_text).name, "window": window}
            said = {**asked, "chunks": chunks, "qconvert": __version__, "rows": rows}
            out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    click.echo("\n".join(_lines(rows)))


def make(model: str, text: str, window: int, case: Case, out: Path) -> None:
    """Write the file of one case."""
    source, options = open_model(model), RunOptions(jobs=1)
    if case.in_gguf:
        kind = FILE_TYPES.get(case.encoding, case.encoding)  # the embedding stays, as it does in folders
        target = GGUFTarget(kind, token_embedding_type=parse_ggml_type("bf16"), pure=True)
        request = Request("to-gguf", Recipe(), target=target)
    else:
        request = Request("quantize", Recipe(scheme=parse_scheme(case.encoding)))
    if case.method == "nearest":
        execute(prepare(source, request, options), out)
        return
    read = read_text(source.checkpoint, (text,), case.tokens, window, seed=case.seed)
    if case.method == WEIGHTED:
        weighed = replace(request, statistics=calibrate(source.checkpoint, model, read))
        execute(prepare(source, weighed, options), out)
        return
    method: Method = "two-sided" if case.method == "two-sided" else "feedback"
    calibration = Calibration(read.tokens_BT, read.record, method, damping=case.damping, shift=case.shift)
    execute(prepare(source, request, options, calibration=calibration), out)


def _lines(rows: Sequence[Json]) -> list[str]:
    texts = list(rows[0]["kl"])
    cells = [
        [
            row["encoding"],
            row["method"] + ("" if row["shift"] else ", original inputs"),
            f"{row['tokens']:,}",
            str(row["seed"]),
            f"{row['damping']:g}",
            *(f"{row['kl'][name]['value']:.5f} ± {row['kl'][name]['se'] or 0:.5f}" for name in texts),
            f"{row['seconds']:.0f}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
        ]
        for row in rows
    ]
    head = ["encoding", "method", "tokens", "seed", "damping", *(f"KL on {name}" for name in texts)]
    return table([*head, "seconds", "memory"], cells, left=2)


if __name__ == "__main__":
    ablation()
