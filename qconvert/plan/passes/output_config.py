"""Writes the output's config.json: the source's, with the keys that the output changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import Quantized
from qconvert.plan.loader_notices import notices
from qconvert.plan.selectors import parameters_of
from qconvert.plan.state import Compiled

TORCH_NAMES = {DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}


def write_config(state: Compiled) -> Compiled:
    """The config.json, and what the user should hear about the output as a whole."""
    config = _config(state)
    dropped = (f"{name}: a buffer the model recomputes; left out" for name in state.binding.dropped)
    state = state.warn(*dropped)
    if state.request.target:
        state = state.warn(*_activations(state.architecture.config, config))
    found = notices(state.outputs, state.architecture, state.request.recipe.layout)
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
    outputs = state.outputs
    quantized = {_module(n): t.encoding for n, t in outputs.items() if isinstance(t.encoding, Quantized)}
    if quantized:
        config |= state.layout.settings(quantized, _kept(state, quantized))
    return config


def _kept(state: Compiled, quantized: dict[str, Quantized]) -> list[str]:
    """The modules of linears that stay plain."""
    linears = [
        parameter.module
        for parameter in parameters_of(state.plan, state.architecture).values()
        if parameter.kind != "embedding" and parameter.param == "weight" and len(parameter.shape) == 2
    ]
    kept = [module for module in linears if module not in quantized]
    kept += [_module(name) for name in state.binding.unknown if len(state.outputs[name].shape) == 2]
    head = state.architecture.table("lm_head")
    return [*kept, head.module] if state.tied and head is not None else kept


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _activations(before: Json, after: Json) -> list[str]:
    """What changes about activations when quantized weights go to another layout."""
    if not before.get("quantization_config") or _eight_bit_inputs(before) == _eight_bit_inputs(after):
        return []
    if _eight_bit_inputs(after):
        return ["config.json: loaders of this layout quantize activations to 8 bits, the source's do not"]
    return ["config.json: the source's loaders quantize activations to 8 bits, those of this layout do not"]


def _eight_bit_inputs(config: Json) -> bool:
    """Whether a config makes loaders multiply 8-bit activations, scaled as they come."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return False
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    inputs = any(isinstance(group, dict) and group.get("input_activations") for group in listed)
    return bool(inputs or settings.get("activation_scheme") or settings.get("load_in_8bit"))
