"""Runs `qconvert verify`: whether a checkpoint holds what it promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from qconvert.cli import candidates
from qconvert.cli.checking import end_with_json, open_checkpoint_of, phrase, told_of
from qconvert.cli.exit_codes import one_of
from qconvert.cli.options import examples, json_option, models_argument, quiet_option, revision_option
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.check.verify import Verification
    from qconvert.core.dtypes import Json


@click.command(
    "verify",
    epilog=examples("qconvert verify ./Qwen2.5-1.5B-Instruct-int4-g128 --against Qwen/Qwen2.5-1.5B-Instruct"),
)
@models_argument()
@click.option(
    "--against",
    metavar="MODEL",
    shell_complete=candidates.models,
    help="Decode every tensor and compare it with this source.",
)
@json_option
@quiet_option("nothing; the exit code tells")
@revision_option
def command(
    models: tuple[str, ...], against: str | None, as_json: bool, quiet: bool, revision: str | None
) -> None:
    """Check that MODEL holds what its config and manifest promise.

    Headers, names and shapes against the architecture; every byte against the hashes in
    qconvert.json; with --against, every decoded number against the source: kept tensors must be
    equal or rounded to their new type, quantized ones within half a quantization step inside the
    grid's range.
    Exits with 3 when something does not hold, or when the manifest records no hash (--no-verify) and
    there is no --against.
    """
    from qconvert.check.verify import verify

    source = None if against is None else open_checkpoint_of(against, revision)
    told: list[Json] = []
    failure: CheckFailed | None = None
    for model in models:
        with one_of(models, model):
            found = verify(open_checkpoint_of(model, revision), source)
        problems, warnings = list(found.problems), list(found.warnings)
        asked = {"ok": not problems, "model": model}
        told.append({**asked, **found.findings, "problems": problems, "warnings": warnings})
        failure = failure or (_failure(model, models, problems) if problems else None)
        if not (as_json or quiet):
            _print(found, model if len(models) > 1 else "")
    if as_json:
        end_with_json(told_of(told), failed=failure is not None)
    if failure is not None:
        raise failure


# Of a file that is damaged throughout, the first tensors are enough.
_MOST_LISTED = 20


def _print(found: Verification, name: str) -> None:
    """The findings, and whether the model is verified; of several models under their names."""
    for line in found.warnings:
        click.echo(line, err=True)
    if name:
        click.echo(f"{name}:")
    for key, value in found.findings.items():
        said = phrase(value)
        if key == "compared" and not found.problems:
            said = re.sub(r"\bdiffers?\b", "changed by quantizing or rounding alone", said)
        click.echo(f"{key}: {said}")
    if not found.problems:
        click.echo("verified")
    elif len(found.problems) > 1 or name:
        click.echo("\n".join(found.problems[:_MOST_LISTED]))


def _failure(model: str, models: Sequence[str], problems: Sequence[str]) -> CheckFailed:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    unhashed = len(problems) == 1 and "no hashes recorded" in problems[0]
    compare = ", or compare the two with --against SOURCE" if unhashed else ""
    name = f"{model}: " if len(models) > 1 else ""
    return CheckFailed(f"{name}{problems[0]}{more}", f"write the output again from its source{compare}")
