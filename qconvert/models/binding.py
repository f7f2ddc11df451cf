"""Matches the tensors of a checkpoint with an architecture by name and shape; reads no tensor.

Every stored tensor is a known parameter, a recomputed buffer, or unknown; every required one must be present,
fused or unfused.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, replace

from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.models.architecture import Architecture
from qconvert.models.expanded import Parameter
from qconvert.models.families.vision import PREPROCESSOR


@dataclass(frozen=True, slots=True)
class Binding:
    """The tensors of a checkpoint: known parameters, dropped buffers, others.

    `unknown` are the tensors that no template declares: those of other parts of the model (a vision tower),
    and with `allow_unknown` any.
    """

    architecture: Architecture
    tensors: Mapping[str, ModelTensor]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        counts = (len(self.tensors), len(self.dropped), len(self.unknown))
        held = "{:,} tensors, {:,} left out, {:,} unknown".format(*counts)
        return f"Binding {self.architecture.family.name}: {held}"

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The known parameters that are stored, in the order of the tensors."""
        return _Stored(self)

    def kind(self, name: str) -> str:
        parameter = self.parameters.get(name)
        return parameter.kind if parameter is not None else "unknown"

    @property
    def stored_tied_head(self) -> str | None:
        """The name of a stored head that the config says is the embedding, if there is one."""
        if not self.architecture.tied:
            return None
        head = self.architecture.table("lm_head")
        return head.name if head is not None and head.name in self.tensors else None

    @property
    def fusions_found(self) -> tuple[str, ...]:
        """The roles of the stored fused tensors, each once, in the order of the family's table."""
        fused = self.architecture.fused
        stored = {entry.fusion.role for name, entry in fused.items() if name in self.tensors}
        return tuple(f.role for f in self.architecture.family.fusions if f.role in stored)


class _Stored(Mapping[str, Parameter]):
    """The parameters that are stored; looked up, so that no other dictionary of very many is held."""

    __slots__ = ("_binding",)

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def __getitem__(self, name: str) -> Parameter:
        found = self._binding.architecture.parameter(name) if name in self._binding.tensors else None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs())

    def __len__(self) -> int:
        binding = self._binding
        return len(binding.tensors) - len(binding.dropped) - len(binding.unknown)

    def items(self) -> ItemsView[str, Parameter]:
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, Parameter]]:
        tensors = self._binding.tensors
        found = zip(tensors, self._binding.architecture.parameters_in(tensors), strict=True)
        return ((name, parameter) for name, parameter in found if parameter is not None)


class _Items(ItemsView[str, Parameter]):
    """Parameters with their names, without looking each up."""

    _mapping: _Stored

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return self._mapping.pairs()


def bind(
    architecture: Architecture, tensors: Mapping[str, ModelTensor], *, allow_unknown: bool = False
) -> Binding:
    """Matches a checkpoint's tensors with the architecture, in the naming variant they follow.

    Raises CorruptCheckpoint for a missing tensor or a shape that contradicts the config (naming the config
    keys), UnsupportedModel for an undeclared tensor unless `allow_unknown`.
    """
    architecture = architecture.spelled_like(tensors)
    unknown: list[str] = []
    dropped: list[str] = []
    found = architecture.parameters_in(tensors)
    for (name, tensor), parameter in zip(tensors.items(), found, strict=True):
        if parameter is None:
            (dropped if architecture.ignores(name) else unknown).append(name)
        elif tensor.shape != parameter.shape:
            _refuse_shape(architecture, parameter, tensor)
    undeclared = [name for name in unknown if architecture.carries(name) is None]
    if undeclared and not allow_unknown:
        _refuse_unknown(architecture, undeclared)
    _check_complete(architecture, tensors)
    return Binding(architecture, tensors, tuple(dropped), tuple(unknown))


def bind_tower(whole: Binding, preprocessor: Json) -> Binding:
    """Matches the tensors beside a language model with its vision tower, as a model of its own.

    `preprocessor` is preprocessor_config.json. The tower's config holds it and that of the whole model.
    Raises UnsupportedModel for a model without a tower that is declared, and what `bind` raises.
    """
    tower = whole.architecture.tower
    if tower is None:
        raise UnsupportedModel(
            f"config.json: {whole.architecture.family.name} has no vision tower that is known here",
            "llama.cpp's convert_hf_to_gguf.py --mmproj knows more towers",
        )
    config = {**tower.config, PREPROCESSOR: preprocessor}
    beside = {
        name: whole.tensors[name] for name in whole.unknown if whole.architecture.carries(name) == "vision"
    }
    return bind(replace(tower, config=config), beside)


def _refuse_shape(architecture: Architecture, parameter: Parameter, tensor: ModelTensor) -> None:
    keys = ", ".join(
        f"{' + '.join(architecture.config_key(d) for d in dim.split(' + '))} = {size}"
        for dim, size in zip(parameter.dims, parameter.shape, strict=True)
    )
    raise CorruptCheckpoint(
        f"{parameter.name}: shape {list(tensor.shape)}, but config.json gives {list(parameter.shape)} "
        f"({keys})",
        "the weights and the config.json are of different models, or one of them was edited",
    )


def _refuse_unknown(architecture: Architecture, unknown: list[str]) -> None:
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    first_known = next(iter(architecture.parameters))
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


def _check_complete(architecture: Architecture, stored: Mapping[str, ModelTensor]) -> None:
    covered: set[str] = set()
    for name, fused in architecture.fused.items():
        if name in stored:
            twice = next((p.name for p in fused.members if p.name in stored), None)
            if twice is not None:
                raise CorruptCheckpoint(
                    f"{name}: stored beside {twice}, which it contains", "remove one of the two"
                )
            covered.update(p.name for p in fused.members)
    for name, parameter in architecture.parameters.items():
        if name in stored or name in covered or (parameter.role == "lm_head" and architecture.tied):
            continue
        native = {p.name: n for n, e in architecture.fused.items() if e.fusion.native for p in e.members}
        raise CorruptCheckpoint(
            f"{native.get(name, name)}: missing; config.json promises it"
            + (f" ({_layer_keys(architecture)})" if parameter.layer is not None else "")
            + (f" ({architecture.family.tied_by} is not true)" if parameter.role == "lm_head" else ""),
            "download the missing shard, or correct config.json",
        )
