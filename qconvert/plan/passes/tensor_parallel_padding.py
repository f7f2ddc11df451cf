"""Pads the inner features of every MLP with zeros, so that they divide among tensor-parallel ranks.

A feature whose row of gate and up is zero, and whose column of down is zero, adds nothing to the output:
`down @ (act(gate @ x) * (up @ x))` is the same sum with zeros in it. So the inner size may grow to where
every rank holds whole quantization groups, as Qwen did by hand for its 72B files (QwenLM/Qwen3#578).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Encoding, GgmlBlocks, ModelTensor, Unquantized
from qconvert.core.tensor_parallel import INPUT_SPLIT, whole_unit
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.models import Architecture
from qconvert.ops import PadColumns
from qconvert.plan.passes.fuse import cut_where, stack_members
from qconvert.plan.plan import Plan, RowSlice, Unit
from qconvert.plan.selectors import choose
from qconvert.plan.state import Compiled

# Dimensions of features that only an MLP's own linears know.
_INNER = ("intermediate", "expert_rows", "shared_rows")


@dataclass(frozen=True, slots=True)
class Growth:
    """One of the inner sizes: the config key that says it, and what it is before and after."""

    key: str
    dimension: str
    before: int
    after: int

    @property
    def sentence(self) -> str:
        if self.after == self.before:
            return f"{self.key}: {self.before} holds whole groups on every rank as it is; nothing was padded"
        more = self.after - self.before
        return f"{self.key}: {self.before} -> {self.after}, {more} features of zeros that change no output"


def encodings_of_members(
    outputs: Mapping[str, ModelTensor], architecture: Architecture
) -> dict[str, Encoding]:
    """The form of every weight of the unfused model, also where it is stored inside a fused one."""
    encodings: dict[str, Encoding] = {}
    for name, tensor in outputs.items():
        entry = architecture.fused.get(name)
        encodings |= (
            {part.name: tensor.encoding for part in entry.members} if entry else {name: tensor.encoding}
        )
    return encodings


def growths(
    encodings: Mapping[str, Encoding], architecture: Architecture, ranks: int, layout: str
) -> tuple[Growth, ...]:
    """How far each inner size grows, so that every one of `ranks` holds whole groups of these forms.

    `encodings` are those that the weights will have, `layout` the one they are written in. Raises BadRecipe
    for a model whose inner size is no number of its config.
    """
    found = []
    for dimension in _INNER:
        key = architecture.config_key(dimension)
        parameters = [
            p for p in architecture.parameters.values() if dimension in p.dims and p.name in encodings
        ]
        if not parameters or (" x " in key and dimension == "shared_rows"):  # which follows another size
            continue
        sizes = {size for p in parameters for d, size in zip(p.dims, p.shape, strict=True) if d == dimension}
        if len(sizes) > 1 or not re.fullmatch(r"\w+( / 2)?", key):
            raise BadRecipe(
                f"{architecture.family.name}: its inner size is {key}, not one number that could grow",
                "this family cannot be padded; use fewer ranks or smaller groups",
            )
        before, unit = sizes.pop(), ranks
        for parameter in parameters:
            split = "columns" if parameter.group in INPUT_SPLIT else "rows"
            unit = lcm(unit, ranks * whole_unit(encodings[parameter.name], split, registry.traits_of(layout)))
        found.append(Growth(key, dimension, before, -(-before // unit) * unit))
    if not found:
        raise BadRecipe(
            f"{architecture.family.name}: has no MLP that is padded here", "leave out --pad-to-tp"
        )
    return tuple(found)


def grown(architecture: Architecture, found: Iterable[Growth]) -> Architecture:
    """The architecture with these inner sizes, its config.json saying so."""
    config = copy.deepcopy(dict(architecture.config))
    nested = config.get("text_config")
    for growth in found:
        key, halved = growth.key.removesuffix(" / 2"), growth.key.endswith(" / 2")
        number = growth.after * (2 if halved else 1)
        levels = [nested] if isinstance(nested, dict) else []
        inner = [level for level in levels if key in level or key not in config]
        for level in inner:
            level[key] = number
        if not inner or key in config:
            config[key] = number
    made = replace(architecture, config=config)
    for growth in found:
        sizes = {
            size
            for parameter in made.parameters.values()
            for dimension, size in zip(parameter.dims, parameter.shape, strict=True)
            if dimension == growth.dimension
        }
        if sizes != {growth.after}:
            raise BadRecipe(
                f"config.json: {growth.key} = {growth.after} gives an inner size of {sorted(sizes)}",
                "leave out --pad-to-tp: this family cannot be padded",
            )
    return made


def pad_to_ranks(state: Compiled) -> Compiled:
    """Fill the inner features of every MLP up to what the recipe's number of ranks divides."""
    if state.request.recipe.pad_to_tp is None:
        return state
    found = _growths(state)
    after = grown(state.architecture, found)
    plan = pad(state.plan, state.architecture, after)
    return replace(state, plan=plan, architecture=after).warn(*(growth.sentence for growth in found))


