"""What the tensors of a checkpoint are: names and shapes held against an architecture.

Every stored tensor is a known place, a recomputed buffer, or unknown; every promised one is there,
whole or in parts. Names and shapes only: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qconvert.architecture.model import Architecture, FusedPlace, Place
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.tensors import Logical


@dataclass(frozen=True, slots=True)
class Binding:
    """What the tensors of a checkpoint are: known places, dropped buffers, others.

    `unknown` are the tensors that no slot declares: those of other parts of the model (a vision
    tower), and with `allow_unknown` any.
    """

    architecture: Architecture
    tensors: Mapping[str, Logical]
    places: Mapping[str, Place]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]

    def kind(self, name: str) -> str:
        return self.places[name].kind if name in self.places else "unknown"

    @property
    def stored_tied_head(self) -> str | None:
        """The name of a stored head that the config says is the embedding, if there is one."""
        if not self.architecture.tied:
            return None
        return next((n for n, p in self.places.items() if p.role == "lm_head" and p.part == "weight"), None)

    @property
    def fusions_found(self) -> tuple[str, ...]:
        """The roles of the fused tensors that are stored, each once, in the order of the family's table."""
        fused = self.architecture.fused
        stored = {fused[name].fusion.role for name in self.places if name in fused}
        return tuple(f.role for f in self.architecture.family.fusions if f.role in stored)


def bind(
    architecture: Architecture, tensors: Mapping[str, Logical], *, allow_unknown: bool = False
) -> Binding:
    """Hold a checkpoint's logical tensors against the architecture, in the spelling they follow.

    Raises CorruptCheckpoint for a missing tensor or a shape that contradicts the config (naming the
    config keys), UnsupportedModel for a tensor nobody declared unless `allow_unknown`.
    """
    architecture = architecture.spelled_like(tensors)
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
    undeclared = [name for name in unknown if architecture.carries(name) is None]
    if undeclared and not allow_unknown:
        _refuse_unknown(architecture, undeclared)
    _check_complete(architecture, places)
    return Binding(architecture, tensors, places, tuple(dropped), tuple(unknown))


def _check_shape(architecture: Architecture, place: Place, tensor: Logical) -> None:
    if tensor.shape == place.shape:
        return
    keys = ", ".join(
        f"{' + '.join(architecture.config_key(d) for d in dim.split(' + '))} = {size}"
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
    layer_names = next(slot.module for slot in architecture.family.slots if slot.per_layer)
    if unknown[0].startswith(layer_names.split("{layer}")[0]):
        hint += f"; config.json says {_layer_keys(architecture)}"
    raise UnsupportedModel(f"{shown(unknown[0])}{more}: not a tensor of {architecture.family.name}", hint)


def _layer_keys(architecture: Architecture) -> str:
    keys = zip(architecture.family.layers, architecture.stacks, strict=True)
    return ", ".join(f"{architecture.config_key(key)} = {count}" for key, count in keys)


def _check_complete(architecture: Architecture, places: Mapping[str, Place]) -> None:
    covered = set(places)
    for name in places:
        fused = architecture.fused.get(name)
        if fused is not None:
            _check_once(fused, places)
            covered.update(p.name for p in fused.parts)
    native = {p.name: name for name, e in architecture.fused.items() if e.fusion.native for p in e.parts}
    for name, place in architecture.places.items():
        if name in covered or (place.role == "lm_head" and architecture.tied):
            continue
        raise CorruptCheckpoint(
            f"{native.get(name, name)}: missing; config.json promises it"
            + (f" ({_layer_keys(architecture)})" if place.layer is not None else "")
            + (f" ({architecture.family.tied_by} is not true)" if place.role == "lm_head" else ""),
            "download the missing shard, or correct config.json",
        )


def _check_once(fused: FusedPlace, places: Mapping[str, Place]) -> None:
    twice = next((p.name for p in fused.parts if p.name in places), None)
    if twice is not None:
        raise CorruptCheckpoint(
            f"{fused.whole.name}: stored beside {twice}, which it contains", "remove one of the two"
        )
