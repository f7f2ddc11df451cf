"""Runs `qconvert eval weights`: what a quantized model's weights have lost, without a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.eval_output import check_target, command_line, report_option, show_report, write
from qconvert.cli.events import stage_to
from qconvert.cli.options import (
    events_option,
    examples,
    json_option,
    model_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.progress import counted
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.evaluate.weights_report import WeightReport


@click.command(
    "weights",
    short_help="Errors of the weights, by role and layer.",
    epilog=examples("qconvert eval weights ./model ./model-int4-g128"),
)
@model_argument("a")
@model_argument("b")
@report_option
@json_option
@quiet_option("only the report")
@events_option
@revision_option
def weights(
    a: str,
    b: str,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    events: Path | None,
    revision: str | None,
) -> None:
    """Measure the errors of B's weights against A's, by role and layer.

    A is the original model, B what was made of it. Needs no text and no decoder.
    """
    check_target(out)
    report = compared((a, b), events, revision=revision, quiet=quiet or as_json, related=True)
    report = replace(report, command=command_line())
    if out is not None:
        write(report, out, quiet=quiet or as_json)
    show_report(report, as_json=as_json)


def compared(
    models: tuple[str, str],
    events: Path | None,
    *,
    labels: tuple[str, str] | None = None,
    revision: str | None = None,
    quiet: bool = False,
    related: bool = False,
) -> WeightReport:
    """The errors of the weights of the second model against those of the first; told as it goes.

    BadRecipe where they should be `related`, and have no weight in common.
    """
    from qconvert.evaluate.measure import weights as measured

    with (
        stage_to(events, "compare", models, "weight") as lines,
        counted("weight", talks=not quiet, also=lines.tell) as progress,
    ):
        report = measured(*models, labels=labels, revision=revision, progress=progress)
        if related and not (report.errors or report.equal):
            pair = " and ".join(models)
            raise BadRecipe(f"{pair}: no weight of one is in the other", "compare two forms of one model")
    return report
