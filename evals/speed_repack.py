"""Repacking a quantized checkpoint against copying its bytes: `python evals/speed.py repack`.

GPTQ to compressed-tensors moves every code to another place, so it is the dearest exact conversion.
Figures as in `speed_convert`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click

from qconvert.evals.speed_convert import Run, copied, print_ratios, record, timed
from qconvert.evals.synthetic import SHAPES, make_checkpoint

VARIANTS = {"repacked": ["--no-verify"], "repacked, verified": []}


@click.command("repack")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-1.5b", show_default=True)
@click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), default="4", show_default=True)
@click.option("--to", "layout", default="compressed-tensors", show_default=True, help="Layout of the output.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--max-memory", default="512MB", show_default=True)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Keep the checkpoint here for reuse.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def repack(
    shape: str,
    bits: str,
    layout: str,
    rounds: int,
    max_memory: str,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time `convert` of a GPTQ checkpoint of a real model's shapes against copying its files."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        source = _gptq(folder or work, shape, bits)
        shards = sorted(source.glob("*.safetensors"))
        nbytes = sum(shard.stat().st_size for shard in shards)
        command = [sys.executable, "-m", "qconvert", "convert", str(source), "--to", layout, "-q"]
        command += ["--max-memory", max_memory, "--overwrite", "-o", str(work / "out")]
        timed([*command, "--no-verify"])  # compiles the kernels and warms the page cache
        rows: dict[str, list[Run]] = {"copy": [], **{name: [] for name in VARIANTS}}
        for _ in range(rounds):
            rows["copy"].append(copied(shards, work / "copy"))
            for name, flags in VARIANTS.items():
                shutil.rmtree(work / "out", ignore_errors=True)
                rows[name].append(timed([*command, *flags]))
    print_ratios(f"{shape}, GPTQ {bits} bits to {layout}", rows, max_memory, nbytes)
    if out is not None:
        asked = {"shape": shape, "bits": int(bits), "to": layout, "max_memory": max_memory}
        record(out, asked, rows)


def _gptq(folder: Path, shape: str, bits: str) -> Path:
    """A GPTQ checkpoint of a named shape, made from seeded random weights unless it is there."""
    made = folder / f"{shape}-gptq-int{bits}"
    if not made.is_dir():
        plain = make_checkpoint(folder / f"{shape}-x1", shape)
        scheme = ["--scheme", f"int{bits}-g128", "--layout", "gptq", "--min-max"]
        timed([sys.executable, "-m", "qconvert", "quantize", str(plain), *scheme, "-q", "-o", str(made)])
    return made
