"""Plain linears stored input-major, [in, out], as GPT-2's Conv1D stores them, within any layout.

Logical tensors are always [out, in]: rows are what a linear gives. Here the named ones are spelled as
their transpose; all others, and the same ones once quantized, as the layout inside spells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.interfaces import Layout, Part, Source
from qconvert.tensors import Dense, Json, Logical, Plain, Quantized, TensorSpec, Value


@dataclass(frozen=True, slots=True)
class InputMajor:
    """A layout whose plain tensors of these names lie in the file with rows and columns exchanged."""

    inside: Layout
    names: frozenset[str]

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def transposed(self) -> bool:
        return True

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        if self._turns(tensor) and isinstance(tensor.form, Plain):
            return (TensorSpec(tensor.name, tensor.form.dtype, tensor.shape[::-1]),)
        return self.inside.parts(tensor)

    def row_alignment(self, tensor: Logical) -> int:
        """Columns of the file can be written one by one."""
        return 1 if self._turns(tensor) else self.inside.row_alignment(tensor)

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterable[Part]:
        """Spell rows [start, start + value.rows): they are columns of the array."""
        if self._turns(tensor) and isinstance(value, Dense):
            return [Part(tensor.name, 0, np.ascontiguousarray(value.rows_RI.T), start)]
        return self.inside.encode(tensor, start, value)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop), which are columns of the array."""
        if self._turns(tensor) and isinstance(tensor.form, Plain):
            columns = source.read(tensor.name, 0, tensor.width, columns=(start, stop))
            return Dense(np.ascontiguousarray(columns.T), tensor.form.dtype)
        return self.inside.decode(tensor, source, start, stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says of quantized modules; their orientation is that of any linear."""
        return self.inside.settings(quantized, kept)

    def _turns(self, tensor: Logical) -> bool:
        return tensor.name in self.names and isinstance(tensor.form, Plain)


def turned(tensors: Mapping[str, Logical], names: frozenset[str]) -> dict[str, Logical]:
    """The logical view of stored tensors: plain 2-D ones of these names as [out, in]."""
    return {
        name: Logical(name, tensor.shape[::-1], tensor.form)
        if name in names and isinstance(tensor.form, Plain) and len(tensor.shape) == 2
        else tensor
        for name, tensor in tensors.items()
    }
