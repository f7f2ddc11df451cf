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
class WrittenRows:
    """Rows of a unit's output: row i is row `row_R[i]` of the weight `parameters[parameter_R[i]]`.

    Both int64 [R]; `parameter_R` is -1 where rows of zeros were added.
    """

    parameters: tuple[Parameter, ...]
    parameter_R: np.ndarray
    row_R: np.ndarray


def written_rows(unit: Unit, architecture: Architecture, start: int, stop: int) -> WrittenRows:
    """Rows [start, stop) of the output of a unit, all of whose operations keep rows or move whole rows."""
    numbers = _RowNumbers(architecture, unit)
    value, _ = gather(unit.inputs, numbers, rows_read(unit, start), rows_read(unit, stop))
    for op in unit.ops:
        if op.moves_rows:
            value, _ = op.apply(value)
    found_R2 = value.arrays[0].astype(np.int64)
    return WrittenRows(numbers.parameters, found_R2[:, 0] - 1, found_R2[:, 1])


def parameters_of(tensor: ModelTensor, architecture: Architecture) -> Sequence[Parameter]:
    """The weights that a stored tensor holds."""
    entry, parameter = architecture.fused.get(tensor.name), architecture.parameter(tensor.name)
    if entry is not None:
        return entry.members
    assert parameter is not None, tensor.name
    return (parameter,)


class _RowNumbers:
    """Reads rows of stored tensors as two numbers each: one more than the weight's, and that of the row."""

    def __init__(self, architecture: Architecture, unit: Unit) -> None:
        self._fused = architecture.fused
        self._first: dict[str, int] = {}
        self.parameters: tuple[Parameter, ...] = ()
        for piece in unit.inputs:
            if piece.tensor.name not in self._first:
                self._first[piece.tensor.name] = len(self.parameters)
                self.parameters += tuple(parameters_of(piece.tensor, architecture))

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        found_R2, first = np.empty((tensor.rows, 2)), self._first[tensor.name] + 1
        entry = self._fused.get(tensor.name)
        if entry is None:
            found_R2[:, 0], found_R2[:, 1] = first, np.arange(tensor.rows)
        else:
            for run, rows in zip(entry.runs, entry.rows, strict=True):
                own = slice(rows.start, rows.stop, rows.step)
                found_R2[own, 0], found_R2[own, 1] = first + run.member, np.arange(run.start, run.stop)
        return DenseRows(found_R2[start:stop], DType.F64)
