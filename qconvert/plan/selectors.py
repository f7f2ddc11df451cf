"""Chooses the scheme of every weight of a model, as a recipe asks for it.

Selectors speak roles (`mlp.down`), roles in a layer range (`layers.0-3.mlp.down`) or a regular
expression on the HF name (`re:...`). The last rule that matches wins; a rule that matches nothing
is an error, and so is a decision that no loader could honour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import NoReturn

from qconvert.core.schemes import KEEP, SMALLER_GROUP_SIZES, Scheme
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Parameter
from qconvert.plan.plan import Plan
from qconvert.plan.recipe import LAYERS, PATTERN, Recipe, Rule

_QUANTIZABLE = ("linear", "embedding")


def decide(
    recipe: Recipe, architecture: Architecture, parameters: Mapping[str, Parameter], *, tied: bool
) -> dict[str, Scheme]:
    """The scheme of every weight that will be quantized, by name.

    Linears get the recipe's scheme; the head, embeddings and everything else only what a rule
    names. `tied` says whether the output's head is its embedding. Raises BadRecipe for a rule that
    matches nothing, that reaches a tensor which cannot be quantized, that splits a group of linears
    which loaders fuse, or whose group size does not divide a row.
    """
    weights = {name: parameter for name, parameter in parameters.items() if parameter.param == "weight"}
    chosen = _chosen(recipe, architecture, weights, tied=tied)
    if tied:
        _check_tied_rules(recipe)
    _check_fused_groups(architecture, weights, chosen)
    fits: dict[tuple[int, int], Scheme] = {}  # by identity, which takes no hash of a scheme
    for name, scheme in chosen.items():
        width = weights[name].shape[-1]
        fit = fits.get((width, id(scheme)))
        if fit is None:
            fit = _fit_group(width, scheme, allow_smaller=recipe.allow_smaller_group)
            fits[width, id(scheme)] = fit
        chosen[name] = fit
    if any(fit.group_size and width % fit.group_size for (width, _), fit in fits.items()):
        _refuse_groups(weights, chosen)
    return chosen


def choose(
    recipe: Recipe, architecture: Architecture, parameters: Mapping[str, Parameter], *, tied: bool
) -> dict[str, Scheme]:
    """The scheme that the recipe asks for, by name of the weight, whether or not it can have it."""
    weights = {name: parameter for name, parameter in parameters.items() if parameter.param == "weight"}
    return _chosen(recipe, architecture, weights, tied=tied)


def _chosen(
    recipe: Recipe, architecture: Architecture, weights: Mapping[str, Parameter], *, tied: bool
) -> dict[str, Scheme]:
    chosen: dict[str, Scheme] = {}
    if recipe.scheme is not None:
        linears = (n for n, p in weights.items() if p.kind == "linear" and p.role != "lm_head")
        chosen = dict.fromkeys(linears, recipe.scheme)
    for rule in recipe.rules:
        for name in _hits(rule, architecture, weights, tied):
            if rule.scheme is None:
                chosen.pop(name, None)
            else:
                chosen[name] = rule.scheme
    return chosen


def parameters_of(plan: Plan, architecture: Architecture) -> dict[str, Parameter]:
    """The parameters that a plan's outputs are, fused or not, by name."""
    found = ((name, architecture.parameter(name)) for name in plan.outputs)
    return {name: parameter for name, parameter in found if parameter is not None}


def matcher(select: str, architecture: Architecture, *, tied: bool) -> Callable[[Parameter], bool]:
    """The predicate of a selector. Raises BadRecipe naming the nearest role if there is none.

    A role that is part of a fusion matches the fused tensor too, and the other way round; on a
    tied model `embed` and `lm_head` are one role.
    """
    if select.startswith(PATTERN):
        pattern = re.compile(select.removeprefix(PATTERN))
        return lambda parameter: pattern.search(parameter.name) is not None
    match = LAYERS.fullmatch(select)
    role = match["role"] if match else select
    related = _related_roles(role, architecture, tied)
    if match is None:
        return lambda parameter: parameter.role in related or parameter.group in related
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last >= architecture.layers:
        raise BadRecipe(
            f"selector {select!r}: no such layers",
            f"take some of layers 0-{architecture.layers - 1}, which this model has",
        )
    return lambda parameter: (
        (parameter.role in related or parameter.group in related)
        and parameter.layer is not None
        and first <= parameter.layer <= last
    )


