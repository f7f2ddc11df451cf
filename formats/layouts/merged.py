"""Reads a model with an adapter merged into it: some weights are computed from those of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.protocols import Layout, Source
from qconvert.core.values import DenseRows, Value
from qconvert.formats.huggingface.adapter import LowRank, NewRows
from qconvert.formats.layouts.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class Merged(Wrapped):
    """The layout of a base, `inside`, in which some tensors are what an adapter makes of them.

    `bases` are these tensors as they are stored, in the base or, where `whole` names an array, in the
    adapter; `products` are added to some, and some get new `rows`. The source has the arrays of both.
    """

    bases: Mapping[str, ModelTensor]
    products: Mapping[str, LowRank]
    whole: Mapping[str, str]
    rows: Mapping[str, NewRows]

    @property
    def computed(self) -> Mapping[str, str]:
        return {name: what for name, what in self.inside.computed.items() if name not in self.bases}

    @property
    def rewritten(self) -> Layout:
        return self.inside.rewritten

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that a tensor is read from, but for those of its product and its new rows."""
        arrays = self.inside.stored_arrays(self.bases.get(tensor.name, tensor))
        held = self.whole.get(tensor.name)
        return tuple(replace(each, name=held) for each in arrays) if held else arrays

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        base, product = self.bases.get(tensor.name), self.products.get(tensor.name)
        if base is None:
            return self.inside.decode(tensor, source, start, stop)
        from qconvert.quant.dequantize import numbers
        from qconvert.quant.low_rank import merged

        assert isinstance(tensor.encoding, Unquantized), tensor
        held = self.whole.get(tensor.name)
        arrays = _Renamed(source, {base.name: held}) if held else source
        value = self.inside.decode(base, arrays, start, stop)
        if product is None:
            return self._with_rows(numbers(value, tensor.encoding.dtype), tensor.name, source, start)
        if product.transposed:
            left_RK = _floats(source, product.left, 0, product.rank, (start, stop)).T
            right_KI = _floats(source, product.right, 0, tensor.width).T
        else:
            first, rank = product.first_row, product.rank
            left_RK = _floats(source, product.left, first + start, first + stop)
            left_RK = left_RK[:, product.expert :: product.experts]
            right_KI = _floats(source, product.right, product.expert * rank, (product.expert + 1) * rank)
        lengths_R = _floats(source, product.magnitude, start, stop)[:, 0] if product.magnitude else None
        return merged(value, left_RK, right_KI, product.scale, lengths_R, tensor.encoding.dtype)

    def _with_rows(self, value: DenseRows, name: str, source: Source, start: int) -> DenseRows:
        """Rows from `start` on of a tensor, with those that the adapter holds in their places."""
        from qconvert.quant.casts import cast

        new = self.rows.get(name)
        stop = start + value.rows
        places = [(i, row) for i, row in enumerate(new.indices) if start <= row < stop] if new else []
        if not new or not places:
            return value
        rows_RI = np.array(value.rows_RI)
        dtype = source.specs[new.array].dtype
        for i, row in places:
            held = DenseRows(source.read(new.array, i, i + 1), dtype)
            rows_RI[row - start] = cast(held, value.dtype)[0].rows_RI[0]
        return replace(value, rows_RI=rows_RI)


def _floats(
    source: Source, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
) -> np.ndarray:
    """Rows of an array in float32."""
    from qconvert.quant.casts import cast

    rows = DenseRows(source.read(name, start, stop, columns=columns), source.specs[name].dtype)
    return cast(rows, DType.F32)[0].rows_RI


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A source in which some arrays have the names of tensors."""

    source: Source
    names: Mapping[str, str]

    @property
    def has_weights(self) -> bool:
        return self.source.has_weights

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.source.specs

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        return self.source.read(self.names.get(name, name), start, stop, columns=columns)
