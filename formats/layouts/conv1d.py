"""Stores plain tensors whose arrays have another shape than the tensors of the model, in any layout.

Logical linears are always [out, in], and logical biases vectors. Some classes store linears as
[in, out], as GPT-2's Conv1D does, or stacks of them as [experts, in, out], and stacks of biases as
[experts, out]. Here such arrays are stored as their class has them; all others, and the same ones once
quantized, as the layout inside stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from qconvert.core.activations import ScalesBeside, StoredScale
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import DenseRows, Value
from qconvert.quant.simd.transpose import transposed


@dataclass(frozen=True, slots=True)
class InputMajor:
    """A layout whose plain tensors of these names lie in the file otherwise: matrices transposed, and
    vectors as the rows of a matrix, as many as is said.
    """

    inside: Layout
    matrices: frozenset[str]
    vectors: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def traits(self) -> LayoutTraits:
        return self.inside.traits

    @property
    def transposed(self) -> bool:
        return True

    @property
    def rewritten(self) -> Layout:
        return replace(self, inside=self.inside.rewritten)

    @property
    def named_by(self) -> None:
        return None

    @property
    def computed(self) -> Mapping[str, str]:
        return self.inside.computed

    def fitted(self, encodings: Iterable[Quantized]) -> Layout:
        return replace(self, inside=self.inside.fitted(encodings))

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

    def as_stored(self, value: Value) -> Value:
        return self.inside.as_stored(value)

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

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.inside.settings(quantized, kept)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        return self.inside.settings_beside(quantized, kept, scales)

    def file_metadata(self, tensors: Iterable[ModelTensor], config: Json) -> Mapping[str, str]:
        return self.inside.file_metadata(tensors, config)

    def scale_stored_as(self, name: str) -> StoredScale | None:
        return self.inside.scale_stored_as(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        return self.inside.place_of_scale(scale, weight)

    def without_input_scale(self, weight: Quantized) -> Quantized | None:
        return self.inside.without_input_scale(weight)

    def _turns(self, tensor: ModelTensor) -> bool:
        known = tensor.name in self.matrices or tensor.name in self.vectors
        return known and isinstance(tensor.encoding, Unquantized)

    def _stored(self, tensor: ModelTensor) -> tuple[int, ...]:
        rows = self.vectors.get(tensor.name)
        if rows is not None:
            return rows, tensor.rows // rows
        *stack, outputs, inputs = tensor.shape
        return (*stack, inputs, outputs)
