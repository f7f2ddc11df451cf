"""Gives all linears codes of a table (FP8, FP4, NF4) in `quantize`, as `convert` does.

Such a scheme belongs to a layout. Rules give integers, so that beside such a scheme there are none.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qconvert.cli.flags import Flags
from qconvert.cli.several import write_each
from qconvert.core.scheme_names import named_scheme, unwritten
from qconvert.core.schemes import Scheme, is_integers
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.plan.recipe import Recipe, Rule

# What can be asked for beside such a scheme.
_BESIDE = ("scheme", "layout", "keeps", "pad_to_tp")
_OPTIONS = {
    "rules": "--rule",
    "symmetric": "--sym, --asym",
    "search": "--scale-search, --min-max",
    "recipe_file": "--recipe",
    "tie": "--tie, --untie",
}


def named(scheme: str | None, layout: str | None, option: str = "--layout") -> tuple[str | None, str | None]:
    """The scheme and the layout that a scheme's name means, which may be another tool's.

    Raises BadRecipe for a name that means something that is not written, or another layout than is given
    by `option`.
    """
    if not scheme or (layout and registry.traits_of(layout).codebook(scheme)):
        return scheme, layout
    found, other = named_scheme(scheme), unwritten(scheme)
    if found is None and other is not None:
        raise BadRecipe(f"scheme {scheme!r}: {other.fact}", other.hint)
    if found is None:
        return scheme, layout or _layout_of(scheme)
    if found.layout and layout and layout != found.layout:
        own = registry.traits_of(layout).codebook(found.scheme)
        like = f", or --scheme {own.name}, the codes of {layout} that are most like it" if own else ""
        raise BadRecipe(
            f"{option} {layout}: scheme {scheme} names settings of {found.layout}",
            f"write {option} {found.layout}{like}",
        )
    return found.scheme, found.layout or layout


def _layout_of(scheme: str) -> str | None:
    """The layout for a codebook scheme by its full name: the default one, or the only one that has it."""
    if is_integers(scheme):
        return None
    exact = [t.name for t in registry.all_traits() if any(own.name == scheme for own in t.codebooks)]
    return registry.DEFAULT if registry.DEFAULT in exact else exact[0] if len(exact) == 1 else None


def codebook_of(asked: Mapping[str, Any]) -> str:
    """The codebook scheme that all linears get, "" for integers.

    Raises BadRecipe for an option that has no place beside it.
    """
    scheme, layout = asked["scheme"], asked["layout"]
    found = registry.traits_of(layout).codebook(scheme) if scheme and layout else None
    if found is None or is_integers(scheme):
        return ""
    for name, value in asked.items():
        if name in _BESIDE or value in (None, ()) or (name == "allow_smaller_group" and not value):
            continue
        raise BadRecipe(
            f"{_OPTIONS.get(name, '--' + name.replace('_', '-'))}: given with {found.name}, "
            "which has no integers to choose",
            "leave it out; --keep leaves weights as they are",
        )
    return found.name


def write(models: Sequence[str], asked: Mapping[str, Any], table: str, flags: Flags) -> None:
    """Give all linears codes of a table but those that are kept, as `convert` does."""
    from qconvert.plan.passes.transcode import Target

    layout, rules = asked["layout"], tuple(Rule(select, None) for select in asked["keeps"])
    recipe = Recipe(layout=layout, rules=rules, pad_to_tp=asked["pad_to_tp"])
    request = flags.request("quantize", recipe, target=Target(layout, None, table))
    write_each(models, lambda model: request, suffix(layout, table, None), flags)


def suffix(layout: str, table: str, integers: Scheme | None) -> str:
    """What the derived name of an output says: the scheme that is asked for, and a layout but the default."""
    scheme = table or (integers.label if integers else "")
    return "-".join(
        part for part in (scheme, layout if layout != registry.DEFAULT or not scheme else "") if part
    )


def send_on(models: Sequence[str], asked: Mapping[str, Any], out: Path | None) -> None:
    """Raise BadRecipe with the command to type where a table of numbers was asked for beside integers.

    Such a table belongs to a layout, which `qconvert convert` names.
    """
    from qconvert.plan.passes.transcode import layouts_with

    layout, schemes = asked["layout"] or "", [rule.rpartition("=")[2] for rule in asked["rules"]]
    table = next(filter(layouts_with, [asked["scheme"] or "", *schemes]), None)
    if table is None:
        return
    held = layouts_with(table)
    given = ["qconvert", "convert", *models, "--to", layout if layout in held else held[0], "--scheme", table]
    command = shlex.join([*given, *(["-o", str(out)] if out else [])])
    raise BadRecipe(
        f"scheme {table!r}: not an integer scheme, and --bits and rules are for integers",
        command if len(held) == 1 or layout in held else f"{command} (also --to {', '.join(held[1:])})",
    )
