"""Turns the tensors of one layout into those of another: stacks of experts, and which tensors stay plain.

Layouts differ in how they store the experts of a layer. Some have a linear for each, one has the stacks of
the model's class, one a stack for each projection; here the plan's tensors become those of the target, and
`plan.passes.transcode` gives each the encoding that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.encodings import AffineInt, Codebook, GgmlBlocks, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, FusedParameter, Parameter
from qconvert.ops import Transcode
from qconvert.plan.passes.fuse import cut_where, stack_members, unstack_experts
from qconvert.plan.passes.transcode import Target, encode, transcode
from qconvert.plan.plan import Plan, Unit
from qconvert.plan.selectors import kept, parameters_of
from qconvert.plan.state import Compiled


def bring_into_layout(state: Compiled) -> Compiled:
    """Every tensor as the target layout stores it, its codes kept wherever the formats map.

    Raises BadRecipe for a model that the layout cannot store, naming a weight where one is the reason.
    """
    target, architecture = state.request.layout_target, state.architecture
    if target is None:
        return state
    if target.traits.experts == "class":
        plan = _stacked(state.plan, architecture)
    else:
        plan = _apart(state.plan, architecture, target)
    if target.traits.absorbs_divisor:
        plan = _absorb_divisors(plan, state.facts.absorbable_divisors)
    if any(not isinstance(t.encoding, Unquantized) for t in plan.outputs.values()):
        plain, tables = _stored_plain(plan, architecture, target.traits), _tables(plan, architecture)
        plan = transcode(plan, target, plain, tables - plain)
    elif target.codebook:
        plan = _encoded(plan, state, target)
    else:
        raise BadRecipe(
            f"{target.layout}: there are no quantized tensors to write in this layout",
            "add --scheme int4-g128 to quantize this checkpoint on the way",
        )
    own = [entry for entry in architecture.fused.values() if entry.fusion.layout == target.layout]
    return state.with_plan(stack_members(plan, own))


def restack_for_class(state: Compiled) -> Compiled:
    """Where all becomes plain: stacks that only one layout has are cut, or become those of the class."""
    architecture, plan = state.architecture, state.plan
    foreign = {name for name, entry in architecture.fused.items() if entry.fusion.layout}
    if not state.request.dequantize or not foreign & plan.outputs.keys():
        return state
    plan = cut_where(plan, architecture, lambda entry: bool(entry.fusion.layout))
    stacks = [e for e in architecture.fused.values() if e.fusion.native and e.fusion.per_expert]
    return state.with_plan(stack_members(plan, stacks))


def _absorb_divisors(plan: Plan, absorbable: frozenset[str]) -> Plan:
    def one(unit: Unit) -> Unit:
        absorbs = isinstance(unit.output.encoding, Codebook) and all(
            piece.tensor.name in absorbable for piece in unit.inputs
        )
        return unit.then(Transcode("absorb_divisor")) if absorbs else unit

    return plan.each(one)


def _apart(plan: Plan, architecture: Architecture, target: Target) -> Plan:
    """Experts one by one where the layout has no stacks, or these are another layout's or input-major."""

    def foreign(entry: FusedParameter) -> bool:
        other = entry.whole.transposed or bool(entry.fusion.layout)
        return entry.fusion.per_expert and (other or target.traits.experts == "apart")

    return cut_where(plan, architecture, foreign)


def _stored_plain(plan: Plan, architecture: Architecture, traits: LayoutTraits) -> frozenset[str]:
    """Names of the tensors that a layout stores as numbers alone.

    Embeddings are quantized as its traits say, but those in GGML blocks, which llama.cpp has in every model,
    only where these say: any. A layout of stacks of experts quantizes nothing else.
    """
    parameters, outputs = parameters_of(plan, architecture), plan.outputs
    if traits.experts == "class":
        return frozenset(parameters.keys() - _expert_stacks(parameters))
    tables = _tables(plan, architecture)
    encodings = {n: outputs[n].encoding for n in tables if parameters[n].kind == "embedding"}
    if traits.embeddings == "any":
        return frozenset()
    blocks = {name for name in tables if isinstance(outputs[name].encoding, GgmlBlocks)}
    quantized = set()
    if traits.embeddings == "symmetric":
        quantized = {n for n, e in encodings.items() if isinstance(e, AffineInt) and e.symmetric}
    return frozenset(blocks | encodings.keys() - quantized)


def _tables(plan: Plan, architecture: Architecture) -> frozenset[str]:
    """Names of the embeddings and the head."""
    parameters = parameters_of(plan, architecture)
    return frozenset(n for n, p in parameters.items() if p.kind == "embedding" or p.role == "lm_head")


def _stacked(plan: Plan, architecture: Architecture) -> Plan:
    """The experts of every layer in the stacks that gpt-oss's class stores; BadRecipe for other classes."""
    fused = architecture.fused.values()
    entries = [entry for entry in fused if entry.fusion.per_expert and not entry.fusion.layout]
    if any(entry.whole.transposed for entry in entries):
        apart = cut_where(plan, architecture, lambda entry: bool(entry.fusion.layout))
        return stack_members(apart, entries)
    encodings = {t.encoding for t in plan.outputs.values() if not isinstance(t.encoding, Unquantized)}
    way = "--to compressed-tensors --scheme mxfp4"
    if any(isinstance(encoding, Codebook) and encoding.is_mxfp4 for encoding in encodings):
        way = "--to compressed-tensors, --to mlx or --to gguf, with the same codes"
    elif encodings:
        way += " --allow-requantize, which loses twice"
    raise BadRecipe(
        f"{architecture.family.name}: no stacks of experts stored input-major, as mxfp4 holds them",
        f"it is the layout of gpt-oss; for other models, {way}",
    )


def _expert_stacks(parameters: Mapping[str, Parameter]) -> set[str]:
    return {n for n, p in parameters.items() if p.transposed and len(p.shape) == 3 and p.param == "weight"}


def _encoded(plan: Plan, state: Compiled, target: Target) -> Plan:
    """New codes of a table for the linears but those that rules keep; in a layout of stacks, for these."""
    architecture = state.architecture
    stacks = target.traits.experts == "class"
    if not stacks:
        plan = unstack_experts(plan, architecture)
    parameters = parameters_of(plan, architecture)
    weights = {
        name
        for name, parameter in parameters.items()
        if parameter.kind == "linear" and parameter.param == "weight" and parameter.role != "lm_head"
    }
    if stacks:
        weights &= _expert_stacks(parameters)
    weights -= kept(state.request.recipe, architecture, parameters, tied=state.tied)
    entries = [entry for entry in architecture.fused.values() if not entry.fusion.per_expert]
    shared = {
        part.name: entry.whole.name for entry in entries for part in entry.members if part.name in weights
    }
    return encode(plan, target, frozenset(weights), shared)
