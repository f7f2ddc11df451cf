"""Runs `qconvert verify`: whether a checkpoint holds what it promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from qconvert.cli import candidates
from qconvert.cli.checking import end_checks, open_checkpoint_of, phrase
from qconvert.cli.exit_codes import tell_with_errors
from qconvert.cli.options import (
    examples,
    json_option,
    keep_going_option,
    models_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.passed_over import PassedOver
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
@keep_going_option
@json_option
@quiet_option("nothing; see the exit code")
@revision_option
def command(
    models: tuple[str, ...],
    against: str | None,
    keep_going: bool,
    as_json: bool,
    quiet: bool,
    revision: str | None,
) -> None:
    """Check that MODEL holds what its config and manifest promise.

    Headers, names and shapes are compared with the architecture; every byte with the hashes in the
    manifest (qconvert.json in a folder, NAME.qconvert.json beside a GGUF); with --against, every decoded
    number with the source: kept tensors must be equal or rounded to their new type, quantized ones within
    half a quantization step inside the grid's range.

    Exits with 3 when something does not hold. It also exits with 3 when nothing is recorded to compare
    with (no manifest, or one of a run with --no-verify) and there is no --against: a changed byte would
    not be seen.
    """
    from qconvert.check.verify import verify

    source = None if against is None else open_checkpoint_of(against, revision)
    told: list[Json] = []
    passed = PassedOver(models, keep_going, as_json)
    tell_with_errors("models", told)
    failure: CheckFailed | None = None
    for model in models:
        with passed.one(model):
            found = verify(open_checkpoint_of(model, revision), source)
            told.append(_to_json(model, found))
            failure = failure or _failure(model, models, found)
            if not (as_json or quiet):
                _print(found, model if len(models) > 1 else "")
    end_checks(told, failure, passed)


def _to_json(model: str, found: Verification) -> Json:
    verdict = {"ok": found.verdict == "verified", "model": model, "verdict": found.verdict}
    return {
        **verdict,
        **found.findings,
        "problems": list(found.problems),
        "warnings": list(found.warnings),
    }


# Of a file that is damaged throughout, the first tensors are enough.
_MOST_LISTED = 20


def _print(found: Verification, name: str) -> None:
    """The findings, and whether the model is verified; of several models under their names."""
    for line in found.warnings:
        click.echo(f"Warning: {line}", err=True)
    if name:
        click.echo(f"{name}:")
    for key, value in found.findings.items():
        said = phrase(value)
        if key == "compared" and not found.problems:
            said = re.sub(r"\bdiffers?\b", "changed only by quantizing or rounding", said)
        click.echo(f"{key}: {said}")
    if found.verdict == "verified":
        click.echo("verified")
    elif len(found.problems) > 1 or (found.problems and name):
        click.echo("\n".join(found.problems[:_MOST_LISTED]))


def _failure(model: str, models: Sequence[str], found: Verification) -> CheckFailed | None:
    """What to say of a model that is not verified."""
    if found.verdict == "unrecorded":
        return CheckFailed(
            f"{model}: structure and numbers are sound, but nothing is recorded to compare its bytes with",
            "no damage was found; --against SOURCE compares every number (`to-gguf --manifest` keeps hashes)",
        )
    if not found.problems:
        return None
    more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
    name = f"{model}: " if len(models) > 1 else ""
    return CheckFailed(f"{name}{found.problems[0]}{more}", "write the output again from its source")
