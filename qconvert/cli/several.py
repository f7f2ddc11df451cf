"""Carries a writing command out on every model of its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.cli.exit_codes import tell_with_errors, typed
from qconvert.cli.flags import Flags
from qconvert.cli.many_outputs import check_several, plan_outputs, write_outputs
from qconvert.cli.passed_over import PassedOver
from qconvert.cli.run_conversion import Explained, open_source, plan_output, write
from qconvert.cli.skipping import Tell, one_object
from qconvert.errors import BadRecipe, QConvertError, shown

if TYPE_CHECKING:
    from qconvert.cli.many_outputs import Wanted
    from qconvert.cli.run_conversion import Ask
    from qconvert.plan.request import Request


def write_each(
    models: Sequence[str],
    ask: Callable[[str], Request | Ask | Explained],
    suffix: str,
    flags: Flags,
) -> None:
    """Write one output of each model: the one that `ask` makes of a model by its name, see `write`."""

    def plan(model: str, own: Flags) -> tuple[list[Path], Flags]:
        asked = ask(model)
        source = open_source(model, asked, own)
        if isinstance(asked, Explained):  # which reads a text to choose: that is done in its turn
            return [], own
        found = plan_output(source, asked, suffix, own)
        # In a bucket, what a killed run has left is completed by whom skips what is whole.
        skips = found.complete or (own.skips and own.to_store)
        return [found.out], replace(own, skip_existing=skips, verify_existing=False)

    def one(model: str, own: Flags, tell: Tell) -> list[Path]:
        return [write(model, ask(model), suffix, own, tell)]

    _write_all(models, plan, one, flags, several=len(models) > 1)


def write_several(models: Sequence[str], option: str, wanted: Sequence[Wanted], flags: Flags) -> None:
    """Write several outputs of each model, which is read once; one, where an option names only one."""
    if len(wanted) == 1:
        ((request, suffix),) = wanted
        write_each(models, lambda model: request, suffix, flags)
        return
    with typed():
        check_several(option, flags)

    def plan(model: str, own: Flags) -> tuple[list[Path], Flags]:
        return plan_outputs(model, wanted, own), own

    def all_of(model: str, own: Flags, tell: Tell) -> list[Path]:
        return write_outputs(model, wanted, own, tell)

    _write_all(models, plan, all_of, flags, several=True)


def _write_all(
    models: Sequence[str],
    plan: Callable[[str, Flags], tuple[list[Path], Flags]],
    write_one: Callable[[str, Flags, Tell], list[Path]],
    flags: Flags,
    *,
    several: bool,
) -> None:
    """Write the outputs of all models, in their order, once it is known that all can be written.

    The first that cannot, or that fails, ends it; with --keep-going the others are written all the same.
    `plan` returns the paths of a model's outputs, and the flags to write them with; `write_one` their paths.
    If there are `several`, they have derived names, in the folder --out; under --json they are told as one
    object.
    """
    if not several:
        write_one(models[0], flags, one_object)
        return
    with typed():
        _check_last(models, flags)
        _check_folder(flags.out)
        if flags.push_to is not None:
            raise BadRecipe("--push-to: one repository, and there are several models", "push them one by one")
        if flags.shared and flags.as_json:
            raise BadRecipe(
                "--json: of several models, each may be finished by another of the processes",
                "convert them one by one",
            )
    every = replace(flags, out=None, folder=flags.out or Path())
    passed, made = PassedOver(models, flags.keep_going, flags.as_json), list[dict[str, Any]]()
    tell_with_errors("outputs", made)

    def tell(told: dict[str, Any]) -> None:
        made.append({key: value for key, value in told.items() if key not in ("schema", "ok")})

    possible = [(models[0], every)] if len(models) == 1 else []
    taken: list[Path] = []
    for model in models if len(models) > 1 else ():
        with passed.one(model):
            found, own = plan(model, replace(every, taken=tuple(taken)))
            taken += found
            possible.append((model, own))
    taken.clear()
    for model, own in possible:
        with passed.one(model):
            taken += write_one(model, replace(own, taken=tuple(taken)), tell)
    if flags.as_json:
        one_object(passed.told("outputs", made))
    passed.leave()


def _check_last(models: Sequence[str], flags: Flags) -> None:
    """Raise where the last of several models looks like an output, as other tools accept one there.

    With --keep-going it is a model that fails, and the others are written.
    """
    if flags.out is not None or flags.keep_going:
        return
    first, last = Path(models[0]), Path(models[-1])
    if first.exists() and not last.exists() and last.parent.is_dir():
        hint = f"-o names an output: -o {shown(models[-1])}"
        raise QConvertError(f"{shown(models[-1])}: no such file or folder", hint)


def _check_folder(out: Path | None) -> None:
    if out is not None and out.suffix == ".gguf":
        raise BadRecipe(f"{out}: one file, and there are several models", "name a folder with -o")
