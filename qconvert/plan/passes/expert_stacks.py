"""Turns the tensors of one layout into those of another: stacks of experts, and which tensors stay plain.

Layouts differ in how they store the experts of a layer. Some have a linear for each, one has the stacks of
the model's class, one a stack for each projection; here the plan's tensors become those of the target, and
`plan.passes.transcode` gives each the encoding that it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from qconvert.core.encodings import AffineInt, Codebook, GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, FusedParameter, Parameter
from qconvert.ops.transcode import FoldDivisor
from qconvert.plan import plan as passes
from qconvert.plan.passes.transcode import Target, encode, transcode
from qconvert.plan.plan import Plan, Unit

# Whether the scales of an NVFP4 weight, divided by the number of its tensor, are such scales again.
Folds = Callable[[ModelTensor], bool]


def relaid(plan: Plan, architecture: Architecture, target: Target, folds: Folds | None = None) -> Plan:
    """The plan with every tensor as the target layout has it.

    `folds` is asked about NVFP4 weights where the layout has no number for a whole tensor. Raises
    BadRecipe for a model that the layout cannot store, naming a weight where one is the reason.
    """
    traits = target.traits
    plan = _stacked(plan, architecture) if traits.experts == "class" else _apart(plan, architecture, target)
    if traits.absorbs_divisor and folds:
        plan = _divisors_absorbed(plan, folds)
    if any(not isinstance(t.encoding, Unquantized) for t in plan.outputs.values()):
        plan = transcode(target, _stored_plain(plan, architecture, traits))(plan)
    elif target.codebook:
        plan = _encoded(plan, architecture, target)
    else:
        raise BadRecipe(
            f"no quantized tensors to write as {target.layout}",
            "add --scheme int4-g128 to quantize this checkpoint on the way",
        )
    own = [entry for entry in architecture.fused.values() if entry.fusion.layout == target.layout]
    return passes.stack_all(own)(plan)


def as_the_class_stores(plan: Plan, architecture: Architecture) -> Plan:
    """The plan with stacks that only one layout knows taken apart, or as the family's own class has them."""
    foreign = {name for name, entry in architecture.fused.items() if entry.fusion.layout}
    if not foreign & plan.outputs.keys():
        return plan
    entries = architecture.fused.values()
    plan = passes.cut_where(architecture, lambda entry: bool(entry.fusion.layout))(plan)
    return passes.stack_all([e for e in entries if e.fusion.native and e.fusion.per_expert])(plan)


def _divisors_absorbed(plan: Plan, folds: Folds) -> Plan:
    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        divided = isinstance(encoding, Codebook) and encoding.is_nvfp4 and encoding.second == "divided"
        return unit.then(FoldDivisor()) if divided and all(folds(s.tensor) for s in unit.inputs) else unit

    return replace(plan, units=tuple(one(unit) for unit in plan.units))


def parameters_of(plan: Plan, architecture: Architecture) -> dict[str, Parameter]:
    """The places of a plan's outputs, fused or not, by name."""
    found = ((name, architecture.parameter(name)) for name in plan.outputs)
    return {name: parameter for name, parameter in found if parameter is not None}


def _apart(plan: Plan, architecture: Architecture, target: Target) -> Plan:
    """Experts one by one where the layout has no stacks, or these are another layout's or input-major."""

    def foreign(entry: FusedParameter) -> bool:
        other = entry.whole.transposed or bool(entry.fusion.layout)
        return entry.fusion.per_expert and (other or target.traits.experts == "apart")

    return passes.cut_where(architecture, foreign)(plan)


def _stored_plain(plan: Plan, architecture: Architecture, traits: LayoutTraits) -> frozenset[str]:
    """Names of the tensors that a layout stores as numbers alone.

    Embeddings are quantized as its traits say, but those in GGML blocks, which llama.cpp has in every model.
    A layout of stacks of experts quantizes nothing else.
    """
    parameters, outputs = parameters_of(plan, architecture), plan.outputs
    tables = {n for n, p in parameters.items() if p.kind == "embedding" or p.role == "lm_head"}
    blocks = {name for name in tables if isinstance(outputs[name].encoding, GgmlBlocks)}
    if traits.experts == "class":
        return frozenset(parameters.keys() - _expert_stacks(parameters))
    encodings = {n: outputs[n].encoding for n in tables if parameters[n].kind == "embedding"}
    quantized = set(encodings) if traits.embeddings == "any" else set()
    if traits.embeddings == "symmetric":
        quantized = {n for n, e in encodings.items() if isinstance(e, AffineInt) and e.symmetric}
    return frozenset(blocks | encodings.keys() - quantized)


def _stacked(plan: Plan, architecture: Architecture) -> Plan:
    """The experts of every layer in the stacks that gpt-oss's class stores; BadRecipe for other classes."""
    fused = architecture.fused.values()
    entries = [entry for entry in fused if entry.fusion.per_expert and not entry.fusion.layout]
    if any(entry.whole.transposed for entry in entries):
        apart = passes.cut_where(architecture, lambda entry: bool(entry.fusion.layout))(plan)
        return passes.stack_all(entries)(apart)
    encodings = {t.encoding for t in plan.outputs.values() if not isinstance(t.encoding, Unquantized)}
    way = "--to compressed-tensors --scheme mxfp4"
    if any(isinstance(encoding, Codebook) and encoding.is_mxfp4 for encoding in encodings):
        way = "--to compressed-tensors, --to mlx or --to gguf, with the same codes"
    elif encodings:
        way += " --allow-requantize, which loses twice"
    raise BadRecipe(
        f"{architecture.family.name}: no stacks of experts stored input-major, which alone mxfp4 holds",
        f"it is the layout of gpt-oss; for other models, {way}",
    )


def _expert_stacks(parameters: Mapping[str, Parameter]) -> set[str]:
    return {n for n, p in parameters.items() if p.transposed and len(p.shape) == 3 and p.param == "weight"}


def _encoded(plan: Plan, architecture: Architecture, target: Target) -> Plan:
    """New codes of a table for the linears; in a layout of stacks of experts, for these."""
    stacks = target.traits.experts == "class"
    if not stacks:
        plan = passes.unstack(architecture)(plan)
    parameters = parameters_of(plan, architecture)
    weights = {
        name
        for name, parameter in parameters.items()
        if parameter.kind == "linear" and parameter.param == "weight" and parameter.role != "lm_head"
    }
    if stacks:
        weights &= _expert_stacks(parameters)
    entries = [entry for entry in architecture.fused.values() if not entry.fusion.per_expert]
    shared = {
        part.name: entry.whole.name for entry in entries for part in entry.members if part.name in weights
    }
    return encode(target, frozenset(weights), shared)(plan)
