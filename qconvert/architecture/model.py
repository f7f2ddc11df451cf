"""One model's names: every tensor its config promises, and what the tensors at hand are.

`Architecture.of(config)` expands a family's table into exact names and shapes; `bind` holds the
tensors of a checkpoint against it. Pure: it reads names and shapes, never a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from qconvert.architecture.config import MAX_LAYERS, flag, positive_int
from qconvert.architecture.families import FAMILIES
from qconvert.architecture.slots import Dimensions, Family, Fusion, Slot, SlotKind
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.tensors import Json, Logical


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs: its role, layer (None outside the layers), and exact shape.

    `part` is "weight" or "bias"; `kind` is the slot's kind for weights and "bias" for biases.
    """

    name: str
    role: str
    layer: int | None
    part: str
    kind: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.name.rsplit(".", 1)[0]


@dataclass(frozen=True, slots=True)
class FusedPlace:
    """A fused tensor and the places whose rows it stacks, in order."""

    whole: Place
    parts: tuple[Place, ...]
    fusion: str


@dataclass(frozen=True)
class Architecture:
    """A family with one config: exact names, shapes, ties and fusions of one model."""

    family: Family
    config: Json

    @classmethod
    def of(cls, config: Json) -> Architecture:
        """The architecture that config.json describes; UnsupportedModel names an unknown type."""
        return cls(find_family(config), config)

    @cached_property
    def layers(self) -> int:
        return positive_int(self.config, "num_hidden_layers", MAX_LAYERS)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding. transformers' default for these families is False."""
        return flag(self.config, "tie_word_embeddings")

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """Every tensor of the unfused model by name, in the order of the printed structure.

        The head of a tied model is listed too: it may be stored, though it need not be.
        """
        return {place.name: place for place in self._walk()}

    @cached_property
    def fused(self) -> Mapping[str, FusedPlace]:
        """Every tensor that a fusion of this family can make, by name."""
        found: dict[str, FusedPlace] = {}
        by_key = {(p.role, p.layer, p.part): p for p in self.places.values()}
        for fusion in self.family.fusions:
            for layer in range(self.layers):
                for part in ("weight", "bias"):
                    parts = [by_key.get((role, layer, part)) for role in fusion.parts]
                    if all(parts):
                        entry = _fuse(fusion, layer, [p for p in parts if p])
                        found[entry.whole.name] = entry
        return found

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The role names that selectors may use, fused ones included."""
        return tuple(dict.fromkeys(p.role for p in self.places.values())) + tuple(
            f.role for f in self.family.fusions
        )

    @cached_property
    def roles_in_order(self) -> tuple[str, ...]:
        """All roles as the model prints them, each fused one before its first part."""
        fused = {fusion.parts[0]: fusion.role for fusion in self.family.fusions}
        roles = dict.fromkeys(place.role for place in self.places.values())
        return tuple(name for role in roles for name in (fused.get(role), role) if name)

    def place(self, name: str) -> Place | None:
        """Where the tensor of this name belongs, fused or not; None when it is unknown."""
        if name in self.fused:
            return self.fused[name].whole
        return self.places.get(name)

    def ignores(self, name: str) -> bool:
        """Whether the name is a stored buffer that the family's class recomputes."""
        return any(re.fullmatch(pattern, name) for pattern in self.family.ignored)

    def _walk(self) -> Iterator[Place]:
        slots = self.family.slots
        first = next(i for i, slot in enumerate(slots) if slot.per_layer)
        last = max(i for i, slot in enumerate(slots) if slot.per_layer)
        for slot in slots[:first]:
            yield from self._at(slot, None)
        for layer in range(self.layers):
            for slot in slots[first : last + 1]:
                yield from self._at(slot, layer)
        for slot in slots[last + 1 :]:
            yield from self._at(slot, None)

    def _dimensions(self, layer: int | None) -> Dimensions:
        return self.family.dimensions({**self.family.defaults, **self.config}, layer or 0)

    def _at(self, slot: Slot, layer: int | None) -> Iterator[Place]:
        dims = self._dimensions(layer)
        if slot.only_if is not None and not dims[slot.only_if]:
            return
        biased = slot.bias if isinstance(slot.bias, bool) else flag(self.config, slot.bias)
        for expert in range(dims["experts"]) if slot.per_expert else (0,):
            module = slot.module.format(layer=layer, expert=expert)
            role = slot.role.format(expert=expert)
            shape = tuple(dims[d] for d in slot.shape)
            yield Place(f"{module}.weight", role, layer, "weight", slot.kind, shape, slot.shape)
            if biased:
                yield Place(f"{module}.bias", role, layer, "bias", "bias", shape[:1], slot.shape[:1])


def _fuse(fusion: Fusion, layer: int, parts: list[Place]) -> FusedPlace:
    head = parts[0]
    rows = sum(p.shape[0] for p in parts)
    name = f"{fusion.module.format(layer=layer)}.{head.part}"
    dims = (" + ".join(p.dims[0] for p in parts), *head.dims[1:])
    whole = Place(name, fusion.role, layer, head.part, head.kind, (rows, *head.shape[1:]), dims)
    return FusedPlace(whole, tuple(parts), fusion.role)


