"""`qconvert verify`: does a checkpoint hold what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qconvert.cli.checking import end_with_json, open_model, phrase, summary_of
from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.check.compare import TensorDifference


@click.command(
    "verify",
    epilog=examples("qconvert verify ./Qwen2.5-1.5B-Instruct-int4-g128 --against Qwen/Qwen2.5-1.5B-Instruct"),
)
@model_argument()
@click.option("--against", metavar="MODEL", help="Decode every tensor and compare it with this source.")
@json_option
@quiet_option("nothing; the exit code tells")
@revision_option
def command(model: str, against: str | None, as_json: bool, quiet: bool, revision: str | None) -> None:
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

    checkpoint = open_model(model, revision)
    checkpoint.bind(allow_unknown=True)
    findings, problems = audit(checkpoint, compared=against is not None)
    if against is not None:
        source = open_model(against, revision)
        differences = list(compare_checkpoints(source, checkpoint, reordered_in(checkpoint)))
        findings["compared"] = summary_of(differences)
        problems += [_complaint(d) for d in differences if not _acceptable(d)]
    warnings = notice_lines(notices(checkpoint.tensors, checkpoint.architecture))
    if as_json:
        found = {"schema": 1, "model": model, **findings, "problems": problems, "warnings": warnings}
        end_with_json(found, failed=bool(problems))
    if not quiet:
        for line in warnings:
            click.echo(line, err=True)
        for key, value in findings.items():
            click.echo(f"{key}: {phrase(value)}")
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
