"""`qconvert verify` and `qconvert diff`: is this file what it says, and what differs between two."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import click

from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.check.compare import TensorDifference
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.core.dtypes import Json


@click.command(
    "verify",
    epilog=examples("qconvert verify ./Qwen2.5-1.5B-Instruct-int4-g128 --against Qwen/Qwen2.5-1.5B-Instruct"),
)
@model_argument()
@click.option("--against", metavar="MODEL", help="Decode every tensor and compare it with this source.")
@json_option
@quiet_option("nothing; the exit code tells")
@revision_option
def verify(model: str, against: str | None, as_json: bool, quiet: bool, revision: str | None) -> None:
    """Check that MODEL holds what its config and manifest promise.

    Headers, names and shapes against the architecture; every byte against the hashes in
    qconvert.json; with --against, every decoded number against the source: kept tensors must be
    equal or rounded to their new type, quantized ones within half a quantization step inside the
    grid's range.
    Leaves with 3 when something does not hold, or when the manifest records no hash (--no-verify) and
    there is no --against.
    """
    from qconvert.check.audit import audit, reordered_in
    from qconvert.check.compare import compare_checkpoints
    from qconvert.plan.loader_notices import notice_lines, notices

    checkpoint = _open(model, revision)
    checkpoint.bind(allow_unknown=True)
    findings, problems = audit(checkpoint, compared=against is not None)
    if against is not None:
        source = _open(against, revision)
        differences = list(compare_checkpoints(source, checkpoint, reordered_in(checkpoint)))
        findings["compared"] = _summary(differences)
        problems += [_complaint(d) for d in differences if not _acceptable(d)]
    warnings = notice_lines(notices(checkpoint.tensors, checkpoint.architecture))
    if as_json:
        found = {"schema": 1, "model": model, **findings, "problems": problems, "warnings": warnings}
        _end_with_json(found, failed=bool(problems))
    if not quiet:
        for line in warnings:
            click.echo(line, err=True)
        for key, value in findings.items():
            click.echo(f"{key}: {_phrase(value)}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckFailed(
            problems[0] + more, "write the output again from its source" + _or_compare(problems)
        )
    if not quiet:
        click.echo("verified")


def _or_compare(problems: list[str]) -> str:
    """The other remedy where missing hashes are all that is wrong."""
    alone = len(problems) == 1 and "no hashes recorded" in problems[0]
    return ", or compare the two with --against SOURCE" if alone else ""


def _end_with_json(found: Json, *, failed: bool) -> NoReturn:
    """Print the one JSON object; a failed check is told by the exit code, not by a second one."""
    click.echo(json.dumps(found))
    raise click.exceptions.Exit(CheckFailed.exit_code if failed else 0)


def _acceptable(d: TensorDifference) -> bool:
    """Whether a tensor of the source may differ from the output's in this way: rounded to another type, or
    as quantizing changes numbers.

    A quantized number may lie half a step away, and further only where the search clipped its
    group's range; the bound on the relative error catches a wrong scale or a shifted row.
    """
    if d.status == "equal":
        return True
    worst = _WORST_OF_THREE_VALUES if d.encoding in ("tq1_0", "tq2_0") else _WORST_RELATIVE_RMS
    return d.status == "differs" and (d.rounded or (d.quantized and d.relative_rms < worst))


# int2 with a searched scale loses at most this share of a weight's energy on any distribution seen.
_WORST_RELATIVE_RMS = 0.6
# -1, 0 and 1 times the largest magnitude of 256 weights that were not made for that: most become 0.
_WORST_OF_THREE_VALUES = 0.95


def _complaint(d: TensorDifference) -> str:
    if d.difference is None:
        return f"{d.name}: {d.status} {d.note}".rstrip()
    return f"{d.name}: differs from the source (relative RMS {d.relative_rms:.4g})"


def _phrase(value: object) -> str:
    if isinstance(value, dict):
        plural = {"differs": "differ"}
        return ", ".join(f"{v} {k if v == 1 else plural.get(k, k)}" for k, v in value.items())
    return str(value)


@click.command("diff", epilog=examples("qconvert diff ./model ./model-int4-g128"))
@model_argument("a")
@model_argument("b")
@click.option("--all", "show_all", is_flag=True, help="List equal tensors too.")
@click.option("--exit-code", is_flag=True, help="Leave with 3 when anything differs.")
@json_option
@quiet_option("the differences alone")
@revision_option
def diff(
    a: str, b: str, show_all: bool, exit_code: bool, as_json: bool, quiet: bool, revision: str | None
) -> None:
    """Compare two checkpoints tensor by tensor, in whatever layouts they are.

    Quantized weights are compared by the numbers they decode to; fused linears with the parts they
    stack. Steps are units of B's quantization scale.
    """
    from qconvert.check.compare import compare_checkpoints
    from qconvert.report.tables import table

    differences = list(compare_checkpoints(_open(a, revision), _open(b, revision)))
    listed = [d for d in differences if show_all or d.status != "equal"]
    differ = exit_code and any(d.status != "equal" for d in differences)
    if as_json:
        rows = [_to_json(d) for d in listed]
        found = {"schema": 1, "a": a, "b": b, "summary": _summary(differences), "tensors": rows}
        _end_with_json(found, failed=differ)
    head = ["tensor", "role", "status", "max", "rel. RMS", "steps"]
    if listed:
        click.echo("\n".join(table(head, [_cells(d) for d in listed], left=3)))
    click.echo(_phrase(_summary(differences)))
    if differ:
        raise CheckFailed(f"{a} and {b}: not the same numbers", "the table above says where")


def _open(model: str, revision: str | None) -> Checkpoint:
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint

    return open_checkpoint(resolve(model, revision=revision).path)


def _summary(differences: list[TensorDifference]) -> dict[str, int]:
    return dict(Counter(d.status for d in differences))


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
