"""Carries the scales that lie beside weights: of the inputs of linears, and of keys and values in a cache.

What the layout of the output has no place for is left out and named.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.activations import ScalesBeside, StoredScale
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized, Unquantized
from qconvert.ops import Cast, Transcode
from qconvert.plan.plan import Plan, Unit
from qconvert.plan.state import Compiled


def carry_scales(state: Compiled) -> Compiled:
    """One tensor more for every scale that the output's layout has a place for; those without are named."""
    units = filter(_is_coded, state.plan.units)
    coded = {u.output.name.removesuffix(".weight"): u for u in units} if state.facts.scales else {}
    made: list[Unit] = []
    inputs: set[str] = set()
    lost: list[str] = []
    for scale, tensor in state.facts.scales:
        place = _place(state, scale, coded)
        if place is None:
            lost += [] if scale.of == "inputs" else [tensor.name]
            continue
        made.append(_unit(state, scale, tensor, place))
        inputs |= {scale.module} if scale.of == "inputs" else set()
    cache = state.facts.cache_format if state.facts.cache_format and _keeps_cache(state) else ""
    plan = _with_dynamic_inputs(state, inputs)
    plan = replace(plan, units=(*plan.units, *made)) if made else plan
    named = _left_out(state, lost) if lost or (state.facts.cache_format and not cache) else ()
    beside = ScalesBeside(frozenset(inputs), cache)
    return replace(state.warn(*named), plan=plan, beside=beside, left_out=named)


def _is_coded(unit: Unit) -> bool:
    return isinstance(unit.output.encoding, Quantized)


def _place(state: Compiled, scale: StoredScale, coded: dict[str, Unit]) -> TensorSpec | None:
    """Where the output has a scale: that of inputs only beside a weight whose codes are the source's."""
    if scale.of != "inputs":
        return state.layout.place_of_scale(scale, None) if coded else None
    unit = coded.get(scale.module)
    if unit is None or unit.quantizes:
        return None
    assert isinstance(unit.output.encoding, Quantized)
    return state.layout.place_of_scale(scale, unit.output.encoding)


def _unit(state: Compiled, scale: StoredScale, tensor: ModelTensor, place: TensorSpec) -> Unit:
    unit = Unit(tensor, (), ModelTensor(place.name, place.shape, tensor.encoding))
    if tensor.encoding != Unquantized(DType.F32):
        unit = unit.then(Cast(DType.F32))
    there = state.layout.scale_stored_as(place.name)
    return unit if there is None or there.inverse == scale.inverse else unit.then(Transcode("invert"))


def _keeps_cache(state: Compiled) -> bool:
    probe = StoredScale("keys", "model.layers.0.self_attn")
    return any(map(_is_coded, state.plan.units)) and state.layout.place_of_scale(probe, None) is not None


def _left_out(state: Compiled, lost: list[str]) -> tuple[str, ...]:
    plain = all(isinstance(tensor.encoding, Unquantized) for tensor in state.outputs.values())
    why = "plain weights have no settings that name them"
    if not plain:
        why = f"{state.layout.name} has no place for them"
    if not lost:
        return (f"config.json: caches of keys and values are {state.facts.cache_format}, left out: {why}",)
    more = f" and {len(lost) - 1} more scales" if len(lost) > 1 else ""
    return (f"{lost[0]}{more}: of keys and values in a cache, left out: {why}",)


def _with_dynamic_inputs(state: Compiled, inputs: set[str]) -> Plan:
    """Weights in encodings for which loaders do without stored scales of inputs, where there are none."""

    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        if not isinstance(encoding, Codebook) or unit.output.name.removesuffix(".weight") in inputs:
            return unit
        other = state.layout.without_input_scale(encoding)
        return unit if other is None else unit.then(Transcode("repeat_tensor_scale", other))

    return state.plan.each(one)
