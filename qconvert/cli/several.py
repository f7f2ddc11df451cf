"""Carries a writing command out on every model of its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import error_record, one_of, typed
from qconvert.cli.flags import Flags
from qconvert.cli.run_conversion import write
from qconvert.cli.skipping import one_object
from qconvert.errors import BadRecipe, QConvertError

if TYPE_CHECKING:
    from qconvert.cli.run_conversion import Ask, Explained
    from qconvert.plan.request import Request


def write_each(
    models: Sequence[str],
    ask: Callable[[str], Request | Ask | Explained],
    suffix: str,
    flags: Flags,
) -> None:
    """Write the outputs of all models, in their order, and stop at the first that fails.

    `ask` makes what is asked for of a model by its name, see `write`. The outputs of several have derived
    names, in the folder --out; under --json they are told as one object.
    """
    if len(models) == 1:
        write(models[0], ask(models[0]), suffix, flags)
        return
    with typed():
        _check_folder(flags.out)
        if flags.shared and flags.as_json:
            raise BadRecipe(
                "--json: of several models, each may be finished by another of the processes",
                "convert them one by one",
            )
    made: list[dict[str, Any]] = []
    taken: list[Path] = []
    try:
        for model in models:
            own = replace(flags, out=None, folder=flags.out or Path(), taken=tuple(taken))
            with one_of(models, model):
                taken.append(write(model, ask(model), suffix, own, made.append))
    except QConvertError as error:
        if not (flags.as_json and made):
            raise
        one_object({"schema": 1, "ok": False, "error": error_record(error), "outputs": _plain(made)})
        raise click.exceptions.Exit(error.exit_code) from error
    if flags.as_json:
        one_object({"schema": 1, "ok": True, "outputs": _plain(made)})


def _check_folder(out: Path | None) -> None:
    if out is not None and out.suffix == ".gguf":
        raise BadRecipe(f"{out}: one file, and there are several models", "name a folder with -o")


def _plain(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is told of each output, without what is told of the whole command."""
    return [{key: value for key, value in each.items() if key not in ("schema", "ok")} for each in made]
