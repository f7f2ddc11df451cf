"""Builds a family from a user's declaration in a recipe: a known family and the differences from it.

The names of the family are then checked against the checkpoint like any other's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe, shown
from qconvert.models.architecture import Architecture
from qconvert.models.families import FAMILIES
from qconvert.models.parameters import Family, ParameterTemplate

_BRACED = re.compile(r"\{[^{}]*\}|[{}]")


@dataclass(frozen=True, slots=True)
class Declaration:
    """One entry of a recipe's `models` section.

    `like` is the model_type of the family it resembles; `rename` replaces pieces of that family's names;
    `keys` maps the config keys that family reads to this config's; `without` are roles that this model does
    not have; `slots` are weights that only this model has.
    """

    like: str
    rename: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    slots: tuple[ParameterTemplate, ...] = ()

    def to_json(self) -> Json:
        """Returns the declaration as the JSON of a recipe."""
        slots = [
            {"role": s.role, "module": s.module, "shape": list(s.shape), "kind": s.kind, "bias": bool(s.bias)}
            for s in self.slots
        ]
        return {
            "like": self.like,
            "rename": dict(self.rename),
            "keys": dict(self.keys),
            "without": list(self.without),
            "slots": slots,
        }

    def architecture(self, config: Json) -> Architecture:
        """Returns the architecture of this config. Raises BadRecipe for names unknown to the family."""
        architecture = Architecture(self._family(), config)
        known = architecture.family.dimensions(architecture.settings, 0)
        for slot in self.slots:
            for dimension in slot.shape:
                _require(dimension, known, f"architecture: slot {slot.role}: dimension")
        return architecture

    def _family(self) -> Family:
        types = {t: family for family in FAMILIES for t in family.model_types}
        base = types[_require(self.like, types, "architecture: like:")]
        roles = {slot.role for slot in base.slots}
        for role in self.without:
            _require(role, roles, "architecture: without:")
        kept = [self._renamed(slot) for slot in base.slots if slot.role not in self.without]
        numbers = {d: int(d) for slot in self.slots for d in slot.shape if d.isdecimal()}
        last = max((i for i, slot in enumerate(kept) if slot.per_layer), default=-1) + 1
        inner = tuple(slot for slot in self.slots if slot.per_layer)
        outer = tuple(slot for slot in self.slots if not slot.per_layer)
        return replace(
            base,
            name=f"declared like {base.name}",
            slots=(*kept[:last], *inner, *kept[last:], *outer),
            dimensions=lambda config, layer: {**base.dimensions(config, layer), **numbers},
            fusions=tuple(replace(f, module=self._rename(f.module)) for f in base.fusions),
            keys={**base.keys, **dict(self.keys)},
            spellings=(),
            # Another matrix may read what a norm makes.
            scale_pairs=() if any(len(slot.shape) > 1 for slot in self.slots) else base.scale_pairs,
        )

    def _renamed(self, slot: ParameterTemplate) -> ParameterTemplate:
        name = self._rename(slot.module + slot.suffix)
        if sorted(_BRACED.findall(name)) != sorted(_BRACED.findall(slot.module + slot.suffix)):
            raise BadRecipe(
                f"architecture: rename: {shown(slot.module)} becomes {shown(name)}",
                "keep {layer} and {expert} where they are, and write no other braces",
            )
        suffix = slot.suffix if name.endswith(slot.suffix) else ""
        return replace(slot, module=name.removesuffix(suffix), suffix=suffix)

    def _rename(self, name: str) -> str:
        for ours, theirs in self.rename:
            name = name.replace(ours, theirs, 1)
        return name


def _require(word: str, known: Mapping[str, object] | set[str], where: str) -> str:
    if word not in known:
        near = get_close_matches(word, list(known), n=1, cutoff=0.0)
        raise BadRecipe(
            f"{where} {word!r} is not known", f"did you mean {near[0]!r}? all: {', '.join(known)}"
        )
    return word
