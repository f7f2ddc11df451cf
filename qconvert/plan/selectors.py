"""Chooses the scheme of every weight of a model by a recipe.

What a selector selects is said in `plan.matching`. The last rule that matches wins; a rule that matches
nothing is an error, and so is a decision that no loader could honour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from operator import attrgetter, eq
from typing import NoReturn

from qconvert.core.schemes import KEEP, SMALLER_GROUP_SIZES, Scheme
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Fusion, Parameter
from qconvert.plan.matching import PATTERN, is_kept_tower, matcher
from qconvert.plan.plan import Plan
from qconvert.plan.recipe import Recipe, Rule

_QUANTIZABLE = ("linear", "embedding")
_NAME = attrgetter("name")


def decide(
    recipe: Recipe, architecture: Architecture, parameters: Mapping[str, Parameter], *, tied: bool
) -> dict[str, Scheme]:
    """The scheme of every weight that will be quantized, by name.

    Linears get the recipe's scheme; the head, embeddings and everything else only what a rule
    names. `tied` says whether the output's head is its embedding. Raises BadRecipe for a rule that
    matches nothing, that reaches a tensor which cannot be quantized, that splits a group of linears
    which loaders fuse, or whose group size does not divide a row.
    """
    weights = _weights(parameters)
    chosen = _chosen(recipe, architecture, weights, tied=tied)
    if tied:
        _check_tied_rules(recipe)
    _check_fused_groups(architecture, weights, chosen)
    asked = {id(scheme): scheme for scheme in chosen.values()}  # by identity, which takes no hash of a scheme
    fits = {
        (shape, number): _fit_group(shape[-1], asked[number], allow_smaller=recipe.allow_smaller_group)
        for shape, number in set(
            zip((weights[n].shape for n in chosen), map(id, chosen.values()), strict=True)
        )
    }
    if any(fit != asked[number] for (_, number), fit in fits.items()):
        chosen = {name: fits[weights[name].shape, id(scheme)] for name, scheme in chosen.items()}
    if any(fit.group_size and shape[-1] % fit.group_size for (shape, _), fit in fits.items()):
        _refuse_groups(weights, chosen)
    return chosen


def choose(
    recipe: Recipe, architecture: Architecture, parameters: Mapping[str, Parameter], *, tied: bool
) -> dict[str, Scheme]:
    """The scheme that the recipe gives each weight, by name, whether or not the weight can have it."""
    return _chosen(recipe, architecture, _weights(parameters), tied=tied)


def _weights(parameters: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    """The parameters that are no biases; of very many without any, no second dictionary."""
    if all(parameter.param == "weight" for parameter in parameters.values()):
        return parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.param == "weight"}


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


def kept(
    recipe: Recipe, architecture: Architecture, parameters: Mapping[str, Parameter], *, tied: bool
) -> frozenset[str]:
    """The names of the weights that the recipe's rules keep, where all other linears get codes of one table.

    Raises BadRecipe for a rule that matches nothing, or that keeps part of a group which loaders fuse.
    """
    weights = {name: parameter for name, parameter in parameters.items() if parameter.param == "weight"}
    found = frozenset(name for rule in recipe.rules for name in _hits(rule, architecture, weights, tied))
    for fused in architecture.fused.values():
        names = [part.name for part in fused.members if part.name in weights]
        here = [name for name in names if name in found]
        if here and len(here) < len(names):
            together = _together([weights[name] for name in names], fused.fusion)
            raise BadRecipe(
                f"{here[0]}: loaders fuse it with {len(names) - 1} more, and not all would be kept",
                f"keep all of them: {together}",
            )
    return found


def parameters_of(plan: Plan, architecture: Architecture) -> Mapping[str, Parameter]:
    """The parameters that a plan's outputs are, fused or not, by name."""
    names = [unit.output.name for unit in plan.units]
    if len(names) == len(architecture.parameters) and all(map(eq, names, architecture.parameters)):
        return architecture.parameters  # all, and nothing is fused
    found = architecture.parameters_in(names)
    return {parameter.name: parameter for parameter in found if parameter is not None}


def _hits(rule: Rule, architecture: Architecture, weights: Mapping[str, Parameter], tied: bool) -> list[str]:
    if is_kept_tower(rule.select, architecture):
        if rule.scheme is not None:
            raise BadRecipe(
                f"rule {rule.select}={rule.label}: a vision tower is copied as it is",
                "leave the rule out; `qconvert to-gguf MODEL --mmproj --type q8_0` quantizes a tower",
            )
        return []
    found = matcher(rule.select, architecture, tied=tied)
    hits = [name for name, parameter in weights.items() if found.selects(parameter)]
    if not hits:
        near = get_close_matches(rule.select.removeprefix(PATTERN), list(weights), n=1, cutoff=0.0)
        raise BadRecipe(f"selector {rule.select!r}: matches no weight", f"the nearest name is {near[0]!r}")
    if rule.scheme is None:
        return hits
    quantizable = [name for name in hits if weights[name].kind in _QUANTIZABLE]
    if found.broad and quantizable:
        return quantizable
    for name in hits:
        if weights[name].kind not in _QUANTIZABLE:
            raise BadRecipe(
                f"{name}: a {weights[name].kind} tensor is never quantized (selector {rule.select!r})",
                "narrow the selector to linears or the embedding",
            )
    return hits


def _check_tied_rules(recipe: Recipe) -> None:
    """On a tied model the embedding is the head: it cannot get two different schemes."""
    names = {"embed": "embed", "lm_head": "lm_head", "embedding": "embed", "head": "lm_head"}
    last = {names[rule.select]: rule for rule in recipe.rules if rule.select in names}
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
        if len(set(map(id, map(chosen.get, map(_NAME, fused.members))))) < 2:
            continue
        names = [part.name for part in fused.members if part.name in weights]
        parts = [weights[name] for name in names]
        schemes = {chosen.get(part.name): part for part in parts}
        if len(schemes) > 1:
            spelled = ", ".join(
                f"{part.role}={scheme.label if scheme else KEEP}" for scheme, part in schemes.items()
            )
            listed = ", ".join(names) if len(names) < 5 else f"{names[0]} and {len(names) - 1} more"
            raise BadRecipe(
                f"{listed}: loaders fuse them, and they would get different schemes ({spelled})",
                f"give all of them one scheme: {_together(parts, fused.fusion)}",
            )


def _together(parts: list[Parameter], fusion: Fusion) -> str:
    """The selector of all parts of a fused matrix, in their layer alone."""
    layer = parts[0].layer
    if layer is None:
        return f"{fusion.role} selects them"
    return f"layers.{layer}.{fusion.role} selects them, {fusion.role} those of all layers"


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
