"""Holds mixes against one encoding throughout, at the same bytes: `python evals/targets.py MODEL --text A`.

Each case quantizes all linears alike, then asks `--target-size` for exactly as many bytes, and measures both
files beside the model. A case is lost where the mix has the larger mean KL divergence.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.accuracy import measured
from evals.processes import timed
from qconvert.core.version import __version__
from qconvert.report.tables import table

CASES = ("int2-g32", "int3-g128", "int3-g64", "int3-g32", "int4-g128", "int4-g64", "int4-g32", "int5-g128",
         "int5-g32", "int6-g128")  # fmt: skip
CHOICES = (
    "int2-g32,int3-g128,int3-g64,int3-g32,int4-g128,int4-g64,int4-g32,int5-g128,int5-g32,int6-g128,int8-g128"
)


@click.command("targets")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What encodings are priced on.")
@click.option("--text", required=True, help="What files are measured on.")
@click.option("--tokens", default="8k", show_default=True, help="Of calibration text.")
@click.option("--window", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=16, show_default=True, help="Evaluation windows.")
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), default=CASES)
@click.option("--method", default="nearest", type=click.Choice(["nearest", "feedback"]), show_default=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def targets(
    model: str,
    calibration_text: str,
    text: str,
    tokens: str,
    window: int,
    chunks: int,
    cases: Sequence[str],
    method: str,
    out: Path | None,
) -> None:
    """Compare mixes with uniform files of the same size."""
    read = ("--text", calibration_text, "--tokens", tokens, "--window", str(window))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        statistics = Path(scratch) / "stats"
        _run("calibrate", model, *read, "-o", statistics)
        for case in cases:
            same, mix = Path(scratch) / case, Path(scratch) / f"{case}-mix"
            how = ("--method", method, *read) if method != "nearest" else ("--calibration", statistics)
            _run("quantize", model, "--scheme", case, *how, "-o", same)
            nbytes = sum(file.stat().st_size for file in same.glob("*.safetensors"))
            aim = ("--target-size", f"{nbytes}B", "--schemes", CHOICES, "--method", method)
            _run("quantize", model, *aim, *read, "-o", mix)
            found = measured(model, [same, mix], text, window, chunks)
            row = {"case": case, "bytes": nbytes}
            for name, path in (("uniform", same), ("mix", mix)):
                kl = found[path.name]["versus"]["kl"]["mean"]
                row |= {f"{name}_bytes": found[path.name]["size_bytes"], f"{name}_kl": kl["value"]}
            rows.append(row)
            click.echo(f"{case}: {row['uniform_kl']:.5f} -> {row['mix_kl']:.5f}")
    cells = [
        [
            r["case"],
            f"{r['uniform_bytes']:,}",
            f"{r['mix_bytes']:,}",
            f"{r['uniform_kl']:.5f}",
            f"{r['mix_kl']:.5f}",
        ]
        for r in rows
    ]
    click.echo("\n".join(table(["uniform", "its bytes", "the mix's", "its KL", "the mix's"], cells)))
    lost = sum(row["mix_kl"] > row["uniform_kl"] for row in rows)
    click.echo(f"{len(rows)} cases, {lost} lost")
    if out is not None:
        asked = {"model": Path(model).name, "method": method, "tokens": tokens, "qconvert": __version__}
        out.write_text(json.dumps({**asked, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _run(*words: object) -> None:
    timed([sys.executable, "-m", "qconvert", *map(str, words), "-q"])


if __name__ == "__main__":
    targets()