def find_family(config: Json) -> Family:
    """The family of a config by `model_type`, cross-checked with `architectures`."""
    model_type = config.get("model_type")
    classes = config.get("architectures") or []
    known = ", ".join(t for family in FAMILIES for t in family.model_types)
    if not isinstance(model_type, str):
        raise CorruptCheckpoint("config.json: no model_type", f"add one of: {known}")
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise CorruptCheckpoint(
            f"config.json: architectures is {classes!r}, not a list of names", "correct it"
        )
    family = next((f for f in FAMILIES if model_type in f.model_types), None)
    if family is None:
        raise UnsupportedModel(f"config.json: model_type {model_type!r} is not known here", f"known: {known}")
    if classes and not set(classes) & set(family.classes):
        raise CorruptCheckpoint(
            f"config.json: model_type is {model_type!r}, but architectures says {', '.join(classes)}",
            f"a {model_type} model is a {family.classes[0]}; correct the one that is wrong",
        )
    return family


@dataclass(frozen=True, slots=True)
class Binding:
    """What the tensors of a checkpoint are: known places, dropped buffers, unknown names."""

    architecture: Architecture
    tensors: Mapping[str, Logical]
    places: Mapping[str, Place]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]

    def kind(self, name: str) -> SlotKind | str:
        return self.places[name].kind if name in self.places else "unknown"

    @property
    def stored_tied_head(self) -> str | None:
        """The name of a stored head that the config says is the embedding, if there is one."""
        if not self.architecture.tied:
            return None
        return next((n for n, p in self.places.items() if p.role == "lm_head" and p.part == "weight"), None)

    @property
    def fusions_found(self) -> tuple[str, ...]:
        """The roles of the fused tensors that are stored, each once."""
        fused = self.architecture.fused
        return tuple(dict.fromkeys(fused[n].fusion for n in self.places if n in fused))


def bind(
    architecture: Architecture, tensors: Mapping[str, Logical], *, allow_unknown: bool = False
) -> Binding:
    """Hold a checkpoint's logical tensors against the architecture.

    Raises CorruptCheckpoint for a missing tensor or a shape that contradicts the config (naming the
    config keys), UnsupportedModel for a tensor nobody declared unless `allow_unknown`.
    """
    places: dict[str, Place] = {}
    unknown: list[str] = []
    dropped: list[str] = []
    for name, tensor in tensors.items():
        place = architecture.place(name)
        if place is not None:
            _check_shape(architecture, place, tensor)
            places[name] = place
        else:
            (dropped if architecture.ignores(name) else unknown).append(name)
    if unknown and not allow_unknown:
        _refuse_unknown(architecture, unknown)
    _check_complete(architecture, places)
    return Binding(architecture, tensors, places, tuple(dropped), tuple(unknown))


def shown(name: str, limit: int = 120) -> str:
    """A tensor name fit for a message: control characters escaped, long names shortened."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(name)} characters)"


def _check_shape(architecture: Architecture, place: Place, tensor: Logical) -> None:
    if tensor.shape == place.shape:
        return
    named = architecture.family.named_by
    keys = ", ".join(
        f"{' + '.join(named.get(d, d) for d in dim.split(' + '))} = {size}"
        for dim, size in zip(place.dims, place.shape, strict=True)
    )
    raise CorruptCheckpoint(
        f"{place.name}: shape {list(tensor.shape)}, but config.json gives {list(place.shape)} ({keys})",
        "the weights and the config.json are of different models, or one of them was edited",
    )


def _refuse_unknown(architecture: Architecture, unknown: list[str]) -> None:
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    first_known = next(iter(architecture.places))
    prefixed = next((n for n in unknown if n.endswith("." + first_known)), None)
    hint = "use --allow-unknown to copy such tensors as they are"
    if prefixed:
        hint = f"names carry the prefix {prefixed[: -len(first_known)]!r}; save the inner model instead"
    if architecture.family.named_by and re.match(r"model\.layers\.\d+\.", unknown[0]):
        hint += f"; config.json says num_hidden_layers = {architecture.layers}"
    raise UnsupportedModel(f"{shown(unknown[0])}{more}: not a tensor of {architecture.family.name}", hint)


def _check_complete(architecture: Architecture, places: Mapping[str, Place]) -> None:
    covered = set(places)
    for name in places:
        fused = architecture.fused.get(name)
        if fused is None:
            continue
        twice = [p.name for p in fused.parts if p.name in places]
        if twice:
            raise CorruptCheckpoint(
                f"{name}: stored beside {twice[0]}, which it contains", "remove one of the two"
            )
        covered.update(p.name for p in fused.parts)
    for name, place in architecture.places.items():
        if name in covered or (place.role == "lm_head" and architecture.tied):
            continue
        raise CorruptCheckpoint(
            f"{name}: missing; config.json promises it"
            + (f" (num_hidden_layers = {architecture.layers})" if place.layer is not None else "")
            + (" (tie_word_embeddings is not true)" if place.role == "lm_head" else ""),
            "download the missing shard, or correct config.json",
        )
