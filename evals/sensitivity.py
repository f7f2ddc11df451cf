"""Holds prices against measurement: `python evals/sensitivity.py MODEL --calibration-text A --text B`.

Each group of linears that loaders want alike is quantized by itself, all else kept, and measured beside the
model; `--target-size` says what it expected. The figures: rank correlation (Spearman) of the expected
with the measured KL divergences, the ratio of both, and how far the groups' divergences add up to that of all
at once.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.commands import qconvert
from evals.divergences import divergences
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.report.tables import table

FINEST = "int8-channel"
"""What is chosen among beside the scheme that is looked at: a target needs two. It divides any row."""


@click.command("sensitivity")
@click.argument("model")
@click.option("--calibration-text", required=True, help="What encodings are priced on.")
@click.option("--text", required=True, help="What files are measured on.")
@click.option("--tokens", default="8k", show_default=True, help="Of calibration text.")
@click.option("--window", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=16, show_default=True, help="Evaluation windows.")
@click.option("--scheme", "schemes", multiple=True, default=("int3-g64",), show_default=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def sensitivity(
    model: str,
    calibration_text: str,
    text: str,
    tokens: str,
    window: int,
    chunks: int,
    schemes: Sequence[str],
    out: Path | None,
) -> None:
    """Compare expected with measured divergences, group by group."""
    read = ("--text", calibration_text, "--tokens", tokens, "--window", str(window))
    found: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        statistics = Path(scratch) / "stats"
        qconvert("calibrate", model, *read, "-o", statistics)
        for scheme in schemes:
            rows = expected_groups(model, scheme, read)
            rows.append({"weights": [n for row in rows for n in row["weights"]], "name": "all at once"})
            paths = [Path(scratch) / f"{scheme}-{number}" for number in range(len(rows))]
            for row, path in zip(rows, paths, strict=True):
                names = "|".join(map(re.escape, row["weights"]))
                rule = ("--rule", f"re:^({names})$={scheme}", "--calibration", statistics)
                qconvert("quantize", model, *rule, "-o", path)
            measured = divergences(model, paths, text, window, chunks)
            for row, path in zip(rows, paths, strict=True):
                kl = measured.mean(path)
                row |= {"kl": kl.value, "se": kl.se}
            found.append(summary(scheme, rows[:-1], rows[-1]["kl"]))
            click.echo("\n".join(_lines(found[-1])))
    if out is not None:
        asked: Json = {
            "model": Path(model).name,
            "calibration": [Path(calibration_text).name, tokens, window],
        }
        asked |= {"text": Path(text).name, "chunks": chunks, "qconvert": __version__}
        out.write_text(json.dumps({**asked, "schemes": found}, indent=1) + "\n", encoding="utf-8")


def expected_groups(model: str, scheme: str, read: Sequence[str]) -> list[Json]:
    """The groups that a target chooses for, with what it expects of a scheme for each."""
    aim = ("--target-size", "32bpw", "--schemes", f"{scheme},{FINEST}", *read, "--dry-run")
    groups = qconvert("quantize", model, *aim)["target"]["groups"]
    return [
        {
            "name": re.sub(r"^model\.layers\.|\.weight$", "", group["weights"][0]),
            "weights": group["weights"],
            "expected_kl": next(o["expected_kl"] for o in group["options"] if o["choice"] == scheme),
        }
        for group in groups
    ]


def summary(scheme: str, rows: Sequence[Json], at_once: float) -> Json:
    """How well the expected divergences of single groups stand for the measured ones."""
    expected_G, measured_G = (np.array([row[key] for row in rows]) for key in ("expected_kl", "kl"))
    return {
        "scheme": scheme,
        "rank_correlation": rank_correlation(expected_G, measured_G),
        "expected_over_measured": [float(q) for q in np.percentile(expected_G / measured_G, (0, 50, 100))],
        "sum_of_expected": float(expected_G.sum()),
        "sum_of_measured": float(measured_G.sum()),
        "all_at_once": at_once,
        "groups": list(rows),
    }


def rank_correlation(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """Spearman's rho: the correlation of the ranks, equal numbers sharing the mean of theirs."""
    return float(np.corrcoef(_ranks(a_N), _ranks(b_N))[0, 1])


def _ranks(x_N: np.ndarray) -> np.ndarray:
    _, number_N, count_U = np.unique(x_N, return_inverse=True, return_counts=True)
    ranks_N: np.ndarray = (count_U.cumsum() - (count_U - 1) / 2)[number_N]
    return ranks_N


def _lines(found: Json) -> list[str]:
    cells = [
        [row["name"], f"{row['expected_kl']:.6f}", f"{row['kl']:.6f} ± {row['se'] or 0:.6f}",
         f"{row['expected_kl'] / row['kl']:.2f}"]
        for row in found["groups"]
    ]  # fmt: skip
    least, median, most = found["expected_over_measured"]
    sums = (found[key] for key in ("sum_of_expected", "sum_of_measured", "all_at_once"))
    expected, measured, at_once = (f"{value:.5f}" for value in sums)
    return [
        *table([found["scheme"], "expected KL", "measured", "ratio"], cells),
        f"{found['scheme']}: rank correlation {found['rank_correlation']:.3f}, "
        f"ratios {least:.2f} to {most:.2f}, median {median:.2f}",
        f"{expected} expected of all, {measured} measured one by one, {at_once} at once",
    ]


if __name__ == "__main__":
    sensitivity()
