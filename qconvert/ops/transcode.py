"""Operations that put the codes of a weight onto another grid, each of them measured, or make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    GgmlBlocks,
    Quantized,
    Unquantized,
)
from qconvert.core.layout_traits import NEAREST, RoundingRules
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.ops.rows import Finding

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
    """Encode a dense tensor as codes of a table, rounded as a layout's tools do (`quant.codebook_encode`).

    `whole` is the largest magnitude of the whole tensor, or of all that are its `kin`, once it is known,
    for forms that need it.
    """

    encoding: Codebook
    rounding: RoundingRules = NEAREST
    kin: str = ""
    whole: float | None = None

    @property
    def granule(self) -> int:
        return self.encoding.group_rows or 1

    @property
    def open(self) -> bool:
        from qconvert.quant.codebook_encode import needs_whole

        return self.whole is None and needs_whole(self.encoding)

    def survey(self, value: Value) -> np.ndarray:
        """The largest magnitude of these rows, one number."""
        from qconvert.quant.codebook_encode import peaks

        assert isinstance(value, DenseRows)
        return peaks(value, replace(self.encoding, group_rows=None, group_size=None)).ravel()

    def settled(self, found: np.ndarray) -> EncodeTable:
        return replace(self, whole=float(found.max(initial=0.0)))

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.codebook_encode import encode

        assert isinstance(value, DenseRows)
        made, error = encode(value, self.encoding, rounding=self.rounding, whole=self.whole)
        return made, Finding(error.nonfinite, error=error)


@dataclass(frozen=True, slots=True)
class NestScales:
    """Quantize the scales of bitsandbytes' blocks in their turn (see `quant.nested_scales`).

    `width` is that of a row; `offset` what is taken off all scales, once it is known.
    """

    width: int
    offset: float | None = None
    kin: str = ""

    @property
    def granule(self) -> int:
        from qconvert.quant.nested_scales import rows_together

        return rows_together(self.width)

    @property
    def open(self) -> bool:
        return self.offset is None

    def survey(self, value: Value) -> np.ndarray:
        """Sums over the scales, run by run."""
        from qconvert.quant.nested_scales import sums

        assert isinstance(value, CodebookRows)
        return sums(value.scales_RG)

    def settled(self, found: np.ndarray) -> NestScales:
        from qconvert.quant.nested_scales import offset_of

        return replace(self, offset=offset_of(found))

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Codebook)
        return replace(encoding, second="nested")

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.nested_scales import nest

        assert isinstance(value, CodebookRows) and self.offset is not None
        made, steps = nest(value, self.offset)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class ToMins(_Regrid):
    """Integer zeros to mins. `width` is that of a row."""

    width: int

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineInt)
        return AffineMin(encoding.bits, encoding.group_size or self.width, encoding.scale_dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import to_mins

        assert isinstance(value, AffineIntRows)
        made, steps = to_mins(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class ToZeros(_Regrid):
    """Mins to the nearest integer zeros. `width` is that of a row."""

    width: int

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineMin)
        size = None if encoding.group_size == self.width else encoding.group_size
        return AffineInt(encoding.bits, size, symmetric=False, scale_dtype=encoding.scale_dtype)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import to_zeros

        assert isinstance(value, AffineMinRows)
        made, steps = to_zeros(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class CastScales(_Regrid):
    """Round the scales of an integer grid to another dtype."""

    dtype: DType

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineInt)
        return replace(encoding, scale_dtype=self.dtype, signless_zero=False)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import cast_scales

        assert isinstance(value, AffineIntRows)
        made, steps, overflow = cast_scales(value, self.dtype)
        return made, Finding(steps=steps, overflow=overflow)


@dataclass(frozen=True, slots=True)
class SplitGroups(_Regrid):
    """Repeat scales and zeros for smaller groups, exactly."""

    size: int

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, AffineInt)
        return replace(encoding, group_size=self.size)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import split_groups

        assert isinstance(value, AffineIntRows)
        return split_groups(value, self.size), Finding()


@dataclass(frozen=True, slots=True)
class FromInt8Rows(_Regrid):
    """bitsandbytes' int8 rows to a symmetric integer grid with one float32 scale per row."""

    def infer(self, encoding: Encoding) -> Encoding:
        return AffineInt(8, None, symmetric=True, scale_dtype=DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import from_int8_rows

        assert isinstance(value, CodebookRows)
        made, steps = from_int8_rows(value)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class ToInt8Rows(_Regrid):
    """A symmetric int8 grid with one scale per row to bitsandbytes' rows."""

    decoded: DType

    def infer(self, encoding: Encoding) -> Encoding:
        return Codebook("int8", None, DType.F32, self.decoded)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import to_int8_rows

        assert isinstance(value, AffineIntRows)
        made, steps = to_int8_rows(value, self.decoded)
        return made, Finding(steps=steps)


@dataclass(frozen=True, slots=True)
class SpreadScale(_Regrid):
    """One scale for a whole tensor, written out for every block of `encoding`, exactly."""

    encoding: Codebook

    def infer(self, encoding: Encoding) -> Encoding:
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import spread_scale

        assert isinstance(value, CodebookRows)
        return spread_scale(value, self.encoding), Finding()


@dataclass(frozen=True, slots=True)
class DivideByOne(_Regrid):
    """NVFP4 scales as a layout has them that divides all by one number: by 1."""

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Codebook) and encoding.second is None
        return replace(encoding, second="divided")

    def apply(self, value: Value) -> tuple[Value, Finding]:
        assert isinstance(value, CodebookRows)
        return replace(value, encoding=replace(value.encoding, second="divided"), divisor=1.0), Finding()


