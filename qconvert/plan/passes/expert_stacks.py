"""From the tensors of one layout to those of another: stacks of experts, and which tensors stay numbers.

Layouts differ in what they call the experts of a layer. Some hold a linear for each, gpt-oss's its class's
turned stacks, MLX one stack for each projection; here the plan's tensors become those of the target,
and `plan.passes.layout_rules` gives each the form that it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from qconvert.core.encodings import AffineInt, Codebook, GgmlBlocks, ModelTensor, Unquantized
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, FusedParameter, Parameter
from qconvert.ops import Transcode
from qconvert.plan.passes.fuse import cut_where, stack_members, unstack_experts
from qconvert.plan.passes.layout_rules import Target, encode, regrid
from qconvert.plan.plan import Plan, Unit
from qconvert.plan.selectors import parameters_of
from qconvert.plan.state import Compiled

# Layouts whose quantized weights are linears, none of them a stack.
_LINEARS = ("gptq", "gptq_v2", "awq", "mlx", "bitsandbytes")


# Whether the scales of an NVFP4 weight, divided by the number of its tensor, are such scales again.
Folds = Callable[[ModelTensor], bool]


def relaid(plan: Plan, architecture: Architecture, target: Target, folds: Folds | None = None) -> Plan:
    """The plan with every tensor as the target layout has it.

    `folds` is asked about NVFP4 weights where the layout has no number for a whole tensor. Raises
    BadRecipe for a model that the layout cannot hold, naming a weight where one is the reason.
    """
    plan = _stacked(plan, architecture) if target.layout == "mxfp4" else _apart(plan, architecture, target)
    if target.layout == "mlx" and folds:
        plan = _folded(plan, folds)
    if any(not isinstance(t.encoding, Unquantized) for t in plan.outputs.values()):
        plan = regrid(target, _held_plain(plan, architecture, target.layout))(plan)
    elif target.new_table:
        plan = _encoded(plan, architecture, target)
    else:
        raise BadRecipe(
            f"no quantized tensors to write as {target.layout}",
            "add --scheme int4-g128 to quantize this checkpoint on the way",
        )
    own = [entry for entry in architecture.fused.values() if entry.fusion.layout == target.layout]
    return stack_members(plan, own)


def restack_for_class(state: Compiled) -> Compiled:
    """Where all becomes plain: stacks that only one layout has are cut, or become those of the class."""
    architecture, plan = state.architecture, state.plan
    foreign = {name for name, entry in architecture.fused.items() if entry.fusion.layout}
    if not state.request.dequantize or not foreign & plan.outputs.keys():
        return state
    plan = cut_where(plan, architecture, lambda entry: bool(entry.fusion.layout))
    stacks = [e for e in architecture.fused.values() if e.fusion.native and e.fusion.per_expert]
    return state.with_plan(stack_members(plan, stacks))


def _folded(plan: Plan, folds: Folds) -> Plan:
    def one(unit: Unit) -> Unit:
        encoding = unit.output.encoding
        divided = isinstance(encoding, Codebook) and encoding.is_nvfp4 and encoding.second == "divided"
        return (
            unit.then(Transcode("absorb_divisor"))
            if divided and all(folds(s.tensor) for s in unit.inputs)
            else unit
        )

    return replace(plan, units=tuple(one(unit) for unit in plan.units))


def _apart(plan: Plan, architecture: Architecture, target: Target) -> Plan:
    """Experts one by one where the layout has no stacks, or these are another layout's or turned."""

    def foreign(entry: FusedParameter) -> bool:
        turned = entry.whole.transposed or bool(entry.fusion.layout)
        return entry.fusion.per_expert and (turned or target.layout in _LINEARS)

    return cut_where(plan, architecture, foreign)


def _held_plain(plan: Plan, architecture: Architecture, layout: str) -> frozenset[str]:
    """Names of the tensors that a layout holds as numbers alone.

    Quantized tables are MLX's, and vLLM reads symmetric ones of compressed-tensors; those of GGUF are what
    llama.cpp makes of every model. gpt-oss's layout holds its experts.
    """
    parameters, outputs = parameters_of(plan, architecture), plan.outputs
    tables = {n for n, p in parameters.items() if p.kind == "embedding" or p.role == "lm_head"}
    blocks = {name for name in tables if isinstance(outputs[name].encoding, GgmlBlocks)}
    if layout == "mxfp4":
        return frozenset(parameters.keys() - _expert_stacks(parameters))
    if layout == "mlx":
        return frozenset(blocks)
    encodings = {n: outputs[n].encoding for n in tables if parameters[n].kind == "embedding"}
    kept = layout == "compressed-tensors"
    held = {n for n, f in encodings.items() if kept and isinstance(f, AffineInt) and f.symmetric}
    return frozenset(blocks | encodings.keys() - held)


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
        f"{architecture.family.name}: no stacks of experts stored input-major, which alone mxfp4 holds",
        f"it is the layout of gpt-oss; for other models, {way}",
    )


def _expert_stacks(parameters: Mapping[str, Parameter]) -> set[str]:
    return {n for n, p in parameters.items() if p.transposed and len(p.shape) == 3 and p.param == "weight"}


def _encoded(plan: Plan, architecture: Architecture, target: Target) -> Plan:
    """New codes of a table for the linears; for gpt-oss's layout, for its stacks of experts."""
    stacks = target.layout == "mxfp4"
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
    entries = [entry for entry in architecture.fused.values() if not entry.fusion.per_expert]
    kin = {part.name: entry.whole.name for entry in entries for part in entry.members if part.name in weights}
    return encode(target, frozenset(weights), kin)(plan)
