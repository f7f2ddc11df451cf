"""Runs `qconvert verify`: whether a checkpoint holds what it promises."""

from __future__ import annotations

import click

from qconvert.cli.checking import end_with_json, open_checkpoint_of, phrase
from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option
from qconvert.errors import CheckFailed


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
    Exits with 3 when something does not hold, or when the manifest records no hash (--no-verify) and
    there is no --against.
    """
    from qconvert.check.verify import verify

    checkpoint = open_checkpoint_of(model, revision)
    found = verify(checkpoint, open_checkpoint_of(against, revision) if against is not None else None)
    problems, warnings = list(found.problems), list(found.warnings)
    if as_json:
        asked = {"schema": 1, "ok": not problems, "model": model}
        told = {**asked, **found.findings, "problems": problems, "warnings": warnings}
        end_with_json(told, failed=bool(problems))
    if not quiet:
        for line in warnings:
            click.echo(line, err=True)
        for key, value in found.findings.items():
            click.echo(f"{key}: {phrase(value)}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        unhashed = len(problems) == 1 and "no hashes recorded" in problems[0]
        compare = ", or compare the two with --against SOURCE" if unhashed else ""
        raise CheckFailed(problems[0] + more, f"write the output again from its source{compare}")
    if not quiet:
        click.echo("verified")
