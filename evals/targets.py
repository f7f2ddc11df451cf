"""Holds mixes against one encoding throughout, at the same bytes: `python evals/targets.py MODEL --text A`.

Each case quantizes all linears alike (a GGUF: all weights), then asks `--target-size` for exactly as many
bytes, and measures both files beside the model, paired token by token. A case is lost where the mix has the
larger mean KL divergence. What the command expected of both is written beside what was measured. Prices are
kept in a file, so that all cases of one kind cost one run of the calibration text. With `--kl`, integers are
mixed for a divergence instead, which is measured beside the one asked for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.commands import qconvert
from evals.divergences import divergences
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.report.tables import table

SCHEMES = ("int2-g32", "int3-g128", "int3-g32", "int4-g128", "int4-g32", "int5-g32", "int6-g128", "int8-g128")
CHANNELS = ("int2-channel", "int3-channel", "int4-channel", "int5-channel", "int6-channel", "int8-channel")
TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
BLOCKS_OF_32 = ("q4_0", "iq4_nl", "q4_1", "q5_0", "q5_1", "q8_0")
CHOICES = (SCHEMES, CHANNELS, TYPES, BLOCKS_OF_32)
"""What mixes choose among: folders integers, files GGUF types. All but the smallest and largest are cases."""
CASES = tuple(case for choices in CHOICES for case in choices[1:-1])
FILE_TYPES = {"q3_k": "q3_k_s", "q4_k": "q4_k_s", "q5_k": "q5_k_s"}
"""Names of file types where they differ from those of the types."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A model, how its encodings are priced and made, and how its files are measured."""

    model: str
    text: str
    read: tuple[str, ...]
    method: str
    window: int
    chunks: int
    prices: Path

    @property
    def aims(self) -> tuple[object, ...]:
        """The options that are common to all targets."""
        return ("--method", self.method, *self.read, "--prices", self.prices)


@click.command("targets")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What encodings are priced on.")
@click.option("--text", required=True, help="What files are measured on.")
@click.option("--tokens", default="8k", show_default=True, help="Of calibration text.")
@click.option("--window", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=16, show_default=True, help="Evaluation windows.")
@click.option("--case", "cases", multiple=True, type=click.Choice(CASES), default=CASES)
@click.option("--kl", "kls", multiple=True, type=float, help="Ask for these divergences, in nats per token.")
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
    kls: Sequence[float],
    method: str,
    out: Path | None,
) -> None:
    """Compare mixes with uniform files of the same size."""
    read = ("--text", calibration_text, "--tokens", tokens, "--window", str(window))
    lines = _divergence_lines if kls else _lines
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        statistics, prices = Path(scratch) / "stats", Path(scratch) / "prices.safetensors"
        asked = Asked(model, text, read, method, window, chunks, prices)
        if method == "nearest" and not kls:
            qconvert("calibrate", model, *read, "-o", statistics)
        held = cases if blocks_of_256(model) else [case for case in cases if case not in TYPES]
        if len(held) < len(cases):
            click.echo("K types are left out: rows of this model are no multiple of 256", err=True)
        for case in kls or held:
            if isinstance(case, str):
                rows.append(_case(case, asked, statistics, Path(scratch)))
            else:
                rows.append(_divergence(case, asked, Path(scratch)))
            click.echo("\n".join(lines(rows[-1:])[-1:]))
            if out is not None:  # after every case, so that a run that is stopped leaves its figures
                texts: Json = {"calibration": [Path(calibration_text).name, tokens, window]}
                texts |= {"text": Path(text).name, "chunks": chunks}
                said = {"model": Path(model).name, "method": method, **texts, "qconvert": __version__}
                out.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    click.echo("\n".join(lines(rows)))
    if kls:
        return
    lost = [row for row in rows if row["mix_minus_uniform"]["value"] > 0]
    click.echo(f"{len(rows)} cases, {len(lost)} lost")


