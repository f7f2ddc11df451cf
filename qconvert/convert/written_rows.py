"""Finds out which row of which weight every row of a unit's output is.

Fused tensors hold rows of several weights, stacks of experts those of many, and containers move rows. So
numbers of rows are sent through the unit in place of the rows: whatever it does to rows happens to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qconvert.convert.runner import gather, rows_read
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor
from qconvert.core.values import DenseRows, Value
from qconvert.models import Architecture, Parameter
from qconvert.plan.plan import Unit


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a unit's output: row i is row `row_R[i]` of the source tensor `tensors[tensor_R[i]]`.

    Both int64 [R]; `tensor_R` is -1 where rows of zeros were added.
    """

    tensors: tuple[ModelTensor, ...]
    tensor_R: np.ndarray
    row_R: np.ndarray


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows of a unit's output: row i is row `row_R[i]` of the weight `parameters[parameter_R[i]]`.

    Both int64 [R]; `parameter_R` is -1 where rows of zeros were added.
    """

    parameters: tuple[Parameter, ...]
    parameter_R: np.ndarray
    row_R: np.ndarray


def stored_rows(unit: Unit, start: int, stop: int) -> StoredRows:
    """Rows [start, stop) of the output of a unit, all of whose operations keep rows or move whole rows."""
    tensors = {piece.tensor.name: piece.tensor for piece in unit.inputs}
    numbers = _RowNumbers(tuple(tensors))
    inputs = tuple(piece._replace(factors=None) for piece in unit.inputs)
    value, _ = gather(inputs, numbers, rows_read(unit, start), rows_read(unit, stop))
    for op in unit.ops:
        if op.moves_rows:
            value, _ = op.apply(value)
    found_R2 = value.arrays[0].astype(np.int64)
    return StoredRows(tuple(tensors.values()), found_R2[:, 0] - 1, found_R2[:, 1])


def written_rows(unit: Unit, architecture: Architecture, start: int, stop: int) -> WrittenRows:
    """The same rows by the weights that the source tensors hold."""
    stored = stored_rows(unit, start, stop)
    parameters: tuple[Parameter, ...] = ()
    parameter_R, row_R = np.full_like(stored.tensor_R, -1), stored.row_R.copy()
    for number, tensor in enumerate(stored.tensors):
        own_R, first = stored.tensor_R == number, len(parameters)
        parameters += tuple(parameters_of(tensor, architecture))
        parameter_R[own_R] = first
        entry = architecture.fused.get(tensor.name)
        if entry is not None:
            members_O, rows_O = np.empty((2, tensor.rows), np.int64)
            for run, rows in zip(entry.runs, entry.rows, strict=True):
                own = slice(rows.start, rows.stop, rows.step)
                members_O[own], rows_O[own] = run.member, np.arange(run.start, run.stop)
            parameter_R[own_R] += members_O[stored.row_R[own_R]]
            row_R[own_R] = rows_O[stored.row_R[own_R]]
    return WrittenRows(parameters, parameter_R, row_R)


def parameters_of(tensor: ModelTensor, architecture: Architecture) -> Sequence[Parameter]:
    """The weights that a stored tensor holds."""
    entry, parameter = architecture.fused.get(tensor.name), architecture.parameter(tensor.name)
    if entry is not None:
        return entry.members
    assert parameter is not None, tensor.name
    return (parameter,)


@dataclass(frozen=True, slots=True)
class _RowNumbers:
    """Reads rows of tensors as two numbers each: one more than the tensor's, and that of the row."""

    names: tuple[str, ...]

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        found_R2 = np.empty((stop - start, 2))
        found_R2[:, 0], found_R2[:, 1] = self.names.index(tensor.name) + 1, np.arange(start, stop)
        return DenseRows(found_R2, DType.F64)
