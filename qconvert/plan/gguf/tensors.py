"""How the tensors of a model become those of a GGUF file, as the records of its declaration say.

Fused linears are taken apart or put in llama.cpp's order, experts stacked, and every role written as the
tensors it becomes: names, rows, shapes, changed numbers. Pure: a pass over a plan like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.row_transforms import RowTransform
from qconvert.errors import BadRecipe
from qconvert.models.gguf.declaration import Constant, Facts
from qconvert.models.gguf.tensors import Record, records
from qconvert.ops.rows import (
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
from qconvert.plan import plan as passes
from qconvert.plan.plan import Plan, Unit

if TYPE_CHECKING:
    import numpy as np


def write_roles(plan: Plan, facts: Facts) -> Plan:
    """The plan whose outputs are the tensors of the file, under their names.

    Quantized weights whose numbers or columns change become plain ones first. Raises UnsupportedModel for
    a role that GGUF has no name for, BadRecipe for parts of one tensor that are stored differently.
    """
    parts = {unit.output.name: unit for unit in passes.unfuse(facts.architecture)(plan).units}
    stored = (record for record in records(facts) if record.pieces[0].name in parts)  # not a tied head
    return replace(plan, units=tuple(_made(record, parts) for record in stored))


def _made(record: Record, parts: Mapping[str, Unit]) -> Unit:
    """The unit that makes one tensor of the file."""
    units = [parts[piece.name] for piece in record.pieces]
    encoding = units[0].output.encoding
    odd = next((unit.output for unit in units if unit.output.encoding != encoding), None)
    if odd is not None:
        raise BadRecipe(
            f"{odd.name}: stored as {odd.encoding.label}, its siblings as {encoding.label}; "
            "llama.cpp has one tensor",
            "`qconvert dequantize` first, or store all parts alike",
        )
    inputs = tuple(
        rows
        for unit, piece in zip(units, record.pieces, strict=True)
        for rows in passes.rows_within(unit.inputs, piece.rows.start, piece.rows.stop)
    )
    rows = sum(piece.rows for piece in inputs)
    made = Unit(inputs, units[0].ops, ModelTensor(record.name, (rows, record.width), encoding))
    if record.step is not None:
        made = _changed(made, record.step)
    return replace(made, output=replace(made.output, shape=record.shape))


def _changed(unit: Unit, step: RowTransform) -> Unit:
    op = _operation(step, unit.output.width)
    encoding = unit.output.encoding
    if not isinstance(op, InterleaveHalves) and not isinstance(encoding, Unquantized):
        unit = unit.then(Dequantize(encoding.decoded))  # GGUF holds other numbers, or in another order
    return unit.then(op)


def _operation(step: RowTransform, width: int) -> Op:
    """The operation that a declaration's word for a change means."""
    if step.change == "interleave_halves":
        return InterleaveHalves(step.rows)
    if step.change == "transpose":
        return TransposeBlocks(step.rows, width)
    if step.change == "scale":
        return Scale(step.factor)
    if step.change == "swap_groups":
        return SwapGroups(*step.groups)
    return ChangeNumbers(step.change)


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
