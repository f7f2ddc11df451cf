"""Stores plain tensors whose arrays have another shape than the tensors of the model, in any layout.

Logical linears are always [out, in], and logical biases vectors. Some classes store linears as
[in, out], as GPT-2's Conv1D does, or stacks of them as [experts, in, out], and stacks of biases as
[experts, out]. Here such arrays are stored as their class has them; all others, and the same ones once
quantized, as the layout inside stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.core.dtypes import TensorSpec
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import DenseRows, Value
from qconvert.formats.layouts.wrapped import Wrapped
from qconvert.quant.simd.transpose import transposed


@dataclass(frozen=True, slots=True)
class InputMajor(Wrapped):
    """A layout whose plain tensors of these names lie in the file otherwise: matrices transposed, and
    vectors as the rows of a matrix, as many as is said.
    """

    matrices: frozenset[str]
    vectors: Mapping[str, int]

    @property
    def transposed(self) -> bool:
        return True

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        if self._turns(tensor) and isinstance(tensor.encoding, Unquantized):
            return (TensorSpec(tensor.name, tensor.encoding.dtype, self._stored(tensor)),)
        return self.inside.stored_arrays(tensor)

    def row_alignment(self, tensor: ModelTensor) -> int:
        return 1 if self._turns(tensor) else self.inside.row_alignment(tensor)

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterable[ArrayRows]:
        """Rows [start, start + value.rows) as stored: columns of an array, or a run of a stack of vectors."""
        if not self._turns(tensor) or not isinstance(value, DenseRows):
            return self.inside.encode(tensor, start, value)
        return self._encode(tensor, start, value.rows_RI)

    def _encode(self, tensor: ModelTensor, start: int, rows_RI: np.ndarray) -> Iterator[ArrayRows]:
        for which, first, stop in self._runs(tensor, start, start + len(rows_RI)):
            run_RI = rows_RI[: stop - first]
            rows_RI = rows_RI[stop - first :]
            row = which if len(tensor.shape) == 1 else which * tensor.width
            yield ArrayRows(tensor.name, row, transposed(run_RI), first)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop), which are columns of the array or runs of its rows."""
        if not self._turns(tensor) or not isinstance(tensor.encoding, Unquantized):
            return self.inside.decode(tensor, source, start, stop)
        rows = 1 if len(tensor.shape) == 1 else tensor.width
        runs = [
            source.read(tensor.name, which * rows, (which + 1) * rows, columns=(first, last)).T
            for which, first, last in self._runs(tensor, start, stop)
        ]
        return DenseRows(np.ascontiguousarray(np.concatenate(runs)), tensor.encoding.dtype)

    def _runs(self, tensor: ModelTensor, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Rows [start, stop) by the matrix of the stack they are in: its number, and columns from, to."""
        each = self._stored(tensor)[-1]
        for which in range(start // each, max(start // each + 1, -(-stop // each))):
            yield which, max(start - which * each, 0), min(stop - which * each, each)

    def _turns(self, tensor: ModelTensor) -> bool:
        known = tensor.name in self.matrices or tensor.name in self.vectors
        return known and isinstance(tensor.encoding, Unquantized)

    def _stored(self, tensor: ModelTensor) -> tuple[int, ...]:
        rows = self.vectors.get(tensor.name)
        if rows is not None:
            return rows, tensor.rows // rows
        *stack, outputs, inputs = tensor.shape
        return (*stack, inputs, outputs)
