"""The operations a unit may apply to rows of a tensor. Every one works on a few rows at a time.

Stacking and cutting rows is not an operation: a unit reads row slices and writes one tensor, so
fusing is reading from several tensors and un-fusing is reading from part of one (see `plan.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, GgmlBlocks, Unquantized
from qconvert.core.values import AffineIntRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.quant.packed_codes import codes_of

if TYPE_CHECKING:
    import numpy as np

    from qconvert.quant.affine import QuantError


@dataclass(frozen=True, slots=True)
class Finding:
    """What an operation noticed in the rows it was given.

    `nonfinite` is the flat index of the first NaN or Inf, -1 if there is none; `overflow` counts
    finite numbers that the target dtype cannot hold; `error` is what quantizing lost; `bad_row` is the
    first row whose scales hold a NaN or Inf; `steps` by how many steps of its grid a weight has moved.
    """

    nonfinite: int = -1
    overflow: int = 0
    error: QuantError | None = None
    bad_row: int = -1
    steps: float = 0.0


CLEAN = Finding()
# Below the largest number of every type that numbers are computed in (all but float16).
_HELD_BY_ALL = 3e38


@runtime_checkable
class Surveyed(Protocol):
    """An operation whose numbers depend on the whole tensor, and perhaps on its siblings.

    `survey` sees rows as `apply` will; `settled` takes what it found in all of them, in their order, and
    returns the operation that can be applied. Those with the same `kin` (a name, "" for none) are
    settled together. `open` says that this has not happened yet.
    """

    @property
    def open(self) -> bool: ...

    @property
    def kin(self) -> str: ...

    def survey(self, value: Value) -> np.ndarray: ...

    def settled(self, found: np.ndarray) -> Op: ...


class Op(Protocol):
    """One step of a unit: what form comes out, and the rows themselves.

    `granule` is the number of rows that must be made together (and in whole multiples).
    """

    @property
    def granule(self) -> int: ...

    def infer(self, encoding: Encoding) -> Encoding: ...

    def apply(self, value: Value) -> tuple[Value, Finding]: ...


@dataclass(frozen=True, slots=True)
class _RowWise:
    """An operation that looks at one row at a time."""

    @property
    def granule(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class CheckFinite(_RowWise):
    """Pass rows through; find the first NaN or Inf of a float tensor or of a grid's scales."""

    def infer(self, encoding: Encoding) -> Encoding:
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import first_nonfinite
        from qconvert.quant.dequantize import first_bad_row

        if isinstance(value, DenseRows):
            return value, (Finding(first_nonfinite(value)) if value.dtype.is_float else CLEAN)
        if isinstance(value, GgmlRows):
            return value, CLEAN
        return value, Finding(bad_row=first_bad_row(value))


@dataclass(frozen=True, slots=True)
class Cast(_RowWise):
    """Round a dense float tensor to another float dtype, half to even."""

    dtype: DType

    def infer(self, encoding: Encoding) -> Encoding:
        return (
            Unquantized(self.dtype)
            if isinstance(encoding, Unquantized) and encoding.dtype.is_float
            else encoding
        )

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast

        if not isinstance(value, DenseRows) or not value.dtype.is_float:
            return value, CLEAN
        rounded, overflow = cast(value, self.dtype)
        return rounded, Finding(overflow=overflow)


@dataclass(frozen=True, slots=True)
class Quantize(_RowWise):
    """Group-quantize a dense tensor to `encoding`, by scale search or plain min-max."""

    encoding: AffineInt
    search: bool

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.affine import quantize

        assert isinstance(value, DenseRows)
        quantized, error = quantize(value, self.encoding, search=self.search)
        return quantized, Finding(error.nonfinite, error.overflow, error)


@dataclass(frozen=True, slots=True)
class Dequantize(_RowWise):
    """Compute the numbers of a quantized tensor, rounded as its grid asks (`quant.dequantize.numbers`)."""

    dtype: DType

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(self.dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast, first_nonfinite
        from qconvert.quant.dequantize import numbers, reach

        # Of the dtypes that numbers are written in, only float16 is too narrow for other dtypes' scales.
        dense = numbers(value, DType.F32 if self.dtype is DType.F16 else self.dtype)
        rounded, overflow = cast(dense, self.dtype)
        # Finite scales may have infinite products. Where none is near, it is not looked for.
        flaw = -1 if reach(value) < _HELD_BY_ALL else first_nonfinite(dense)
        return rounded, Finding(flaw, overflow)


@dataclass(frozen=True, slots=True)
class ResolveScales(_RowWise):
    """Keep nested scales as the float32 numbers that they stand for, which values bring already."""

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Codebook)
        return replace(encoding, second=None)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        assert isinstance(value, CodebookRows)
        return replace(value, encoding=replace(value.encoding, second=None)), CLEAN


