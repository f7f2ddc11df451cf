"""Measures what quantizing costs by method and encoding: `python evals/accuracy.py MODEL --text A -o OUT`.

Every file is written by the command that a user would type, in a process of its own, and measured by one
`qconvert eval perplexity` beside the model, on texts that are no part of the calibration text. The figures
are mean KL divergences in nats per token with paired standard errors, bytes, bits per weight, seconds and
peak memory of the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.processes import Run, timed
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.report.tables import table

LATTICES = ("iq3_m", "iq3_s", "iq3_xs", "iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
ENCODINGS: dict[str, tuple[str, ...]] = {
    "int4-g128": ("quantize", "--scheme", "int4-g128"),
    "int4-g32": ("quantize", "--scheme", "int4-g32"),
    "int3-g64": ("quantize", "--scheme", "int3-g64"),
    "mxfp4": ("convert", "--to", "compressed-tensors", "--scheme", "mxfp4"),
    "nvfp4": ("convert", "--to", "compressed-tensors", "--scheme", "nvfp4"),
    **{
        name: ("to-gguf", "--type", name)
        for name in ("q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "q2_k", *LATTICES)
    },
}
"""The commands that write an encoding, by its name."""
METHODS = ("nearest", "weighted", "awq", "feedback", "two-sided")
"""`weighted` is nearest codes with scales weighed by statistics of `qconvert calibrate`; `awq` reads the same
statistics."""
NEEDS_STATISTICS = LATTICES[2:]
"""What is not written without statistics, which feedback measures itself."""


@click.command("accuracy")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What statistics are measured on.")
@click.option("--text", "texts", multiple=True, required=True, help="What files are measured on.")
@click.option("--tokens", default="32k", show_default=True, help="Of calibration text.")
@click.option("--window", default=512, show_default=True, help="Tokens of a calibration window.")
@click.option("--context", default=512, show_default=True, help="Tokens of an evaluation window.")
@click.option("--chunks", default=32, show_default=True, help="Evaluation windows of each text.")
@click.option("--encoding", "encodings", multiple=True, type=click.Choice(list(ENCODINGS)))
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def accuracy(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    tokens: str,
    window: int,
    context: int,
    chunks: int,
    encodings: tuple[str, ...],
    methods: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure methods of choosing codes, encoding by encoding."""
    read = ("--text", calibration_text, "--tokens", tokens, "--window", str(window))
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        statistics = work / "stats"
        timed([sys.executable, "-m", "qconvert", "calibrate", model, *read, "-o", str(statistics), "-q"])
        for encoding in encodings or tuple(ENCODINGS):
            made: dict[Path, tuple[str, Run]] = {}
            for method in methods or METHODS:
                flags = _flags(encoding, method, statistics, read)
                if flags is None:
                    continue
                suffix = ".gguf" if ENCODINGS[encoding][0] == "to-gguf" else ""
                path = work / f"{encoding}-{method}{suffix}"
                made[path] = method, _written(model, encoding, flags, path)
            found = [measured(model, list(made), text, context, chunks) for text in texts]
            for path, (method, run) in made.items():
                per_text = [figures[path.name] for figures in found]
                rows.append(_row(encoding, method, run, per_text, texts))
            click.echo("\n".join(_lines(rows[-len(made) :], texts)))
            if out is not None:  # after every encoding, so that a run that is stopped leaves its figures
                asked = {
                    "model": Path(model).name,
                    "calibration": [Path(calibration_text).name, tokens, window],
                }
                read_as = {"texts": [Path(text).name for text in texts], "context": context, "chunks": chunks}
                record = {**asked, **read_as, "qconvert": __version__, "cores": os.cpu_count(), "rows": rows}
                out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _flags(encoding: str, method: str, statistics: Path, read: Sequence[str]) -> tuple[str, ...] | None:
    """The options of a method; None where an encoding cannot be had by it."""
    if method == "nearest":
        return None if encoding in NEEDS_STATISTICS else ()
    if method == "weighted":
        return "--calibration", str(statistics)
    if method == "awq":
        return "--method", method, "--calibration", str(statistics)
    return "--method", method, *read


def _written(model: str, encoding: str, flags: Sequence[str], path: Path) -> Run:
    command, *options = ENCODINGS[encoding]
    words = [sys.executable, "-m", "qconvert", command, model, *options, *flags, "-o", str(path), "-q"]
    return timed(words)


def measured(model: str, paths: Sequence[Path], text: str, context: int, chunks: int) -> dict[str, Json]:
    """What `eval perplexity` says of files, by their names."""
    words = [sys.executable, "-m", "qconvert", "eval", "perplexity", *map(str, paths), "--reference", model]
    words += ["--text", text, "--context", str(context), "--chunks", str(chunks), "--json", "-q"]
    said = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {each["label"]: each for each in said["models"]}


def _row(encoding: str, method: str, run: Run, found: Sequence[Json], texts: Sequence[str]) -> Json:
    return {
        "encoding": encoding,
        "method": method,
        "bytes": found[0]["size_bytes"],
        "bits_per_weight": found[0]["bits_per_weight"],
        "seconds": round(run.seconds, 1),
        "peak_bytes": run.peak_bytes,
        "kl": {
            Path(text).name: {
                "mean": each["versus"]["kl"]["mean"]["value"],
                "se": each["versus"]["kl"]["mean"]["se"],
                "p99": each["versus"]["kl"]["p99"],
                "top1_agreement": each["versus"]["top1_agreement"]["value"],
            }
            for text, each in zip(texts, found, strict=True)
        },
    }


def _lines(rows: Sequence[Json], texts: Sequence[str]) -> list[str]:
    names = [Path(text).name for text in texts]
    cells = [
        [
            row["encoding"],
            row["method"],
            f"{row['bits_per_weight']:.2f}",
            *(f"{row['kl'][name]['mean']:.5f} ± {row['kl'][name]['se'] or 0:.5f}" for name in names),
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    return table(
        ["encoding", "method", "bpw", *(f"KL on {name}" for name in names), "seconds"], cells, left=2
    )


if __name__ == "__main__":
    accuracy()
