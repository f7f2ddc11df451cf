"""How the roles of a model become the tensors of a GGUF file, as its declaration says.

Fused linears are taken apart or put in llama.cpp's order, experts stacked, and every role written as the
tensors it becomes: names, rows, shapes, changed numbers. Pure: a pass over a plan like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert import plan as passes
from qconvert.architecture import Architecture, FusedPlace, Place, Run
from qconvert.architecture.gguf.model import Constant, Facts, Written
from qconvert.architecture.gguf.names import gguf_name
from qconvert.errors import BadRecipe
from qconvert.ops import (
    ChangeNumbers,
    Dequantize,
    InterleaveHalves,
    Op,
    Scale,
    SwapGroups,
    TransposeBlocks,
    float_vector,
    llama3_factors,
)
from qconvert.plan import Plan, Unit
from qconvert.tensors import Plain, rows_of

if TYPE_CHECKING:
    import numpy as np


def write_roles(plan: Plan, facts: Facts) -> Plan:
    """The plan whose outputs are the tensors of the file, under their names.

    Quantized weights whose numbers or columns change become plain ones first. Raises UnsupportedModel for
    a role that GGUF has no name for.
    """
    architecture = facts.architecture
    plan = passes.unfuse(architecture)(plan)
    plan = passes.stack_all(_wholes(facts))(plan)
    plan = _stack_experts(plan, architecture)
    units = [made for unit in plan.units for made in _written(unit, facts)]
    return replace(plan, units=tuple(units))


def _wholes(facts: Facts) -> list[FusedPlace]:
    """The fused tensors that stay whole, each part after the other, interleaved in the source or not."""
    fused = facts.architecture.fused.values()
    return [
        replace(entry, runs=tuple(Run(i, 0, rows_of(part.shape)) for i, part in enumerate(entry.parts)))
        for entry in fused
        if entry.fusion.role in facts.model.whole
    ]


def constants_of(facts: Facts) -> dict[str, np.ndarray]:
    """The tensors of the file that come from config.json, float32, by name."""
    declared = facts.model.constants
    return {constant.name: _values(constant) for constant in (declared(facts) if declared else ())}


def _values(constant: Constant) -> np.ndarray:
    llama3 = constant.scaling
    if llama3 is None:
        return float_vector(constant.values)
    return llama3_factors(
        llama3.head_dim,
        llama3.theta,
        llama3.factor,
        llama3.low_freq_factor,
        llama3.high_freq_factor,
        llama3.context,
    )


def place_of(unit: Unit, architecture: Architecture) -> Place:
    """The place of a unit's output; of a stack of experts, that of its first expert."""
    place = architecture.place(unit.output.name)
    assert place is not None, unit.output.name
    return place


def _stack_experts(plan: Plan, architecture: Architecture) -> Plan:
    """One tensor [experts, rows, columns] for each projection of a layer's experts, and [experts, rows]
    for its biases.
    """
    made: dict[tuple[str, int | None, str], Unit] = {}
    for unit in plan.units:
        place = place_of(unit, architecture)
        alone = place.group == place.role
        key = (unit.output.name, None, "") if alone else (place.group, place.layer, place.part)
        first = made.get(key)
        if first is None:
            made[key] = unit
            continue
        if first.output.form != unit.output.form:
            raise BadRecipe(
                f"{unit.output.name}: not stored as {first.output.form.label} like its siblings",
                "`qconvert dequantize` first, or store all experts of a layer alike",
            )
        made[key] = replace(first, inputs=(*first.inputs, *unit.inputs))
    units = tuple(_stacked(unit) if unit.rows > unit.output.rows else unit for unit in made.values())
    return replace(plan, units=units)


def _stacked(unit: Unit) -> Unit:
    experts, rows = unit.rows // unit.output.rows, unit.output.rows
    if len(unit.output.shape) == 1:
        unit = unit.then(TransposeBlocks(rows, 1))
    return replace(unit, output=replace(unit.output, shape=(experts, *unit.output.shape)))


def _written(unit: Unit, facts: Facts) -> Iterator[Unit]:
    """The tensors that the weight of a unit becomes."""
    place = place_of(unit, facts.architecture)
    for written in facts.model.written(place.group):
        made = _cut(unit, written, facts)
        if written.change is not None:
            made = _changed(made, written, facts)
        shape = written.shape(facts) if written.shape and place.part == "weight" else made.output.shape
        name = gguf_name(place.group, place.layer, place.part, written)
        yield replace(made, output=replace(made.output, name=name, shape=shape))


def _cut(unit: Unit, written: Written, facts: Facts) -> Unit:
    """The unit with the rows that are written, in their order."""
    if written.rows is None:
        return unit
    inputs = tuple(
        piece
        for each in written.rows(facts)
        for piece in passes.rows_within(unit.inputs, each.start, each.stop)
    )
    rows = sum(piece.rows for piece in inputs)
    shape = (rows, *unit.output.shape[1:]) if len(unit.output.shape) < 3 else (rows, unit.output.width)
    return replace(unit, inputs=inputs, output=replace(unit.output, shape=shape))


def _changed(unit: Unit, written: Written, facts: Facts) -> Unit:
    op = _operation(unit, written, facts)
    form = unit.output.form
    if not isinstance(op, InterleaveHalves) and not isinstance(form, Plain):
        unit = unit.then(Dequantize(form.decoded))  # GGUF holds other numbers, or in another order
    made = unit.then(op)
    if not isinstance(op, TransposeBlocks):
        return made
    blocks = unit.rows // op.rows
    return replace(made, output=replace(made.output, shape=(blocks, op.width, op.rows)))


def _operation(unit: Unit, written: Written, facts: Facts) -> Op:
    """The operation that a declaration's word for a change means."""
    assert written.change is not None
    block = written.block(facts) if written.block else None
    if written.change == "interleave_halves":
        assert block is not None, "whose heads?"
        return InterleaveHalves(block)
    if written.change == "transpose":
        width = unit.output.width
        return TransposeBlocks(block or unit.rows, width)
    if written.change == "scale":
        assert written.factor is not None, "by what?"
        return Scale(written.factor(facts))
    if written.change == "swap_groups":
        assert written.groups is not None, "which groups?"
        return SwapGroups(*written.groups(facts))
    return ChangeNumbers(written.change)
