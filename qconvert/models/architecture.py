"""Expands a family's table into one model's exact tensor names and shapes, fused and unfused.

`Architecture.of(config)` is pure: it reads a config, never a file. `qconvert.models.binding` matches a
checkpoint's tensors with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from qconvert.core.config_json import MAX_EXPERTS, MAX_LAYERS, flag, positive_int
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.expanded import AlikeParameters, FusedParameter, Parameter, roles_of
from qconvert.models.families.common import language_config
from qconvert.models.families.vision import TEXT_HIDDEN, WHOLE
from qconvert.models.family_of import find_family
from qconvert.models.parameters import Dimensions, Family, Fusion, ParameterTemplate

ParameterKey = tuple[str, int | None, str]
"""Role, layer, and "weight" or "bias"."""


_NAME, _LAYER, _PART, _ROLE = map(attrgetter, ("name", "layer", "param", "role"))
# How a decoder is named that was saved without its head: Qwen3-Embedding and most models of sentences.
BARE: tuple[Mapping[str, str], ...] = ({"model.": ""},)
# Layers that predict further tokens come after those of the model: at most this many are looked for.
_LATER = 16


@dataclass(frozen=True)
class Architecture:
    """A family with one config: exact names, shapes, ties and fusions of one model.

    `spelling` replaces pieces of the family's names, as some checkpoints do.
    """

    family: Family
    config: Json
    spelling: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Architecture {self.family.name} (model_type {self.config.get('model_type')!r})"

    @classmethod
    def of(cls, config: Json) -> Architecture:
        """Returns the architecture that config.json describes; UnsupportedModel names an unknown type."""
        return cls(find_family(config), config)

    def spelled_like(self, names: Iterable[str]) -> Architecture:
        """Returns this architecture with the family's naming variant that most of `names` follow."""
        if self.spelling:
            return self
        known = frozenset(names)

        def hits(candidate: Architecture) -> int:
            firsts = (slot.module + slot.suffix for slot in candidate.family.slots)
            return sum(candidate._name(name, 0, 0) in known for name in firsts)

        spellings = (*self.family.spellings, *BARE)
        return max((self, *(replace(self, spelling=s) for s in spellings)), key=hits)

    @cached_property
    def settings(self) -> Json:
        """The config of the language model: the class's defaults, overridden by the file's values.

        The keys of a nested `text_config` are merged in, and take precedence except for the tie.
        """
        config = self.config
        nested = language_config(config)
        text: Json = nested or {}
        tied_by = self.family.tied_by
        tie = {tied_by: config[tied_by]} if tied_by in config else {}
        settings: dict[str, Any] = {**self.family.defaults, **config, **text, **tie}
        for shared, own in self.family.keys.items():
            if settings.get(own) is not None or settings.get(shared) is None:
                settings[shared] = positive_int(settings, own)
        return settings

    @cached_property
    def stacks(self) -> tuple[int, ...]:
        """The number of layers of each stack: one for a decoder, two for an encoder-decoder."""
        listed = self.settings.get(self.family.layer_list)
        if isinstance(listed, list | str) and self.settings.get(self.family.layers[0]) is None:
            return (positive_int({self.family.layer_list: len(listed)}, self.family.layer_list, MAX_LAYERS),)
        return tuple(positive_int(self.settings, key, MAX_LAYERS) for key in self.family.layers)

    @property
    def layers(self) -> int:
        """The number of layers (of the deepest stack, where there are two)."""
        return max(self.stacks)

    @cached_property
    def tied(self) -> bool:
        """True if the head is the embedding."""
        return flag(self.settings, self.family.tied_by)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Every tensor of the unfused model by name, in the order of the printed structure.

        The head of a tied model is included: it may be stored, though it need not be.
        """
        parameters = list(self._walk())
        return dict(zip(map(_NAME, parameters), parameters, strict=True))

    @cached_property
    def shapes(self) -> Mapping[ParameterKey, tuple[int, ...]]:
        """The shape of every parameter of the unfused model by role, layer and part."""
        return {(p.role, p.layer, p.param): p.shape for p in self.parameters.values()}

    @cached_property
    def fused(self) -> Mapping[str, FusedParameter]:
        """Every tensor that a fusion of this family can make, or MLX's stacks of experts, by name."""
        fusions = (*self.family.fusions, *self.family.mlx_stacks)
        found: dict[Fusion, list[FusedParameter]] = {fusion: [] for fusion in fusions}
        for layer, parameters in self._by_layer():
            for fusion in fusions:
                for part in ("weight", "bias"):
                    entry = self._fuse(fusion, layer, part, parameters[part])
                    found[fusion] += [entry] if entry is not None else []
        return {entry.whole.name: entry for entries in found.values() for entry in entries}

    def _by_layer(self) -> Iterator[tuple[int, dict[str, dict[str, Parameter]]]]:
        """The parameters of every layer by part and role, one layer at a time."""
        of_layers: dict[int, list[Parameter]] = {layer: [] for layer in range(self.layers)}
        for layer, alike in groupby(self.parameters.values(), key=_LAYER):
            if layer is not None:
                of_layers[layer].extend(alike)
        for layer, parameters in of_layers.items():
            found: dict[str, dict[str, Parameter]] = {"weight": {}, "bias": {}}
            for part, alike in groupby(parameters, key=_PART):
                some = list(alike)
                found[part].update(zip(map(_ROLE, some), some, strict=True))
            yield layer, found

    @cached_property
    def wholes(self) -> Mapping[str, tuple[tuple[FusedParameter, int], ...]]:
        """For every member of a fusion by name: the fused tensors it may be in, and its position there."""
        found: dict[str, tuple[tuple[FusedParameter, int], ...]] = {}
        for entry in self.fused.values():
            for number, part in enumerate(entry.members):
                found[part.name] = (*found.get(part.name, ()), (entry, number))
        return found

    @cached_property
    def stored(self) -> Mapping[str, Parameter]:
        """The tensors that the family's own class stores: natively fused ones fused, no tied head."""
        native = {p.name: e.whole for e in self.fused.values() if e.fusion.native for p in e.members}
        parameters = (native.get(name, parameter) for name, parameter in self.parameters.items())
        return {p.name: p for p in parameters if not (self.tied and p.role == "lm_head")}

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The role names for selectors, all experts of a layer together, fused roles last."""
        groups = dict.fromkeys(parameter.group for parameter in self.parameters.values())
        return (*groups, *(fusion.role for fusion in self.family.fusions))

    @cached_property
    def roles_in_order(self) -> tuple[str, ...]:
        """All roles in the order the model prints them, each fused one before its first member."""
        fused = {fusion.part_groups[0]: fusion.role for fusion in self.family.fusions}
        roles = dict.fromkeys(parameter.group for parameter in self.parameters.values())
        return tuple(name for role in roles for name in (fused.get(role), role) if name)

    @cached_property
    def stored_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of arrays that the class stores with another dimension order than the parameters here.

        Linears stored as [in, out], fused, stacked or not, and stacks of biases, [experts, rows].
        """
        family = self.family
        if not any(s.transposed for s in family.slots) and not any(f.transposed for f in family.fusions):
            return {}
        parameters = (*self.parameters.values(), *(entry.whole for entry in self.fused.values()))
        shapes = {p.name: (*p.shape[:-2], *p.shape[:-3:-1]) for p in parameters if p.transposed}
        for entry in self.fused.values():
            if entry.fusion.per_expert and entry.whole.param == "bias":
                experts = len(entry.members) // len(entry.fusion.members)
                shapes[entry.whole.name] = (experts, entry.whole.shape[0] // experts)
        return shapes

    @cached_property
    def tower(self) -> Architecture | None:
        """The vision tower that the config describes beside the language model.

        None without one, and where the config leaves its sizes to the class.
        """
        config = self.config.get("vision_config")
        if self.family.tower is None or not isinstance(config, dict):
            return None
        around = {TEXT_HIDDEN: self.settings.get("hidden_size"), WHOLE: self.config}
        tower = Architecture(self.family.tower, {**config, **around})
        try:
            return tower if tower.dimensions else None
        except CorruptCheckpoint:
            return None

    def parameter(self, name: str) -> Parameter | None:
        """Returns the parameter of this name, fused or not; None when it is unknown."""
        if name in self.fused:
            return self.fused[name].whole
        return self.parameters.get(name)

    def parameters_in(self, names: Collection[str]) -> Iterator[Parameter | None]:
        """Yields the parameter of each of many names, as `parameter` does."""
        fused, plain = self.fused, self.parameters
        if fused.keys().isdisjoint(names):
            return map(plain.get, names)
        return (fused[name].whole if name in fused else plain.get(name) for name in names)

    def table(self, role: str) -> Parameter | None:
        """Returns the one weight of a role outside the layers: `embed` or `lm_head`."""
        return next((p for p in self.parameters.values() if p.role == role and p.param == "weight"), None)

    def ignores(self, name: str) -> bool:
        """Returns whether the name is a stored buffer that the family's class recomputes."""
        return any(self._matches(pattern, name) for pattern in self.family.ignored)

    def carries(self, name: str) -> str | None:
        """Returns what a tensor outside the language model belongs to ("vision"), None if it is not known."""
        carried = self.family.carried.items()
        return next((what for pattern, what in carried if self._matches(pattern, name)), None)

    def config_key(self, dimension: str) -> str:
        """Returns the family's config keys that a dimension comes from."""
        named = self.family.named_by.get(dimension, dimension)
        return " ".join(self.family.keys.get(word, word) for word in named.split(" "))

    def _matches(self, pattern: str, name: str) -> bool:
        if "{later}" in pattern:
            later = "|".join(str(self.layers + more) for more in range(_LATER))
            pattern = pattern.replace("{later}", f"({later})")
        return re.fullmatch(pattern.replace("{layers}", str(self.layers)), name) is not None

    def _name(self, text: str, layer: int | None, expert: int | str) -> str:
        for ours, theirs in self.spelling.items():
            text = text.replace(ours, theirs, 1)
        return text.format(layer=layer, expert=expert)

    @cached_property
    def dimensions(self) -> tuple[Dimensions, ...]:
        """The dimensions of the family's table, by layer."""
        return tuple(self.family.dimensions(self.settings, layer) for layer in range(self.layers))

    def _walk(self) -> Iterator[Parameter]:
        stacks = iter(self.stacks)
        for per_layer, slots in groupby(self.family.slots, key=lambda slot: slot.per_layer):
            run = tuple(slots)
            for layer in range(next(stacks)) if per_layer else (None,):
                yield from self._layer(run, layer)

    def _layer(self, slots: tuple[ParameterTemplate, ...], layer: int | None) -> Iterator[Parameter]:
        dims = self.dimensions[layer or 0]
        if dims.get("experts", 0) * self.layers > MAX_EXPERTS:
            key = self.config_key("experts")
            raise CorruptCheckpoint(f"config.json: {key} = {dims['experts']} in each of {self.layers} layers")
        for per_expert, group in groupby(slots, key=lambda slot: slot.per_expert):
            experts = dims["experts"] if per_expert else 1
            alike = [each.of(experts) for slot in group for each in self._alike(slot, layer, dims)]
            yield from chain.from_iterable(zip(*alike, strict=True))

    def _alike(
        self, slot: ParameterTemplate, layer: int | None, dims: Dimensions
    ) -> Iterator[AlikeParameters]:
        """The weight and the bias of a template in one layer, for all experts; nothing of no size."""
        if slot.only_if is not None and not dims[slot.only_if]:
            return
        shape = tuple(dims[d] for d in slot.shape)
        if 0 in shape:
            return
        part = "bias" if slot.kind == "bias" else "weight"
        name = self._name(slot.module + slot.suffix, layer, "{expert}")
        yield AlikeParameters(name, slot.role, layer, part, slot.kind, shape, slot.shape, slot.transposed)
        if slot.bias if isinstance(slot.bias, bool) else flag(self.settings, slot.bias):
            name = self._name(f"{slot.module}.bias", layer, "{expert}")
            yield AlikeParameters(name, slot.role, layer, "bias", "bias", shape[:1], slot.shape[:1])

    def _fuse(
        self, fusion: Fusion, layer: int, part: str, by_role: Mapping[str, Parameter]
    ) -> FusedParameter | None:
        dims = self.dimensions[layer]
        experts = dims["experts"] if fusion.per_expert else 1
        roles = [roles_of(role, experts) for role in fusion.members]
        if not experts or roles[0][0] not in by_role:
            return None
        members = map(by_role.get, chain.from_iterable(zip(*roles, strict=True)))
        parts = tuple(filter(None, members))
        if len(parts) < experts * len(roles):
            return None
        groups = dims[fusion.groups] if fusion.groups else 1
        suffix = fusion.suffix if part == "weight" else fusion.bias_suffix
        name = self._name(fusion.module + suffix, layer, 0)
        entry = FusedParameter(_whole(name, fusion, parts, experts), parts, groups, fusion)
        return entry if groups == 1 or entry.runs else None


def _whole(name: str, fusion: Fusion, parts: tuple[Parameter, ...], experts: int) -> Parameter:
    head, first = parts[0], parts[: len(fusion.members)]
    dims = (" + ".join(p.dims[0] for p in first), *head.dims[1:])
    shape = (sum(p.shape[0] for p in first), *head.shape[1:])
    if fusion.per_expert and head.param == "bias":
        shape = (experts * shape[0],)
    elif fusion.per_expert:
        dims, shape = ("experts", *dims), (experts, *shape)
    transposed = head.transposed or (fusion.transposed and head.param == "weight")
    return Parameter(name, fusion.role, head.layer, head.param, head.kind, shape, dims, transposed)
