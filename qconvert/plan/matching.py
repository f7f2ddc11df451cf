"""Finds the weights that a selector means: by role, by group of roles, by layers, or by name.

`mlp.down` is a role, `mlp` all roles below it, `attention` a group; `layers.0-1,7` are whole layers, and
`layers.0-1,7.mlp.down` a role in them; `model.layers.0.self_attn.q_proj`, or any part of it between dots,
is a module as the checkpoint names it, `*.q_proj` several; `re:...` is a regular expression on the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from typing import TYPE_CHECKING

from qconvert.errors import BadRecipe

if TYPE_CHECKING:  # a command's help, which checks selectors, does not wait for models
    from qconvert.models import Architecture, Parameter

PATTERN = "re:"
_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_LAYERS = re.compile(rf"layers?[.:](?P<layers>{_RANGE}(?:,{_RANGE})*)(?:\.(?P<what>.+))?")
# What users call several roles, by the first words of these.
GROUPS = {
    "attention": ("attn", "delta"),
    "mlp": ("mlp",),
    "experts": ("mlp.experts",),
    "shared_experts": ("mlp.shared",),
    "router": ("mlp.router", "mlp.router_table"),
    "embedding": ("embed",),
    "head": ("lm_head",),
}
VISION = "vision"


@dataclass(frozen=True, slots=True)
class Matcher:
    """Whether a weight is selected; `broad` of several roles or a name, which may reach any kind."""

    selects: Callable[[Parameter], bool]
    broad: bool = True


def check_selector(select: str) -> None:
    """Raise BadRecipe for a selector that no model could make right."""
    match = _LAYERS.fullmatch(select)
    for first, last in _ranges(match["layers"]) if match else ():
        if first > last:
            forwards = select.replace(f"{first}-{last}", f"{last}-{first}")
            raise BadRecipe(f"selector {select!r}: the layers run backwards", f"write {forwards}")
    if select.startswith(PATTERN):
        try:
            re.compile(select.removeprefix(PATTERN))
        except re.error as error:
            raise BadRecipe(
                f"selector {select!r}: not a regular expression ({error})", "see Python's re module"
            ) from error


def matcher(select: str, architecture: Architecture, *, tied: bool) -> Matcher:
    """What a selector selects. Raises BadRecipe, with the nearest words, where this model has none of it.

    A role that is part of a fusion matches the fused tensor too, and the other way round; on a
    tied model `embed` and `lm_head` are one role.
    """
    if select.startswith(PATTERN):
        pattern = re.compile(select.removeprefix(PATTERN))
        return Matcher(lambda parameter: pattern.search(parameter.name) is not None, broad=False)
    match = _LAYERS.fullmatch(select)
    if match is None:
        return _matcher_of(select, select, architecture, tied=tied)
    ranges = _ranges(match["layers"])
    if max(last for _, last in ranges) >= architecture.layers:
        raise BadRecipe(
            f"selector {select!r}: no such layers",
            f"name some of layers 0-{architecture.layers - 1}, which this model has",
        )
    what = match["what"]
    inside = _matcher_of(what, select, architecture, tied=tied) if what else Matcher(lambda parameter: True)

    def selects(parameter: Parameter) -> bool:
        layer = parameter.layer
        return (
            layer is not None
            and any(first <= layer <= last for first, last in ranges)
            and inside.selects(parameter)
        )

    return Matcher(selects, inside.broad)


def is_kept_tower(select: str, architecture: Architecture) -> bool:
    """Whether a selector means a vision tower, which is copied as it is."""
    return select == VISION and isinstance(architecture.config.get("vision_config"), dict)


def _ranges(layers: str) -> list[tuple[int, int]]:
    pairs = (part.partition("-") for part in layers.split(","))
    return [(int(first), int(last or first)) for first, _, last in pairs]


def _matcher_of(what: str, select: str, architecture: Architecture, *, tied: bool) -> Matcher:
    """The matcher of a role, a group of roles or a module's name, wherever it is."""
    what = what.removesuffix(".weight")
    roles = {*architecture.roles, *(parameter.role for parameter in architecture.parameters.values())}
    named = {what} & roles or _below(GROUPS.get(what, (what,)), roles)
    if named:
        related = frozenset[str]().union(*(_related(role, architecture, tied) for role in named))
        return Matcher(lambda p: p.role in related or p.group in related, broad=what not in roles)
    by_name = _by_name(what, architecture)
    if not any(by_name(parameter) for parameter in architecture.parameters.values()):
        lacks = f"this model has no {what}" if what in (*GROUPS, VISION) else "matches no weight"
        before = select.removesuffix(".weight").removesuffix(what)
        raise BadRecipe(f"selector {select!r}: {lacks}", _nearest(what, before, architecture))
    return Matcher(by_name)


def _below(starts: tuple[str, ...], roles: set[str]) -> set[str]:
    return {role for role in roles for start in starts if role == start or role.startswith(f"{start}.")}


def _by_name(what: str, architecture: Architecture) -> Callable[[Parameter], bool]:
    """Whether a parameter, or a stack of the class that it is part of, has this module in its name."""
    if "*" in what or "?" in what:
        pattern = re.compile(translate(what))
        return lambda parameter: any(pattern.match(module) for module in _modules(parameter, architecture))
    inside = f".{what}."
    return lambda parameter: any(inside in f".{module}." for module in _modules(parameter, architecture))


def _modules(parameter: Parameter, architecture: Architecture) -> list[str]:
    wholes = [entry.whole.name for entry, _ in architecture.wholes.get(parameter.name, ())]
    return [parameter.module, *(name.removesuffix(".weight") for name in wholes)]


def _nearest(what: str, before: str, architecture: Architecture) -> str:
    """What may have been meant, of everything that selects some weight of this model.

    `before` are the layers that were named.
    """
    modules = {parameter.module for parameter in architecture.parameters.values()}
    parts = {part for module in modules for part in module.split(".") if not part.isdigit()}
    groups = [name for name, starts in GROUPS.items() if _below(starts, set(architecture.roles))]
    words = [*architecture.roles, *groups, *sorted(parts)]
    near = get_close_matches(what, words, n=1) or get_close_matches(what, sorted(modules), n=1)
    if near and what not in GROUPS:
        return f"did you mean {before + near[0]!r}? `qconvert quantize --help` explains selectors"
    return (
        f"give a role ({', '.join(architecture.roles)}), a group ({', '.join(groups)}), layers.0-3, "
        "a module's name or re:REGEX"
    )


def _related(role: str, architecture: Architecture, tied: bool) -> frozenset[str]:
    """The role, and those of tensors that it is stored in, or that are stored in it."""
    related = {role}
    for fusion in architecture.family.fusions:
        if role == fusion.role:
            related |= set(fusion.part_groups)
        elif role in fusion.part_groups:
            related.add(fusion.role)
    if tied and role in ("embed", "lm_head"):
        related |= {"embed", "lm_head"}
    return frozenset(related)