@dataclass(frozen=True, slots=True)
class EncodeBlocks(_RowWise):
    """Encode a dense tensor as GGML blocks, bit for bit as llama-quantize does.

    `importance` are the mean squared activations of the input columns (an imatrix entry), those of
    stacked experts one after another; `rows_each` is the number of rows of one expert, and `first` the
    row at which the block that is being encoded begins.
    """

    encoding: GgmlBlocks
    importance: Sequence[float] | None = None
    rows_each: int | None = None
    first: int = 0

    def at(self, row: int) -> EncodeBlocks:
        """This operation for a block that begins at a row of the output."""
        return replace(self, first=row)

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        import numpy as np

        from qconvert.quant.casts import flaw_and_peak
        from qconvert.quant.ggml import encode_rows, overflowed

        assert isinstance(value, DenseRows)
        pieces = [
            encode_rows(rows, self.encoding.type, importance_I=importance_I)
            for rows, importance_I in self._by_expert(value)
        ]
        bytes_RB = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        flaw, peak = flaw_and_peak(value)
        peak = peak if flaw < 0 else inf  # of which numbers after the flaw may be the largest
        overflow = overflowed(value, bytes_RB, self.encoding.type, peak)
        return GgmlRows(bytes_RB, self.encoding), Finding(flaw, overflow)

    def _by_expert(self, value: DenseRows) -> Iterator[tuple[DenseRows, np.ndarray | None]]:
        """The rows of each expert with the importance of its columns."""
        import numpy as np

        if self.importance is None or self.rows_each is None:
            yield value, None if self.importance is None else np.asarray(self.importance, np.float32)
            return
        width = value.rows_RI.shape[1]
        importance_EI = np.asarray(self.importance, np.float32).reshape(-1, width)
        stop = self.first + value.rows
        for expert in range(self.first // self.rows_each, -(-stop // self.rows_each)):
            begin = max(expert * self.rows_each, self.first) - self.first
            end = min((expert + 1) * self.rows_each, stop) - self.first
            yield DenseRows(value.rows_RI[begin:end], value.dtype), importance_EI[expert]


@dataclass(frozen=True, slots=True)
class PadColumns(_RowWise):
    """Continue every row with zeros to `width` columns (see `quant.zero_padding`)."""

    width: int

    def infer(self, encoding: Encoding) -> Encoding:
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.zero_padding import pad_columns

        return pad_columns(value, self.width), CLEAN


@dataclass(frozen=True, slots=True)
class PermuteRows:
    """Rows in another order: row i of the output is row `order[i]`. The whole tensor is taken at once."""

    order: tuple[int, ...] = field(repr=False)

    @property
    def granule(self) -> int:
        return len(self.order)

    def infer(self, encoding: Encoding) -> Encoding:
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        return value.with_arrays(tuple(array[list(self.order)] for array in value.arrays)), CLEAN


@dataclass(frozen=True, slots=True)
class PermuteColumns(_RowWise):
    """Columns of a grid in the sequence of their groups: column i of the output is column `order[i]`."""

    order: tuple[int, ...] = field(repr=False)

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineInt) and encoding.act_order, encoding
        return replace(encoding, act_order=False)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        assert isinstance(value, AffineIntRows)
        codes_RI, encoding = codes_of(value)[:, list(self.order)], replace(value.encoding, act_order=False)
        return replace(value, codes_RX=codes_RI, encoding=encoding, groups_I=None), CLEAN


def scale_of_all(value: CodebookRows) -> float | None:
    """The one scale of a tensor that has no other, as a number; None where there are more."""
    from qconvert.quant.codebook import wide

    encoding = value.encoding
    return (
        float(wide(value.scales_RG[:1], encoding.scale_dtype)[0, 0]) if encoding.group_rows is None else None
    )


def zero_rows(row: Value, count: int) -> Value:
    """Rows of zeros in the form of one row, for units that stack them below rows they read."""
    from qconvert.quant import zero_padding

    return zero_padding.zero_rows(row, count)


@dataclass(frozen=True, slots=True)
class InterleaveHalves:
    """Put the rows of every head in the order of llama.cpp's rotary embedding (`quant.rotary_rows`)."""

    head_dim: int

    @property
    def granule(self) -> int:
        return self.head_dim

    def infer(self, encoding: Encoding) -> Encoding:
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.rotary_rows import interleave_halves

        return value.with_arrays(tuple(interleave_halves(a, self.head_dim) for a in value.arrays)), CLEAN


@dataclass(frozen=True, slots=True)
class ChangeNumbers(_RowWise):
    """Compute other numbers from each row, in float32 (`quant.row_changes.CHANGES`, by name)."""

    change: str

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return Unquantized(DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import changed

        assert isinstance(value, DenseRows)
        return changed(value, self.change), CLEAN


@dataclass(frozen=True, slots=True)
class Scale(_RowWise):
    """Multiply every number by `factor`, in float32."""

    factor: float

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return Unquantized(DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import scaled

        assert isinstance(value, DenseRows)
        return scaled(value, self.factor), CLEAN


@dataclass(frozen=True, slots=True)
class SwapGroups(_RowWise):
    """Reorder columns that lie in `outer` groups of `inner` groups each: the first of each, the second..."""

    outer: int
    inner: int

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import swapped

        assert isinstance(value, DenseRows)
        return DenseRows(swapped(value.rows_RI, self.outer, self.inner), value.dtype), CLEAN


@dataclass(frozen=True, slots=True)
class TransposeBlocks:
    """Turn every block of `rows` rows of `width` numbers: `width` rows of `rows` numbers come out."""

    rows: int
    width: int

    @property
    def granule(self) -> int:
        return self.width

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.row_changes import transposed

        assert isinstance(value, DenseRows)
        return DenseRows(transposed(value.rows_RI, self.rows), value.dtype), CLEAN


def float_vector(values: Sequence[float]) -> np.ndarray:
    """These numbers as float32 [n]."""
    import numpy as np

    return np.array(values, np.float32)


def llama3_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """The factors of Llama 3.1's rotary embedding, float32 [head_dim / 2] (`quant.llama3_rope`)."""
    from qconvert.quant import llama3_rope

    return llama3_rope.llama3_factors(head_dim, theta, factor, low, high, context)
