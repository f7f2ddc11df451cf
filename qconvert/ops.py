"""The operations a unit may apply to rows of a tensor. Every one works row by row.

Stacking and cutting rows is not an operation: a unit reads row slices and writes one tensor, so
fusing is reading from several tensors and un-fusing is reading from part of one (see `plan`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from qconvert.tensors import BlockRows, Blocks, Codebook, Coded, Dense, DType, Form, GroupInt, Plain, Value

if TYPE_CHECKING:
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


class Op(Protocol):
    """One step of a unit: what form comes out, and the rows themselves.

    `granule` is the number of rows that must be given together (and in whole multiples).
    """

    @property
    def granule(self) -> int: ...

    def infer(self, form: Form) -> Form: ...

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

    def infer(self, form: Form) -> Form:
        return form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import first_nonfinite
        from qconvert.quant.grids import first_bad_row

        if isinstance(value, Dense):
            return value, (Finding(first_nonfinite(value)) if value.dtype.is_float else CLEAN)
        if isinstance(value, BlockRows):
            return value, CLEAN
        return value, Finding(bad_row=first_bad_row(value))


@dataclass(frozen=True, slots=True)
class Cast(_RowWise):
    """Round a dense float tensor to another float dtype, half to even."""

    dtype: DType

    def infer(self, form: Form) -> Form:
        return Plain(self.dtype) if isinstance(form, Plain) and form.dtype.is_float else form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast

        if not isinstance(value, Dense) or not value.dtype.is_float:
            return value, CLEAN
        rounded, overflow = cast(value, self.dtype)
        return rounded, Finding(overflow=overflow)


@dataclass(frozen=True, slots=True)
class Quantize(_RowWise):
    """Group-quantize a dense tensor to `form`, by scale search or plain min-max."""

    form: GroupInt
    search: bool

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Plain), form
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.affine import quantize

        assert isinstance(value, Dense)
        quantized, error = quantize(value, self.form, search=self.search)
        return quantized, Finding(error.nonfinite, error.overflow, error)


@dataclass(frozen=True, slots=True)
class Dequantize(_RowWise):
    """Compute the numbers of a quantized tensor, rounded as its grid asks (`quant.grids.numbers`)."""

    dtype: DType

    def infer(self, form: Form) -> Form:
        return Plain(self.dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import cast
        from qconvert.quant.grids import numbers

        # Of the dtypes that numbers are written in, only float16 is too narrow for other dtypes' scales.
        dense = numbers(value, DType.F32 if self.dtype is DType.F16 else self.dtype)
        rounded, overflow = cast(dense, self.dtype)
        return rounded, Finding(overflow=overflow)


@dataclass(frozen=True, slots=True)
class ResolveScales(_RowWise):
    """Keep nested scales as the float32 numbers that they stand for, which values bring already."""

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Codebook)
        return replace(form, second=None)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        assert isinstance(value, Coded)
        return replace(value, form=replace(value.form, second=None)), CLEAN


@dataclass(frozen=True, slots=True)
class EncodeBlocks(_RowWise):
    """Encode a dense tensor as GGML blocks, bit for bit as llama-quantize does.

    `importance_I` are the mean squared activations of the input columns (an imatrix entry).
    """

    form: Blocks
    importance_I: tuple[float, ...] | None = None

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Plain), form
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        import numpy as np

        from qconvert.quant.casts import first_nonfinite
        from qconvert.quant.ggml import encode_rows

        assert isinstance(value, Dense)
        importance_I = None if self.importance_I is None else np.array(self.importance_I, np.float32)
        bytes_RB = encode_rows(value, self.form.type, importance_I=importance_I)
        return BlockRows(bytes_RB, self.form), Finding(first_nonfinite(value))


@dataclass(frozen=True, slots=True)
class DecodeBlocks(_RowWise):
    """Compute the float32 numbers that GGML blocks stand for."""

    def infer(self, form: Form) -> Form:
        return Plain(DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.ggml import decode_rows

        assert isinstance(value, BlockRows)
        form = value.form
        width = value.bytes_RB.shape[1] // form.block_bytes * form.block
        return Dense(decode_rows(value.bytes_RB, form.type, width), DType.F32), CLEAN


@dataclass(frozen=True, slots=True)
class SwapHalves:
    """Interleave the two halves of every head's rows, or undo it: llama.cpp's rotary order.

    transformers keeps the rotated pairs `head_dim / 2` rows apart (NeoX), llama.cpp's `llama` graph
    side by side. Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.
    """

    head_dim: int
    undo: bool = False

    @property
    def granule(self) -> int:
        return self.head_dim

    def infer(self, form: Form) -> Form:
        return form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        import numpy as np

        order = np.arange(self.head_dim).reshape(2, -1).T.ravel()
        if self.undo:
            order = np.argsort(order)
        heads = np.arange(value.rows).reshape(-1, self.head_dim)
        rows = heads[:, order].ravel()
        return value.with_arrays(tuple(array[rows] for array in value.arrays)), CLEAN