def _growths(state: Compiled) -> tuple[Growth, ...]:
    """How far the inner sizes grow for the encodings that the output's weights will have."""
    architecture, request, target = state.architecture, state.request, state.request.layout_target
    assert request.recipe.pad_to_tp is not None
    encodings = encodings_of_members(state.outputs, architecture)
    parameters = {name: p for name in encodings if (p := architecture.parameters.get(name)) is not None}
    for name, scheme in choose(request.recipe, architecture, parameters, tied=state.tied).items():
        encodings[name] = scheme.encoding(DType.F16)
    table = target.codebook.encoding(DType.BF16) if target and target.codebook else None
    for name, parameter in parameters.items():
        if table and parameter.kind == "linear" and isinstance(encodings[name], Unquantized):
            encodings[name] = table
    layout = target.layout if target else request.recipe.layout
    return growths(encodings, architecture, request.recipe.pad_to_tp, layout)


def pad(plan: Plan, before: Architecture, after: Architecture) -> Plan:
    """Fill every weight and bias up to the shape it has in `after` (see `quant.zero_padding`).

    Fused tensors are filled up member by member, whole again afterwards.
    """
    outputs = plan.outputs
    changed = {n for n, e in after.fused.items() if n in outputs and outputs[n].shape != e.whole.shape}
    plan = cut_where(plan, before, lambda entry: entry.whole.name in changed)
    grown_to = {name: parameter.shape for name, parameter in after.parameters.items()}
    plan = plan.each(lambda unit: _padded(unit, grown_to.get(unit.output.name, unit.output.shape)))
    return stack_members(plan, [after.fused[name] for name in changed])


def _padded(unit: Unit, shape: tuple[int, ...]) -> Unit:
    output, last = unit.output, unit.inputs[-1]
    if output.shape == shape:
        return unit
    if isinstance(last.tensor.encoding, GgmlBlocks):
        raise BadRecipe(
            f"{output.name}: {output.encoding.label} blocks are not padded", "`qconvert dequantize` first"
        )
    wanted = replace(output, shape=shape)
    if wanted.rows > output.rows:
        zeros = RowSlice(last.tensor, 0, wanted.rows - output.rows, zeros_like=last.last)
        ops = tuple(op.extended(wanted.rows) for op in unit.ops)
        unit = unit._replace(read=(*unit.inputs, zeros), ops=ops)
    if wanted.width > output.width:
        unit = unit.then(PadColumns(wanted.width))
    return unit._replace(output=replace(unit.output, shape=shape))


def zeros_added(unit: Unit) -> tuple[int, int]:
    """How many of a unit's rows, and of its columns, are zeros that no source holds."""
    rows = sum(piece.rows for piece in unit.inputs if piece.zeros_like is not None)
    wide = next((op.padded_width for op in unit.ops if op.padded_width is not None), None)
    return rows, 0 if wide is None else wide - unit.inputs[0].tensor.width
