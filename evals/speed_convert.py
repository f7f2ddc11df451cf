"""Times whole conversions against copying their input: `python evals/speed.py convert` and `repack`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from evals.processes import Runs, beside_copying, print_ratios, record, timed
from evals.synthetic import SHAPES, make_checkpoint
from qconvert.report.tables import size

QUANTIZED = {
    "min-max": ["--min-max", "--no-verify"],
    "min-max, verified": ["--min-max"],
    "scale search": ["--no-verify"],
    "scale search, verified": [],
}
REPACKED = {"repacked": ["--no-verify"], "repacked, verified": []}
_QCONVERT = [sys.executable, "-m", "qconvert"]

_shape = click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen2.5-1.5b", show_default=True)
_max_memory = click.option("--max-memory", default="512MB", show_default=True)
_folder = click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Keep the checkpoint here for reuse."
)
_out = click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too."
)


@click.command("convert")
@_shape
@click.option("--layer-factor", type=click.IntRange(1, 8), default=1, help="That many times the layers.")
@click.option("--bits", type=click.IntRange(2, 8), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@_max_memory
@_folder
@_out
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
        command = [*_QCONVERT, "quantize", str(source), "--bits", str(bits)]
        rows, title = _measure(source, command, QUANTIZED, work, rounds, max_memory)
    print_ratios(f"{shape} {title}", rows)
    if out is not None:
        record(
            out, {"shape": shape, "layer_factor": layer_factor, "bits": bits, "max_memory": max_memory}, rows
        )


@click.command("repack")
@_shape
@click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), default="4", show_default=True)
@click.option("--to", "layout", default="compressed-tensors", show_default=True, help="Layout of the output.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@_max_memory
@_folder
@_out
def repack(
    shape: str,
    bits: str,
    layout: str,
    rounds: int,
    max_memory: str,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time `qconvert convert` of a GPTQ checkpoint of a real model's shapes against copying its files.

    To compressed-tensors it turns every matrix of words, so it is the dearest exact conversion.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        source = _gptq(folder or work, shape, bits)
        command = [*_QCONVERT, "convert", str(source), "--to", layout]
        rows, title = _measure(source, command, REPACKED, work, rounds, max_memory)
    print_ratios(f"{shape}, GPTQ {bits} bits to {layout} {title}", rows)
    if out is not None:
        record(out, {"shape": shape, "bits": int(bits), "to": layout, "max_memory": max_memory}, rows)


def _measure(
    source: Path, command: list[str], variants: dict[str, list[str]], work: Path, rounds: int, max_memory: str
) -> tuple[Runs, str]:
    """The runs of all variants, and what the heading says of them."""
    shards = sorted(source.glob("*.safetensors"))
    command = [*command, "-q", "--overwrite", "--max-memory", max_memory]
    rows = beside_copying(shards, command, variants, work, rounds)
    nbytes = sum(shard.stat().st_size for shard in shards)
    return rows, f"({size(nbytes)}), --max-memory {max_memory}"


def _gptq(folder: Path, shape: str, bits: str) -> Path:
    """A GPTQ checkpoint of a named shape, made from seeded random weights unless it is there."""
    made = folder / f"{shape}-gptq-int{bits}"
    if not made.is_dir():
        plain = make_checkpoint(folder / f"{shape}-x1", shape)
        scheme = ["--scheme", f"int{bits}-g128", "--layout", "gptq", "--min-max"]
        timed([*_QCONVERT, "quantize", str(plain), *scheme, "-q", "-o", str(made)])
    return made