@dataclass(frozen=True, slots=True)
class RoundDivisor(_Regrid):
    """What divides all scales of an NVFP4 weight, as float32: of a factor elsewhere it is the inverse."""

    def infer(self, encoding: Encoding) -> Encoding:
        return encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.ggml.from_codes import moved_by
        from qconvert.quant.transcode import round_divisor

        assert isinstance(value, CodebookRows) and value.divisor
        made = round_divisor(value)
        assert made.divisor
        return made, Finding(steps=moved_by(value.divisor / made.divisor))


@dataclass(frozen=True, slots=True)
class FoldDivisor(_Regrid):
    """NVFP4 scales divided by the one number of their tensor, where the quotients are such scales too."""

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Codebook) and encoding.second == "divided"
        return replace(encoding, second=None)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.transcode import fold_divisor

        assert isinstance(value, CodebookRows)
        made = fold_divisor(value)
        assert made is not None, "asked for where it is not exact"
        return made, Finding()


@dataclass(frozen=True, slots=True)
class IntoBlocks(_Regrid):
    """The codes of an integer grid, of MXFP4 or of NVFP4, as GGML blocks."""

    encoding: GgmlBlocks

    def infer(self, encoding: Encoding) -> Encoding:
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.ggml.from_codes import block_codes, mxfp4_blocks, nvfp4_blocks

        if isinstance(value, CodebookRows) and value.encoding.is_nvfp4:
            bytes_RB, steps = nvfp4_blocks(value)
            return GgmlRows(bytes_RB, self.encoding), Finding(steps=steps)
        if isinstance(value, CodebookRows):
            return GgmlRows(mxfp4_blocks(value), self.encoding), Finding()
        assert isinstance(value, AffineIntRows | AffineMinRows)
        bytes_RB, steps, overflow = block_codes(value, self.encoding.type)
        return GgmlRows(bytes_RB, self.encoding), Finding(steps=steps, overflow=overflow)


@dataclass(frozen=True, slots=True)
class TakeFactor(_Regrid):
    """Of an NVFP4 weight, the one factor of all its scales, as a vector of one number."""

    def infer(self, encoding: Encoding) -> Encoding:
        return Unquantized(DType.F32)

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.ggml.from_codes import factors_of

        assert isinstance(value, CodebookRows)
        return DenseRows(factors_of(value), DType.F32), Finding()


@dataclass(frozen=True, slots=True)
class FromBlocks(_Regrid):
    """GGML blocks to the codes of the grid that they are (see `quant.ggml.to_codes`), exactly."""

    encoding: Quantized

    def infer(self, encoding: Encoding) -> Encoding:
        return self.encoding

    def apply(self, value: Value) -> tuple[Value, Finding]:
        from qconvert.quant.dequantize import first_bad_row
        from qconvert.quant.ggml.to_codes import grid_of_blocks

        assert isinstance(value, GgmlRows)
        made = grid_of_blocks(value)
        return made, Finding(bad_row=first_bad_row(made))
