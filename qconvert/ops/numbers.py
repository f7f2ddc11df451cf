"""Changes numbers: casts, dequantizes, looks for NaN and Inf, computes what a graph computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Encoding, Unquantized
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import DenseRows, GgmlRows, Value
from qconvert.ops.base import CLEAN, Certificate, Finding, Op

# Below the largest number of every type that numbers are computed in (all but float16).
_FITS_ALL = 3e38
# The float types that hold every number of another.
_WIDER = {DType.BF16: (DType.F32, DType.F64), DType.F16: (DType.F32, DType.F64), DType.F32: (DType.F64,)}


@dataclass(frozen=True, slots=True)
class CheckFinite(Op):
    """Pass rows through; find the first NaN or Inf of a float tensor or of an encoding's scales.

    With `infinite`, the numbers of a tensor may be infinite.
    """

    infinite: bool = False
    keeps_rows: ClassVar[bool] = True

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.casts import first_nan, first_nonfinite
        from qconvert.quant.dequantize import first_bad_row

        if isinstance(value, DenseRows):
            find = first_nan if self.infinite else first_nonfinite
            return value, (Finding(find(value)) if value.dtype.is_float else CLEAN)
        if isinstance(value, GgmlRows):
            return value, CLEAN
        return value, Finding(bad_row=first_bad_row(value))


@dataclass(frozen=True, slots=True)
class Cast(Op):
    """Round a dense float tensor to another float dtype, half to even."""

    dtype: DType
    keeps_rows: ClassVar[bool] = True

    def infer(self, encoding: Encoding) -> Encoding:
        plain = isinstance(encoding, Unquantized) and encoding.dtype.is_float
        return Unquantized(self.dtype) if plain else encoding

    def certificate(self, source: Encoding) -> Certificate:
        if not isinstance(source, Unquantized):
            return "cast"
        fits = source.dtype is self.dtype or self.dtype in _WIDER.get(source.dtype, ())
        return "exact" if fits else "cast"

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast

        if not isinstance(value, DenseRows) or not value.dtype.is_float:
            return value, CLEAN
        rounded, overflow = cast(value, self.dtype)
        return rounded, Finding(overflow=overflow)


@dataclass(frozen=True, slots=True)
class CastIntegers(Op):
    """Store 64-bit integers in 32 bits, or those in 64 again; what is not an integer passes through."""

    dtype: DType
    keeps_rows: ClassVar[bool] = True

    def infer(self, encoding: Encoding) -> Encoding:
        whole = isinstance(encoding, Unquantized) and encoding.dtype in (DType.I32, DType.I64)
        return Unquantized(self.dtype) if whole else encoding

    def inverse(self) -> Op:
        return CastIntegers(DType.I32 if self.dtype is DType.I64 else DType.I64)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast_integers

        if not isinstance(value, DenseRows) or value.dtype not in (DType.I32, DType.I64):
            return value, CLEAN
        made, overflow = cast_integers(value, self.dtype)
        return made, Finding(overflow=overflow)


@dataclass(frozen=True, slots=True)
class Dequantize(Op):
    """Compute the numbers of a quantized tensor, rounded as in its format (`quant.dequantize.numbers`)."""

    dtype: DType
    keeps_rows: ClassVar[bool] = True

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(self.dtype)

    def certificate(self, source: Encoding) -> Certificate:
        return "dequantized"

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast, first_nonfinite
        from qconvert.quant.dequantize import numbers, reach

        # Of the dtypes that numbers are written in, only float16 is too narrow for other dtypes' scales.
        dense = numbers(value, DType.F32 if self.dtype is DType.F16 else self.dtype)
        rounded, overflow = cast(dense, self.dtype)
        # Finite scales may have infinite products. Where none is near, it is not looked for.
        flaw = -1 if reach(value) < _FITS_ALL else first_nonfinite(dense)
        return rounded, Finding(flaw, overflow)


@dataclass(frozen=True, slots=True)
class ChangeNumbers(Op):
    """Compute other numbers from each row, in float32 (`quant.row_changes.CHANGES`, by name)."""

    change: str

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def inverse(self) -> Op:
        return RestoreNumbers(self.change)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import changed

        assert isinstance(value, DenseRows)
        return changed(value, self.change), CLEAN


@dataclass(frozen=True, slots=True)
class RestoreNumbers(Op):
    """Compute the numbers before `ChangeNumbers`, in float32, as far as they can be known."""

    change: str

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import restored

        assert isinstance(value, DenseRows)
        return restored(value, self.change), CLEAN


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """Multiply every number by `factor`, in float32; or divide by it."""

    factor: float
    divides: bool = False

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def inverse(self) -> Op:
        return Scale(self.factor, divides=not self.divides)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import scaled, unscaled

        assert isinstance(value, DenseRows)
        return (unscaled if self.divides else scaled)(value, self.factor), CLEAN


@dataclass(frozen=True, slots=True)
class ScaleSegments(Op):
    """Multiply consecutive rows of a matrix, so many at a time, by a factor each, in float32; or divide."""

    segments: tuple[tuple[int, float], ...]
    divides: bool = False

    @property
    def granule(self) -> int:
        return sum(rows for rows, _ in self.segments)

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def inverse(self) -> Op:
        return ScaleSegments(self.segments, divides=not self.divides)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import segments_scaled

        assert isinstance(value, DenseRows)
        return segments_scaled(value, self.segments, divides=self.divides), CLEAN
