"""Opens checkpoints to be checked, and ends commands that only read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from qconvert.cli.exit_codes import error_record, say_error
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.cli.passed_over import PassedOver
    from qconvert.core.dtypes import Json


def open_checkpoint_of(model: str, revision: str | None) -> Checkpoint:
    """Find a model and open it; QConvertError if it has no weights."""
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import require_weights
    from qconvert.checkpoint.resolved import open_found

    checkpoint = open_found(resolve(model, revision=revision))
    require_weights(checkpoint, model)
    return checkpoint


def phrase(value: object) -> str:
    """A finding in words."""
    if isinstance(value, dict):
        plural = {"differs": "differ"}
        return ", ".join(f"{v} {k if v == 1 else plural.get(k, k)}" for k, v in value.items())
    return str(value)


def _told_of(models: Sequence[Json]) -> Json:
    """What --json prints of models that were checked, each with its own `ok`: the only one, or `models`."""
    if len(models) == 1:
        return {"schema": 1, **models[0]}
    return {"schema": 1, "ok": all(each["ok"] for each in models), "models": list(models)}


def end_checks(told: Sequence[Json], failure: CheckFailed | None, passed: PassedOver) -> None:
    """End a command on what it told of models: with what it passed over, or the first check that failed."""
    if passed.errors:
        if passed.as_json:
            click.echo(json.dumps(passed.told("models", told)))
        elif failure is not None:
            say_error(error_record(failure))
        passed.leave()
    if passed.as_json:
        end_with_json(_told_of(told), failure)
    if failure is not None:
        raise failure


def end_with_json(found: Json, failure: CheckFailed | None) -> NoReturn:
    """Print the one JSON object, with the error of a failed check in it, and end."""
    error = {} if failure is None else {"error": error_record(failure)}
    click.echo(json.dumps(found | error))
    raise click.exceptions.Exit(0 if failure is None else failure.exit_code)
