"""Runs `qconvert diff`: what differs between two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qconvert.cli.checking import end_with_json, open_checkpoint_of, phrase
from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.check.compare import TensorDifference
    from qconvert.core.dtypes import Json


@click.command("diff", epilog=examples("qconvert diff ./model ./model-int4-g128"))
@model_argument("a")
@model_argument("b")
@click.option("--all", "show_all", is_flag=True, help="List equal tensors too.")
@click.option("--exit-code", is_flag=True, help="Exit with 3 if anything differs.")
@json_option
@quiet_option("only the differences")
@revision_option
def command(
    a: str, b: str, show_all: bool, exit_code: bool, as_json: bool, quiet: bool, revision: str | None
) -> None:
    """Compare two checkpoints tensor by tensor, in whatever layouts they are.

    Quantized weights are compared by the numbers they decode to; fused linears with the parts they
    stack. Steps are units of B's quantization scale.
    """
    from qconvert.check.compare import compare_checkpoints
    from qconvert.check.verify import summary_of
    from qconvert.report.tables import table

    differences = list(compare_checkpoints(open_checkpoint_of(a, revision), open_checkpoint_of(b, revision)))
    listed = [d for d in differences if show_all or d.status != "equal"]
    differ = exit_code and any(d.status != "equal" for d in differences)
    if as_json:
        rows = [_to_json(d) for d in listed]
        asked = {"schema": 1, "ok": not differ, "a": a, "b": b}
        found = {**asked, "summary": summary_of(differences), "tensors": rows}
        end_with_json(
            found, CheckFailed(f"{a} and {b}: they differ", "`tensors` says where") if differ else None
        )
    head = ["tensor", "role", "status", "max", "rel. RMS", "steps"]
    if listed:
        click.echo("\n".join(table(head, [_cells(d) for d in listed], left=3)))
    click.echo(phrase(summary_of(differences)))
    if differ:
        raise CheckFailed(f"{a} and {b}: they differ", "the table above says where")


def _cells(d: TensorDifference) -> list[str]:
    from qconvert.errors import shown

    numbers = ["", ""]
    if d.difference is not None:
        numbers = [f"{d.difference.max_abs:.3g}", f"{d.relative_rms:.3g}"]
    steps = "" if d.max_steps is None else f"{d.max_steps:.2f}"
    return [shown(d.name), d.role, f"{d.status} {d.note}".rstrip(), *numbers, steps]


def _to_json(d: TensorDifference) -> Json:
    from qconvert.convert.manifest import finite

    return {
        "name": d.name,
        "role": d.role,
        "status": d.status,
        "max_abs": finite(d.difference.max_abs) if d.difference else None,
        "relative_rms": finite(d.relative_rms) if d.difference else None,
        "max_steps": None if d.max_steps is None else finite(d.max_steps),
    }
