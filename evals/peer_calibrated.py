"""Compares calibrated files with those of peers: same text, same tokens, same evaluation.

Usage: python evals/peer_calibrated.py MODEL --calibration-text A --text B --peer auto-round=PYTHON -o OUT

PYTHON is an interpreter that has the peer (`evals/peer_makers.py` says which peers there are, and with what
settings). With `--tokens-file TOKENS.npy` the tokens are written and nothing else is done: `peer_makers.py`
may then run for hours elsewhere, and `--peer auto-round=FOLDER` measures what it made. llama-quantize comes
with cyllama, where it is installed here. Files are measured by one `qconvert eval perplexity` for each text.
Ours are made with one thread; with OMP_NUM_THREADS=1 so are those of peers, and user seconds compare them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.accuracy import measured
from evals.processes import timed
from qconvert.calibrate.run import read_text
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.report.tables import table

OURS = {
    "qconvert int4-g128": ("quantize", "--scheme", "int4-g128"),
    "qconvert q4_k_m": ("to-gguf", "--type", "q4_k_m"),
}
COST = ("seconds", "user_seconds", "peak_bytes")
MAKERS = Path(__file__).parent / "peer_makers.py"


@click.command("peers")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What codes are chosen on.")
@click.option("--text", "texts", multiple=True, required=True, help="What files are measured on.")
@click.option("--tokens", default=32768, show_default=True, help="Of calibration text.")
@click.option("--window", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=32, show_default=True, help="Evaluation windows of each text.")
@click.option("--method", "methods", multiple=True, default=("feedback", "two-sided"), show_default=True)
@click.option("--ours", multiple=True, type=click.Choice(list(OURS)), default=tuple(OURS), show_default=True)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME[:OPTION]=PYTHON|FOLDER",
    help="A peer to run; or what it made, with FOLDER.json beside it.",
)
@click.option("--tokens-file", type=click.Path(path_type=Path), help="Write the tokens here, and end.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def compare(
    model: str,
    calibration_text: str,
    texts: tuple[str, ...],
    tokens: int,
    window: int,
    chunks: int,
    methods: tuple[str, ...],
    ours: tuple[str, ...],
    peers: tuple[str, ...],
    tokens_file: Path | None,
    out: Path | None,
) -> None:
    """Make and measure files of ours and of peers."""
    rows: list[Json] = []

    def add(name: str, path: Path, row: Json) -> None:
        found = {Path(text).name: measured(model, [path], text, window, chunks)[path.name] for text in texts}
        one = next(iter(found.values()))
        kls = {text: each["versus"]["kl"]["mean"] for text, each in found.items()}
        rows.append({"file": name, "bits_per_weight": one["bits_per_weight"], "kl": kls} | row)
        click.echo("\n".join(_lines(rows[-1:])[-1:]))
        if out is not None:  # after every file, so that a run that is stopped leaves its figures
            asked: Json = {
                "model": Path(model).name,
                "calibration": [Path(calibration_text).name, tokens, window],
            }
            said = {**asked, "chunks": chunks, "qconvert": __version__, "rows": rows}
            out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    read = ("--text", calibration_text, "--tokens", str(tokens), "--window", str(window))
    folder = resolve(model).path
    ids_BT = read_text(open_checkpoint(folder), (calibration_text,), tokens, window).tokens_BT
    if tokens_file is not None:
        np.save(tokens_file, ids_BT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        ids = work / "tokens.npy"
        np.save(ids, ids_BT)
        for name in ours:
            command, *options = OURS[name]
            for method in methods:
                path = work / (
                    f"{name}-{method}".replace(" ", "-") + (".gguf" if command == "to-gguf" else "")
                )
                words = [
                    command,
                    model,
                    *options,
                    "--method",
                    method,
                    *read,
                    "-o",
                    str(path),
                    "-q",
                    "-j",
                    "1",
                ]
                run = timed([sys.executable, "-m", "qconvert", *words])
                cost = {"seconds": round(run.seconds, 1), "user_seconds": round(run.user_seconds, 1)}
                add(f"{name}, {method}", path, {**cost, "peak_bytes": run.peak_bytes})
        if find_spec("cyllama"):
            add(*_llama_quantize(model, read, work))
        for peer in peers:
            name, _, given = peer.partition("=")
            if not Path(given).is_dir():
                made, path = _run(name, given, folder, ids, work), work / name.replace(":", "-")
            else:
                made, path = json.loads(Path(f"{given}.json").read_text()), Path(given)
            cost = {key: made.pop(key) for key in COST if key in made}
            add(name, path, {**cost, "versions": made})
    click.echo("\n".join(_lines(rows)))


def _llama_quantize(model: str, read: tuple[str, ...], work: Path) -> tuple[str, Path, Json]:
    """Q4_K_M by llama-quantize, with the importance matrix of the same tokens."""
    from importlib.metadata import version

    from evals.llama_quantize import quantize_as_llama_cpp
    from qconvert.formats.gguf.imatrix import read_imatrix
    from qconvert.plan.gguf.file_types import find_file_type

    plain, imatrix, made = (work / f"{name}.gguf" for name in ("plain", "imatrix", "llama-quantize-q4_k_m"))
    timed([sys.executable, "-m", "qconvert", "to-gguf", model, "--type", "bf16", "-o", str(plain), "-q"])
    timed([sys.executable, "-m", "qconvert", "calibrate", model, *read, "--imatrix", str(imatrix)])
    means = {name: np.array(each, np.float32) for name, each in read_imatrix(imatrix).means.items()}
    quantize_as_llama_cpp(plain, made, find_file_type("q4_k_m").number, imatrix=means)
    return "llama-quantize q4_k_m, imatrix", made, {"versions": {"cyllama": version("cyllama")}}


def _run(name: str, python: str, folder: Path, ids: Path, work: Path) -> Json:
    """Have a peer make its files; what it says of them."""
    maker, _, option = name.partition(":")
    path, said = work / name.replace(":", "-"), work / f"{maker}.json"
    words = [python, str(MAKERS), maker, str(folder), str(ids), str(path), *([option] if option else [])]
    timed([*words, "--said", str(said)])
    found: Json = json.loads(said.read_text())
    return found


def _lines(rows: list[Json]) -> list[str]:
    texts = list(rows[0]["kl"])
    cells = [
        [
            row["file"],
            f"{row['bits_per_weight']:.2f}",
            *(f"{row['kl'][text]['value']:.5f} ± {row['kl'][text]['se'] or 0:.5f}" for text in texts),
            f"{row['user_seconds']:.0f}" if "user_seconds" in row else "",
        ]
        for row in rows
    ]
    return table(["file", "bpw", *(f"KL on {text}" for text in texts), "user seconds"], cells, left=1)


if __name__ == "__main__":
    compare()
