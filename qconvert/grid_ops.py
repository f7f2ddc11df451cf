"""Operations that put the codes of a weight onto another grid, each of them measured, or make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    Quantized,
    Value,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class _Regrid:
    """An operation that looks at one row at a time."""

    @property
    def granule(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class EncodeTable:
    """Encode a dense tensor as codes of a table, in the habits of a layout (see `quant.encode`).

    `whole` is the largest magnitude of the whole tensor, or of all that are its `kin`, once it is known,
    for forms that need it.
    """

    form: Codebook
    habit: str = ""
    kin: str = ""
    whole: float | None = None

    @property
    def granule(self) -> int:
        return self.form.group_rows or 1

    @property
    def open(self) -> bool:
        from qconvert.quant.encode import needs_whole

        return self.whole is None and needs_whole(self.form)

    def survey(self, value: Value) -> np.ndarray:
        """The largest magnitude of these rows, one number."""
        from qconvert.quant.encode import peaks

        assert isinstance(value, Dense)
        return peaks(value, replace(self.form, group_rows=None, group_size=None)).ravel()

    def settled(self, found: np.ndarray) -> EncodeTable:
        return replace(self, whole=float(found.max(initial=0.0)))

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Plain), form
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.encode import encode

        assert isinstance(value, Dense)
        made, error = encode(value, self.form, habit=self.habit, whole=self.whole)
        return made, Finding(error.nonfinite, error=error)


@dataclass(frozen=True, slots=True)
class NestScales:
    """Quantize the scales of bitsandbytes' blocks in their turn (see `quant.nested`).

    `width` is that of a row; `offset` what is taken off all scales, once it is known.
    """

    width: int
    offset: float | None = None
    kin: str = ""

    @property
    def granule(self) -> int:
        from qconvert.quant.nested import rows_together

        return rows_together(self.width)

    @property
    def open(self) -> bool:
        return self.offset is None

    def survey(self, value: Value) -> np.ndarray:
        """Sums over the scales, run by run."""
        from qconvert.quant.nested import sums

        assert isinstance(value, Coded)
        return sums(value.scales_RG)

    def settled(self, found: np.ndarray) -> NestScales:
        from qconvert.quant.nested import offset_of

        return replace(self, offset=offset_of(found))

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Codebook)
        return replace(form, second="nested")

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.nested import nest

        assert isinstance(value, Coded) and self.offset is not None
        made, steps = nest(value, self.offset)
        return made, Finding(steps=steps)


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
class DivideByOne(_Regrid):
    """NVFP4 scales as a layout has them that divides all by one number: by 1."""

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Codebook) and form.second is None
        return replace(form, second="divided")

    def apply(self, value: Value) -> tuple[Value, Finding]:
        assert isinstance(value, Coded)
        return replace(value, form=replace(value.form, second="divided"), divisor=1.0), Finding()


@dataclass(frozen=True, slots=True)
class RoundDivisor(_Regrid):
    """What divides all scales of an NVFP4 weight, as float32: of a factor elsewhere it is the inverse."""

    def infer(self, form: Form) -> Form:
        return form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.block_codes import moved_by
        from qconvert.quant.regrid import round_divisor

        assert isinstance(value, Coded) and value.divisor
        made = round_divisor(value)
        assert made.divisor
        return made, Finding(steps=moved_by(value.divisor / made.divisor))


@dataclass(frozen=True, slots=True)
class FoldDivisor(_Regrid):
    """NVFP4 scales divided by the one number of their tensor, where the quotients are such scales too."""

    def infer(self, form: Form) -> Form:
        assert isinstance(form, Codebook) and form.second == "divided"
        return replace(form, second=None)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.regrid import fold_divisor

        assert isinstance(value, Coded)
        made = fold_divisor(value)
        assert made is not None, "asked for where it is not exact"
        return made, Finding()


@dataclass(frozen=True, slots=True)
class IntoBlocks(_Regrid):
    """The codes of an integer grid, of MXFP4 or of NVFP4, as GGML blocks."""

    form: Blocks

    def infer(self, form: Form) -> Form:
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.block_codes import block_codes, mxfp4_blocks, nvfp4_blocks

        if isinstance(value, Coded) and value.form.is_nvfp4:
            bytes_RB, steps = nvfp4_blocks(value)
            return BlockRows(bytes_RB, self.form), Finding(steps=steps)
        if isinstance(value, Coded):
            return BlockRows(mxfp4_blocks(value), self.form), Finding()
        assert isinstance(value, IntAffine | MinAffine)
        bytes_RB, steps, overflow = block_codes(value, self.form.type)
        return BlockRows(bytes_RB, self.form), Finding(steps=steps, overflow=overflow)


@dataclass(frozen=True, slots=True)
class TakeFactor(_Regrid):
    """Of an NVFP4 weight, the one factor of all its scales, as a vector of one number."""

    def infer(self, form: Form) -> Form:
        return Plain(DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.block_codes import factors_of

        assert isinstance(value, Coded)
        return Dense(factors_of(value), DType.F32), Finding()


@dataclass(frozen=True, slots=True)
class FromBlocks(_Regrid):
    """GGML blocks to the codes of the grid that they are (see `quant.ggml.grids`), exactly."""

    form: Quantized

    def infer(self, form: Form) -> Form:
        return self.form

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.ggml.grids import grid_of_blocks
        from qconvert.quant.grids import first_bad_row

        assert isinstance(value, BlockRows)
        made = grid_of_blocks(value)
        return made, Finding(bad_row=first_bad_row(made))
