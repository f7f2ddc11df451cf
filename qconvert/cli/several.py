"""Carries a writing command out on every model of its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import error_record, one_of, typed
from qconvert.cli.flags import Flags
from qconvert.cli.many_outputs import check_several, write_outputs
from qconvert.cli.run_conversion import write
from qconvert.cli.skipping import Tell, one_object
from qconvert.errors import BadRecipe, QConvertError

if TYPE_CHECKING:
    from qconvert.cli.many_outputs import Wanted
    from qconvert.cli.run_conversion import Ask, Explained
    from qconvert.plan.request import Request


def write_each(
    models: Sequence[str],
    ask: Callable[[str], Request | Ask | Explained],
    suffix: str,
    flags: Flags,
) -> None:
    """Write one output of each model: the one that `ask` makes of a model by its name, see `write`."""

    def one(model: str, own: Flags, tell: Tell) -> list[Path]:
        return [write(model, ask(model), suffix, own, tell)]

    _write_all(models, one, flags, several=len(models) > 1)


def write_several(models: Sequence[str], option: str, wanted: Sequence[Wanted], flags: Flags) -> None:
    """Write several outputs of each model, which is read once; one, where an option names only one."""
    if len(wanted) == 1:
        ((request, suffix),) = wanted
        write_each(models, lambda model: request, suffix, flags)
        return
    with typed():
        check_several(option, flags)

    def all_of(model: str, own: Flags, tell: Tell) -> list[Path]:
        return write_outputs(model, wanted, own, tell)

    _write_all(models, all_of, flags, several=True)


def _write_all(
    models: Sequence[str],
    write_one: Callable[[str, Flags, Tell], list[Path]],
    flags: Flags,
    *,
    several: bool,
) -> None:
    """Write the outputs of all models, in their order, and stop at the first that fails.

    `write_one` returns the paths of a model's. If there are `several`, they have derived names, in the folder
    --out; under --json they are told as one object.
    """
    if not several:
        write_one(models[0], flags, one_object)
        return
    with typed():
        _check_folder(flags.out)
    made: list[dict[str, Any]] = []
    taken: list[Path] = []
    try:
        for model in models:
            own = replace(flags, out=None, folder=flags.out or Path(), taken=tuple(taken))
            with one_of(models, model):
                taken += write_one(model, own, made.append)
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