def blocks_of_256(model: str) -> bool:
    """Whether all rows of a model's linears have the blocks of K types."""
    config = open_checkpoint(resolve(model).path).config
    return not any(config[key] % 256 for key in ("hidden_size", "intermediate_size"))


def _case(case: str, asked: Asked, statistics: Path, scratch: Path) -> Json:
    """One encoding throughout, and the mix of its size."""
    choices = next(each for each in CHOICES if case in each[1:-1])
    gguf = choices in (TYPES, BLOCKS_OF_32)
    same, mix = (scratch / f"{name}{'.gguf' if gguf else ''}" for name in (case, f"{case}-mix"))
    command = ("to-gguf" if gguf else "quantize", asked.model)
    alike = ("--type", FILE_TYPES.get(case, case), "--pure") if gguf else ("--scheme", case)
    nearest = asked.method == "nearest"
    how = ("--calibration", statistics) if nearest else ("--method", asked.method, *asked.read)
    qconvert(*command, *alike, *how, "-o", same)
    nbytes = sum(file.stat().st_size for file in ([same] if gguf else same.glob("*.safetensors")))
    aim = ("--target-size", f"{nbytes}B", "--types" if gguf else "--schemes", ",".join(choices))
    said = qconvert(*command, *aim, *asked.aims, "-o", mix)["target"]
    found = divergences(asked.model, [same, mix], asked.text, asked.window, asked.chunks)
    options = [option for group in said["groups"] for option in group["options"]]
    alone = sum(option["expected_kl"] for option in options if option["choice"] == case)
    taken = {group["choice"] for group in said["groups"]}
    row: Json = {"case": case, "encodings": len(taken), "checked": said.get("measured_kl")}
    for name, path, expected in (("uniform", same, alone), ("mix", mix, said["expected_kl"])):
        kl = found.mean(path)
        row[name] = {"bytes": found.models[path].size_bytes, "kl": kl.value, "se": kl.se}
        row[name] |= {"expected_kl": expected, "expected_over_measured": expected / kl.value}
    paired = found.difference(mix, same)
    return row | {"mix_minus_uniform": {"value": paired.value, "se": paired.se}}


def _divergence(kl: float, asked: Asked, scratch: Path) -> Json:
    """The smallest mix for a divergence, measured on the text."""
    out = scratch / f"kl-{kl}"
    aim = ("--target-kl", str(kl), "--schemes", ",".join(SCHEMES))
    said = qconvert("quantize", asked.model, *aim, *asked.aims, "-o", out)["target"]
    found = divergences(asked.model, [out], asked.text, asked.window, asked.chunks)
    measured = found.mean(out)
    row: Json = {"asked": kl, "expected_kl": said["expected_kl"], "checked": said.get("measured_kl")}
    return row | {"bytes": found.models[out].size_bytes, "kl": measured.value, "se": measured.se}


def _divergence_lines(rows: Sequence[Json]) -> list[str]:
    cells = [
        [
            f"{row['asked']:g}",
            f"{row['expected_kl']:.5f}",
            f"{row['kl']:.5f} ± {row['se'] or 0:.5f}",
            f"{row['kl'] / row['asked']:.2f}",
            f"{row['bytes']:,}",
        ]
        for row in rows
    ]
    return table(["KL asked for", "expected", "measured", "measured / asked", "bytes"], cells)


def _lines(rows: Sequence[Json]) -> list[str]:
    cells = []
    for row in rows:
        same, mix, paired = row["uniform"], row["mix"], row["mix_minus_uniform"]
        kls = (f"{same['kl']:.5f}", f"{mix['kl']:.5f}", f"{paired['value']:+.5f} ± {paired['se'] or 0:.5f}")
        ratios = (f"{each['expected_over_measured']:.2f}" for each in (same, mix))
        cells.append([row["case"], f"{same['bytes']:,}", f"{mix['bytes']:,}", *kls, *ratios])
    head = ["uniform", "its bytes", "the mix's", "its KL", "the mix's", "difference", "expected / measured"]
    return table([*head, "of the mix"], cells)


if __name__ == "__main__":
    targets()
