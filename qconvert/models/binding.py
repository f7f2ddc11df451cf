"""Matches the tensors of a checkpoint with an architecture by name and shape; reads no tensor.

Every stored tensor is a known parameter, a recomputed buffer, or unknown; every required one must be present,
fused or unfused.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    parameters: Mapping[str, Parameter]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]

    def kind(self, name: str) -> str:
        return self.parameters[name].kind if name in self.parameters else "unknown"

    @property
    def stored_tied_head(self) -> str | None:
        """The name of a stored head that the config says is the embedding, if there is one."""
        if not self.architecture.tied:
            return None
        return next(
            (n for n, p in self.parameters.items() if p.role == "lm_head" and p.param == "weight"), None
        )

    @property
    def fusions_found(self) -> tuple[str, ...]:
        """The roles of the stored fused tensors, each once, in the order of the family's table."""
        fused = self.architecture.fused
        stored = {fused[name].fusion.role for name in self.parameters if name in fused}
        return tuple(f.role for f in self.architecture.family.fusions if f.role in stored)


def bind(
    architecture: Architecture, tensors: Mapping[str, ModelTensor], *, allow_unknown: bool = False
) -> Binding:
    """Matches a checkpoint's tensors with the architecture, in the naming variant they follow.

    Raises CorruptCheckpoint for a missing tensor or a shape that contradicts the config (naming the config
    keys), UnsupportedModel for an undeclared tensor unless `allow_unknown`.
    """
    architecture = architecture.spelled_like(tensors)
    parameters: dict[str, Parameter] = {}
    unknown: list[str] = []
    dropped: list[str] = []
    for name, tensor in tensors.items():
        parameter = architecture.parameter(name)
        if parameter is not None:
            if tensor.shape != parameter.shape:
                _refuse_shape(architecture, parameter, tensor)
            parameters[name] = parameter
        else:
            (dropped if architecture.ignores(name) else unknown).append(name)
    undeclared = [name for name in unknown if architecture.carries(name) is None]
    if undeclared and not allow_unknown:
        _refuse_unknown(architecture, undeclared)
    _check_complete(architecture, parameters)
    return Binding(architecture, tensors, parameters, tuple(dropped), tuple(unknown))


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


def _check_complete(architecture: Architecture, parameters: Mapping[str, Parameter]) -> None:
    covered: set[str] = set()
    for name, fused in architecture.fused.items():
        if name in parameters:
            twice = next((p.name for p in fused.members if p.name in parameters), None)
            if twice is not None:
                raise CorruptCheckpoint(
                    f"{name}: stored beside {twice}, which it contains", "remove one of the two"
                )
            covered.update(p.name for p in fused.members)
    for name, parameter in architecture.parameters.items():
        if name in parameters or name in covered or (parameter.role == "lm_head" and architecture.tied):
            continue
        native = {p.name: n for n, e in architecture.fused.items() if e.fusion.native for p in e.members}
        raise CorruptCheckpoint(
            f"{native.get(name, name)}: missing; config.json promises it"
            + (f" ({_layer_keys(architecture)})" if parameter.layer is not None else "")
            + (f" ({architecture.family.tied_by} is not true)" if parameter.role == "lm_head" else ""),
            "download the missing shard, or correct config.json",
        )
