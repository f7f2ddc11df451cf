"""Times whole conversions against copying their input: `python evals/speed.py convert` and `repack`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from evals.processes import Runs, copied, max_memory, options, print_ratios, record, timed
from evals.synthetic import converted, make_checkpoint
from qconvert.core.dtypes import Json
from qconvert.report.tables import size

QUANTIZED = {
    "min-max": ["--min-max", "--no-verify"],
    "min-max, verified": ["--min-max"],
    "scale search": ["--no-verify"],
    "scale search, verified": [],
}
REPACKED = {"repacked": ["--no-verify"], "repacked, verified": []}


@click.command("convert")
@options(shape="qwen2.5-1.5b", rounds=3)
@click.option("--layer-factor", type=click.IntRange(1, 8), default=1, help="That many times the layers.")
@click.option("--bits", type=click.IntRange(2, 8), default=4, show_default=True)
@max_memory
def convert(layer_factor: int, bits: int, **measured: Any) -> None:
    """Time `quantize` on a checkpoint of a real model's shapes against copying its files."""

    def make(folder: Path, shape: str) -> Path:
        return make_checkpoint(folder / f"{shape}-x{layer_factor}", shape, layer_factor=layer_factor)

    words = ("quantize", "--bits", str(bits))
    _measure("", make, words, QUANTIZED, {"layer_factor": layer_factor, "bits": bits}, **measured)


@click.command("repack")
@options(shape="qwen2.5-1.5b", rounds=5)
@click.option("--bits", type=click.Choice(["2", "3", "4", "8"]), default="4", show_default=True)
@click.option("--to", "layout", default="compressed-tensors", show_default=True, help="Layout of the output.")
@max_memory
def repack(bits: str, layout: str, **measured: Any) -> None:
    """Time `qconvert convert` of a GPTQ checkpoint of a real model's shapes against copying its files.

    To compressed-tensors it turns every matrix of words, so it is the dearest exact conversion.
    """

    def make(folder: Path, shape: str) -> Path:
        made = folder / f"{shape}-gptq-int{bits}"
        if not made.is_dir():
            plain = make_checkpoint(folder / f"{shape}-x1", shape)
            converted(plain, made, "quantize", "--scheme", f"int{bits}-g128", "--layout", "gptq", "--min-max")
        return made

    what = f", GPTQ {bits} bits to {layout}"
    _measure(what, make, ("convert", "--to", layout), REPACKED, {"bits": int(bits), "to": layout}, **measured)


def _measure(
    what: str,
    make: Callable[[Path, str], Path],
    words: Sequence[str],
    variants: dict[str, list[str]],
    asked: Json,
    *,
    shape: str,
    rounds: int,
    max_memory: str,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Rounds of copying the shards of a checkpoint and of each variant of a command that reads it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        source, made = make(folder or work, shape), work / "out"
        shards = sorted(source.glob("*.safetensors"))
        command = [sys.executable, "-m", "qconvert", words[0], str(source), *words[1:], "-q", "--overwrite"]
        command += ["--max-memory", max_memory, "-o", str(made)]
        timed([*command, *next(iter(variants.values()))])  # compiles the kernels and warms the page cache
        rows: Runs = {"copy": [], **{name: [] for name in variants}}
        for _ in range(rounds):
            rows["copy"].append(copied(shards, work / "copy"))
            for name, flags in variants.items():
                shutil.rmtree(made, ignore_errors=True)
                rows[name].append(timed([*command, *flags]))
        nbytes = sum(shard.stat().st_size for shard in shards)
    print_ratios(f"{shape}{what} ({size(nbytes)}), --max-memory {max_memory}", rows)
    if out is not None:
        record(out, {"shape": shape, **asked, "max_memory": max_memory}, rows)
