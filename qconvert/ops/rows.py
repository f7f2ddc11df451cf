"""Moves rows and columns, and changes no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Encoding, Unquantized
from qconvert.core.row_transforms import RowTransform
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import AffineIntRows, DenseRows, Value
from qconvert.ops.base import CLEAN, Finding, Op, Order
from qconvert.ops.numbers import CastIntegers, ChangeNumbers, Scale, ScaleSegments


@dataclass(frozen=True, slots=True)
class PadColumns(Op):
    """Continue every row with zeros to `width` columns (see `quant.zero_padding`)."""

    width: int

    @property
    def padded_width(self) -> int:
        return self.width

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.zero_padding import pad_columns

        return pad_columns(value, self.width), CLEAN


@dataclass(frozen=True, slots=True)
class PermuteRows(Op):
    """Rows in another order: row i of the output is row `order[i]`. The whole tensor is taken at once."""

    order: Order = field(repr=False)
    moves_rows: ClassVar[bool] = True

    @property
    def granule(self) -> int:
        return len(self.order)

    @property
    def row_order(self) -> Order:
        return self.order

    def extended(self, rows: int) -> Op:
        return PermuteRows((*self.order, *range(len(self.order), rows)))

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        return value.with_arrays(tuple(array[list(self.order)] for array in value.arrays)), CLEAN


@dataclass(frozen=True, slots=True)
class PermuteColumns(Op):
    """Columns in the sequence of their groups: column i of the output is column `order[i]`."""

    order: Order = field(repr=False)

    @property
    def column_order(self) -> Order:
        return self.order

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineInt) and encoding.act_order, encoding
        return replace(encoding, act_order=False)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.packed_codes import codes_of

        assert isinstance(value, AffineIntRows)
        codes_RI, encoding = codes_of(value)[:, list(self.order)], replace(value.encoding, act_order=False)
        return replace(value, codes_RX=codes_RI, encoding=encoding, groups_I=None), CLEAN


@dataclass(frozen=True, slots=True)
class _HeadRows(Op):
    """Rows move within their heads of `head_dim` rows."""

    head_dim: int
    moves_rows: ClassVar[bool] = True

    @property
    def granule(self) -> int:
        return self.head_dim


@dataclass(frozen=True, slots=True)
class InterleaveHalves(_HeadRows):
    """Put the rows of every head in the order of llama.cpp's rotary embedding (`quant.rotary_rows`)."""

    def inverse(self) -> Op:
        return PartHalves(self.head_dim)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.rotary_rows import interleave_halves

        return value.with_arrays(tuple(interleave_halves(a, self.head_dim) for a in value.arrays)), CLEAN


@dataclass(frozen=True, slots=True)
class PartHalves(_HeadRows):
    """The inverse of `InterleaveHalves`."""

    def inverse(self) -> Op:
        return InterleaveHalves(self.head_dim)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.rotary_rows import part_halves

        return value.with_arrays(tuple(part_halves(a, self.head_dim) for a in value.arrays)), CLEAN


@dataclass(frozen=True, slots=True)
class InterleaveMembers(InterleaveHalves):
    """Alternate the rows of the two members of a fusion, which are stacked one below the other."""

    joins_members: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class SwapGroups(Op):
    """Reorder columns that lie in `outer` groups of `inner` groups each: the first of each, the second..."""

    outer: int
    inner: int

    def inverse(self) -> Op:
        return SwapGroups(self.inner, self.outer)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import swapped

        assert isinstance(value, DenseRows)
        return DenseRows(swapped(value.rows_RI, self.outer, self.inner), value.dtype), CLEAN


@dataclass(frozen=True, slots=True)
class TransposeBlocks(Op):
    """Transpose every block of `rows` rows of `width` numbers: `width` rows of `rows` numbers come out."""

    rows: int
    width: int

    @property
    def granule(self) -> int:
        return self.width

    def inverse(self) -> Op:
        return TransposeBlocks(self.width, self.rows)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import transposed

        assert isinstance(value, DenseRows)
        return DenseRows(transposed(value.rows_RI, self.rows), value.dtype), CLEAN


@dataclass(frozen=True, slots=True)
class CutRows(Op):
    """Cut every row into `pieces` rows, one after another."""

    pieces: int

    @property
    def granule(self) -> int:
        return self.pieces

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        assert isinstance(value, DenseRows)
        return DenseRows(value.rows_RI.reshape(value.rows * self.pieces, -1), value.dtype), CLEAN


@dataclass(frozen=True, slots=True)
class Multiply(Op):
    """Multiply `rows` rows by the `rows` rows after them, number by number in float32; and so on.

    So a tensor is made of two: their rows lie in turns, so many of the one, as many of the other.
    """

    rows: int

    @property
    def granule(self) -> int:
        return self.rows

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import multiplied

        assert isinstance(value, DenseRows)
        return multiplied(value, self.rows), CLEAN


_OPS: Mapping[str, Callable[[RowTransform, int], Op]] = {
    "interleave_halves": lambda transform, width: InterleaveHalves(transform.rows),
    "transpose": lambda transform, width: TransposeBlocks(transform.rows, width),
    "scale": lambda transform, width: (
        ScaleSegments(transform.segments) if transform.segments else Scale(transform.factor)
    ),
    "swap_groups": lambda transform, width: SwapGroups(*transform.groups),
    "int32": lambda transform, width: CastIntegers(DType.I32),
    "multiply": lambda transform, width: Multiply(transform.rows),
}


def op_of(transform: RowTransform, width: int) -> Op:
    """The operation of a row transform on rows of `width` numbers."""
    make = _OPS.get(transform.change)
    return make(transform, width) if make else ChangeNumbers(transform.change)
