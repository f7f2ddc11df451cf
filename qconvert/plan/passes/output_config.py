"""Writes the output's config.json: the source's, with the keys that the output changes."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.activations import NO_SCALES, ActivationScheme
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.errors import UnsupportedModel
from qconvert.formats.layouts import registry
from qconvert.plan.loader_notices import notices
from qconvert.plan.state import Compiled

TORCH_NAMES = {DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}


def write_config(state: Compiled) -> Compiled:
    """The config.json in the form that the layout takes, and warnings about the output."""
    state = replace(state, layout=state.layout.fitted(each for _, each in _Modules(state.outputs).pairs()))
    config = _config(state)
    dropped = (f"{name}: a buffer the model recomputes; left out" for name in state.binding.dropped)
    state = state.warn(*dropped)
    state = state.warn(*_activations(state, config))
    found = notices(state.outputs, state.architecture, state.request.recipe.layout, tied=state.tied)
    return replace(state, config=config, notices=tuple(found))


def _config(state: Compiled) -> Json:
    """No other key is touched than those that say what changes."""
    architecture, dtype = state.architecture, state.request.dtype
    config: dict[str, Any] = copy.deepcopy(dict(architecture.config))
    if state.tied != state.binding.architecture.tied:
        config[state.binding.architecture.family.tied_by] = state.tied
    if dtype is not None:
        for key in {"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}:
            config[key] = TORCH_NAMES[dtype]
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    quantized = _Modules(state.outputs)
    if any(True for _ in quantized):
        config |= _settings(state, quantized)
    return config


class _Modules(Mapping[str, Quantized]):
    """The encodings of quantized modules; names of half a million are made as they are asked for."""

    def __init__(self, outputs: Mapping[str, ModelTensor]) -> None:
        self._outputs = outputs

    def __getitem__(self, module: str) -> Quantized:
        for name in (f"{module}.weight", module):
            tensor = self._outputs.get(name)
            if tensor is not None and isinstance(tensor.encoding, Quantized):
                return tensor.encoding
        raise KeyError(module)

    def __iter__(self) -> Iterator[str]:
        return (module for module, _ in self.pairs())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> ItemsView[str, Quantized]:
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, Quantized]]:
        for name, tensor in self._outputs.items():
            if isinstance(tensor.encoding, Quantized):
                yield _module(name), tensor.encoding


class _Items(ItemsView[str, Quantized]):
    """Modules with their encodings, without looking each up."""

    _mapping: _Modules

    def __iter__(self) -> Iterator[tuple[str, Quantized]]:
        return self._mapping.pairs()


def _settings(state: Compiled, quantized: Mapping[str, Quantized]) -> Json:
    kept = _kept(state, quantized)
    if state.beside == NO_SCALES:
        return state.layout.settings(quantized, kept)
    return state.layout.settings_beside(quantized, kept, state.beside)


def _kept(state: Compiled, quantized: Mapping[str, Quantized]) -> list[str]:
    """The modules of linears that stay plain."""
    plain = [name for name, tensor in state.outputs.items() if not _is_coded(tensor)]
    linears = (
        parameter
        for parameter in state.architecture.parameters_in(plain)
        if parameter is not None
        and parameter.kind != "embedding"
        and parameter.param == "weight"
        and len(parameter.shape) == 2
    )
    kept = [parameter.module for parameter in linears if parameter.module not in quantized]
    kept += [_module(name) for name in state.binding.unknown if len(state.outputs[name].shape) == 2]
    head = state.architecture.table("lm_head")
    return [*kept, head.module] if state.tied and head is not None else kept


def _is_coded(tensor: ModelTensor) -> bool:
    """Whether a tensor is the weight of a module that is quantized."""
    return tensor.name.endswith(".weight") and isinstance(tensor.encoding, Quantized)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _activations(state: Compiled, config: Json) -> list[str]:
    """What changes about the inputs of linears where quantized weights stay quantized.

    Raises UnsupportedModel where numbers are stored for them, and another layout was not asked for.
    """
    if not state.binding.architecture.config.get("quantization_config"):
        return []
    before = _schemes(state.binding.architecture.config, state.binding.tensors)
    after = _schemes(config, state.outputs)
    scales = sum(scale.of == "inputs" for scale, _ in state.facts.scales)
    kept = after if len(state.beside.inputs) == scales else set()
    lost = sorted(scheme.label for scheme in before - kept if scheme.stored)
    cut = {scheme.most for scheme in before if scheme.most} - {scheme.most for scheme in after}
    if cut and after:
        return [
            f"config.json: the source's inputs are cut to {max(cut):g}; no loader of this layout cuts them"
        ]
    if lost and config.get("quantization_config") and not state.request.target:
        raise UnsupportedModel(
            f"config.json: inputs of linears are {lost[0]}, with stored numbers, which would be lost",
            "`qconvert convert --to` another layout, or `qconvert dequantize`",
        )
    if lost and after:
        return [f"config.json: the source's {lost[0]} activations get scales of their own in this layout"]
    if not state.request.target or bool(before) == bool(after):
        return []
    bits = max(scheme.bits for scheme in before | after)
    if after:
        return [
            f"config.json: loaders of this layout quantize activations to {bits} bits, the source's do not"
        ]
    return [
        f"config.json: the source's loaders quantize activations to {bits} bits, those of this layout do not"
    ]


def _schemes(config: Json, tensors: Mapping[str, ModelTensor]) -> set[ActivationScheme]:
    """How loaders quantize the inputs of the linears of a model with this config.json."""
    quantized = (tensor for tensor in tensors.values() if not isinstance(tensor.encoding, Unquantized))
    return {scheme.computed for _, scheme in registry.activations_of(config, quantized)}