def _hits(rule: Rule, architecture: Architecture, weights: Mapping[str, Parameter], tied: bool) -> list[str]:
    matches = matcher(rule.select, architecture, tied=tied)
    hits = [name for name, parameter in weights.items() if matches(parameter)]
    if not hits:
        near = get_close_matches(rule.select.removeprefix(PATTERN), list(weights), n=1, cutoff=0.0)
        raise BadRecipe(f"selector {rule.select!r}: matches no weight", f"the nearest name is {near[0]!r}")
    for name in hits:
        if rule.scheme is not None and weights[name].kind not in _QUANTIZABLE:
            raise BadRecipe(
                f"{name}: a {weights[name].kind} tensor is never quantized (selector {rule.select!r})",
                "narrow the selector to linears or the embedding",
            )
    return hits


def _related_roles(role: str, architecture: Architecture, tied: bool) -> frozenset[str]:
    if role not in architecture.roles and role not in {p.role for p in architecture.parameters.values()}:
        near = get_close_matches(role, architecture.roles, n=1, cutoff=0.0)
        raise BadRecipe(
            f"selector {role!r}: no such role in this model",
            f"the nearest is {near[0]!r}; all: {', '.join(architecture.roles)}",
        )
    related = {role}
    for fusion in architecture.family.fusions:
        if role == fusion.role:
            related |= set(fusion.part_groups)
        elif role in fusion.part_groups:
            related.add(fusion.role)
    if tied and role in ("embed", "lm_head"):
        related |= {"embed", "lm_head"}
    return frozenset(related)


def _check_tied_rules(recipe: Recipe) -> None:
    """On a tied model the embedding is the head: it cannot get two different schemes."""
    last = {rule.select: rule for rule in recipe.rules if rule.select in ("embed", "lm_head")}
    if len({rule.scheme for rule in last.values()}) > 1:
        asked = ", ".join(f"{rule.select}={rule.label}" for rule in last.values())
        raise BadRecipe(
            f"{asked}: this model's head is its embedding, one table with one scheme",
            "add --untie to write the head as a table of its own, or give both the same scheme",
        )


def _check_fused_groups(
    architecture: Architecture, weights: Mapping[str, Parameter], chosen: Mapping[str, Scheme]
) -> None:
    """Loaders stack q, k, v (and gate, up) into one matrix with one scheme; vLLM refuses two."""
    for fused in architecture.fused.values():
        names = [part.name for part in fused.members if part.name in weights]
        if len({id(chosen.get(name)) for name in names}) < 2:
            continue
        parts = [weights[name] for name in names]
        schemes = {chosen.get(part.name): part for part in parts}
        if len(schemes) > 1:
            spelled = ", ".join(
                f"{part.role}={scheme.label if scheme else KEEP}" for scheme, part in schemes.items()
            )
            listed = ", ".join(names) if len(names) < 5 else f"{names[0]} and {len(names) - 1} more"
            raise BadRecipe(
                f"{listed}: loaders fuse them, and they would get different schemes ({spelled})",
                f"give all of them one scheme: {', '.join(fused.fusion.part_groups)}",
            )


def _fit_group(width: int, scheme: Scheme, *, allow_smaller: bool) -> Scheme:
    size = scheme.group_size
    if size is not None and width % size and allow_smaller:
        dividing = (smaller for smaller in SMALLER_GROUP_SIZES if width % smaller == 0 and smaller < size)
        size = next(dividing, size)
    return replace(scheme, group_size=size)


def _refuse_groups(weights: Mapping[str, Parameter], chosen: Mapping[str, Scheme]) -> NoReturn:
    """Raise for groups that are not whole. What is proposed suits all the weights, not just the first."""
    bad = {n: s.group_size for n, s in chosen.items() if s.group_size and weights[n].shape[-1] % s.group_size}
    name, size = next(iter(bad.items()))
    widths = {weights[n].shape[-1] for n, scheme in chosen.items() if scheme.group_size}
    fits = [str(s) for s in SMALLER_GROUP_SIZES if all(width % s == 0 for width in widths)]
    keep = " ".join(f"--keep {role}" for role in dict.fromkeys(weights[n].group for n in bad))
    raise BadRecipe(
        f"{name}: its rows of {weights[name].shape[-1]} columns are not divisible by group size {size}",
        (f"use --group-size {fits[0]}, or --allow-smaller-group" if fits else "use --group-size channel")
        + f", or keep what does not divide: {keep} (sizes that divide: {', '.join([*fits, 'channel'])})",
    )
