"""Operations that put the codes of a weight onto another grid, each of them measured, or make them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qconvert.ops import Finding
from qconvert.tensors import (
    BlockRows,
    Blocks,
    Codebook,
    Coded,
    Dense,
    DType,
    Form,
    GroupInt,
    GroupMin,
    IntAffine,
    MinAffine,
    Plain,
    Value,
)


@dataclass(frozen=True, slots=True)
class _Regrid:
    """An operation that looks at one row at a time."""

    @property
    def granule(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class EncodeTable:
    """Encode a dense tensor as codes of a table (see `quant.encode`)."""

    form: Codebook

    @property
    def granule(self) -> int:
        return self.form.group_rows or 1

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Plain), form
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.encode import encode

        assert isinstance(value, Dense)
        made, error = encode(value, self.form)
        return made, Finding(error.nonfinite, error=error)


@dataclass(frozen=True, slots=True)
class ToMins(_Regrid):
    """Integer zeros to mins. `width` is that of a row."""

    width: int

    def infer(self, form: Form) -> Form:
        assert isinstance(form, GroupInt)
        return GroupMin(form.bits, form.group_size or self.width, form.scale_dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import to_mins

        assert isinstance(value, IntAffine)
        made, steps = to_mins(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class ToZeros(_Regrid):
    """Mins to the nearest integer zeros. `width` is that of a row."""

    width: int

    def infer(self, form: Form) -> Form:
        assert isinstance(form, GroupMin)
        size = None if form.group_size == self.width else form.group_size
        return GroupInt(form.bits, size, symmetric=False, scale_dtype=form.scale_dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import to_zeros

        assert isinstance(value, MinAffine)
        made, steps = to_zeros(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class CastScales(_Regrid):
    """Round the scales of an integer grid to another dtype."""

    dtype: DType

    def infer(self, form: Form) -> Form:
        assert isinstance(form, GroupInt)
        return replace(form, scale_dtype=self.dtype, signless_zero=False)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import cast_scales

        assert isinstance(value, IntAffine)
        made, steps, overflow = cast_scales(value, self.dtype)
        return made, Finding(steps=steps, overflow=overflow)


@dataclass(frozen=True, slots=True)
class SplitGroups(_Regrid):
    """Repeat scales and zeros for smaller groups, exactly."""

    size: int

    def infer(self, form: Form) -> Form:
        assert isinstance(form, GroupInt)
        return replace(form, group_size=self.size)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import split_groups

        assert isinstance(value, IntAffine)
        return split_groups(value, self.size), Finding()


@dataclass(frozen=True, slots=True)
class FromInt8Rows(_Regrid):
    """bitsandbytes' int8 rows to a symmetric integer grid with one float32 scale per row."""

    def infer(self, form: Form) -> Form:
        return GroupInt(8, None, symmetric=True, scale_dtype=DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import from_int8_rows

        assert isinstance(value, Coded)
        made, steps = from_int8_rows(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class ToInt8Rows(_Regrid):
    """A symmetric int8 grid with one scale per row to bitsandbytes' rows."""

    decoded: DType

    def infer(self, form: Form) -> Form:
        return Codebook("int8", None, DType.F32, self.decoded)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import to_int8_rows

        assert isinstance(value, IntAffine)
        made, steps = to_int8_rows(value, self.decoded)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class SpreadScale(_Regrid):
    """One scale for a whole tensor, written out for every block of `form`, exactly."""

    form: Codebook

    def infer(self, form: Form) -> Form:
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import spread_scale

        assert isinstance(value, Coded)
        return spread_scale(value, self.form), Finding()


@dataclass(frozen=True, slots=True)
class IntoBlocks(_Regrid):
    """The codes of an integer grid as GGML blocks."""

    form: Blocks

    def infer(self, form: Form) -> Form:
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.block_codes import block_codes

        assert isinstance(value, IntAffine | MinAffine)
        bytes_RB, steps, overflow = block_codes(value, self.form.type)
        return BlockRows(bytes_RB, self.form), Finding(steps=steps, overflow=overflow)
