"""Writes the tensors of a model as those of a GGUF file: names, rows, shapes, changed numbers.

Fused linears are taken apart or put in llama.cpp's order, experts stacked, and every role written as the
tensors that the model's declaration makes of it (`models.gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qconvert.core.dtypes import width_of
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.row_transforms import RowTransform
from qconvert.errors import BadRecipe
from qconvert.models.gguf.declaration import Facts
from qconvert.models.gguf.families import facts_of
from qconvert.models.gguf.tensors import Record, records
from qconvert.models.statistics_keys import input_keys
from qconvert.ops import CutRows, Dequantize, op_of
from qconvert.plan.passes.fuse import cut_where
from qconvert.plan.plan import Plan, Unit, rows_within
from qconvert.plan.state import Compiled


def write_gguf_tensors(state: Compiled) -> Compiled:
    """The plan whose outputs are the tensors of the file, under their names.

    Quantized weights whose numbers or columns change become plain ones first. Raises UnsupportedModel for
    a role that GGUF has no name for, BadRecipe for parts of one tensor that are stored differently.
    """
    facts, measured = facts_of(state.architecture), state.request.statistics is not None
    return state.with_plan(write_roles(state.plan, facts, measured=measured))


def write_roles(plan: Plan, facts: Facts, *, measured: bool = False) -> Plan:
    """The tensors of the file that hold a model's, as its declaration says.

    Where inputs are `measured`, each unit names those of its linear.
    """
    unfused = cut_where(plan, facts.architecture, lambda entry: True)
    members = {unit.output.name: unit for unit in unfused.units}
    stored = (record for record in records(facts) if record.pieces[0].name in members)  # not a tied head
    return replace(plan, units=tuple(_made(record, members, facts, measured) for record in stored))


def _made(record: Record, members: Mapping[str, Unit], facts: Facts, measured: bool) -> Unit:
    """The unit that makes one tensor of the file."""
    units = [members[piece.name] for piece in record.pieces]
    encoding = units[0].output.encoding
    odd = next((unit.output for unit in units if unit.output.encoding != encoding), None)
    if odd is not None:
        raise BadRecipe(
            f"{odd.name}: stored as {odd.encoding.label}, its siblings as {encoding.label}; "
            "llama.cpp has one tensor",
            "`qconvert dequantize` first, or store all parts alike",
        )
    inputs = tuple(
        rows._replace(pieces=piece.pieces)
        for unit, piece in zip(units, record.pieces, strict=True)
        for rows in rows_within(unit.inputs, piece.rows.start, piece.rows.stop)
    )
    parameters = (facts.architecture.parameters[piece.name] for piece in record.pieces)
    keys = input_keys(parameters) if measured else ()
    rows = sum(piece.rows for piece in inputs)
    made = Unit(inputs, units[0].ops, ModelTensor(record.name, (rows, record.width), encoding), keys)
    width = record.width
    if record.step is not None:
        made = _changed(made, record.step)
        width = record.step.rows if record.step.change == "transpose" else width
    if width != width_of(record.shape):
        made = made.then(CutRows(width // width_of(record.shape)))
    return made._replace(output=replace(made.output, shape=record.shape))


def _changed(unit: Unit, transform: RowTransform) -> Unit:
    op = op_of(transform, unit.output.width)
    encoding = unit.output.encoding
    if not op.moves_rows and not isinstance(encoding, Unquantized):
        unit = unit.then(Dequantize(encoding.decoded))  # GGUF holds other numbers, or in another order
    return unit.then(op)


def order_as_stored(state: Compiled) -> Compiled:
    """Units in the order of the source; a stack of experts where the last of them lies."""
    position = {name: i for i, name in enumerate(state.binding.tensors)}
    units = sorted(state.plan.units, key=lambda u: max(position[s.tensor.name] for s in u.inputs))
    return state.with_plan(replace(state.plan, units=tuple(units)))
