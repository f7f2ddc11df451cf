"""The operations a unit may apply to rows of a tensor. Every one works row by row.

Stacking and cutting rows is not an operation: a unit reads row slices and writes one tensor, so
fusing is reading from several tensors and un-fusing is reading from part of one (see `plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qconvert.tensors import Dense, DType, Form, GroupInt, IntAffine, Plain, Value

if TYPE_CHECKING:
    from qconvert.quant.affine import QuantError


@dataclass(frozen=True, slots=True)
class Finding:
    """What an operation noticed in the rows it was given.

    `nonfinite` is the flat index of the first NaN or Inf, -1 if there is none; `overflow` counts
    finite numbers that the target dtype cannot hold; `error` is what quantizing lost.
    """

    nonfinite: int = -1
    overflow: int = 0
    error: QuantError | None = None


CLEAN = Finding()


class Op(Protocol):
    """One step of a unit: what form comes out, and the rows themselves."""

    def infer(self, form: Form) -> Form: ...

    def apply(self, value: Value) -> tuple[Value, Finding]: ...


@dataclass(frozen=True, slots=True)
class CheckFinite:
    """Pass rows through; find the first NaN or Inf of a dense float tensor."""

    def infer(self, form: Form) -> Form:
        return form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.casts import first_nonfinite

        if isinstance(value, Dense):
            return value, (Finding(first_nonfinite(value)) if value.dtype.is_float else CLEAN)
        scales = Dense(value.scales_RG, value.form.scale_dtype)
        return value, Finding(first_nonfinite(scales))


@dataclass(frozen=True, slots=True)
class Cast:
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
class Quantize:
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
class Dequantize:
    """Compute a group-quantized tensor's numbers: `(code - zero) * scale`, rounded once."""

    dtype: DType

    def infer(self, form: Form) -> Form:
        return Plain(self.dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.affine import dequantize

        assert isinstance(value, IntAffine)
        return dequantize(value, self.dtype), CLEAN
