"""Chooses new codes: integers by groups, tables of numbers, GGML blocks, scales of scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import add
from typing import TYPE_CHECKING, ClassVar

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, GgmlBlocks, Unquantized
from qconvert.core.layout_traits import NEAREST, RoundingRules
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import CodebookRows, DenseRows, GgmlRows, Value, stack_rows
from qconvert.ops.base import Certificate, Finding, Op

if TYPE_CHECKING:
    import numpy as np


class Encode(Op):
    """An operation that gives plain numbers new codes: one by one, or together where statistics say how."""

    __slots__ = ()
    quantizes: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True

    def certificate(self, source: Encoding) -> Certificate:
        return "quantized"

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        assert isinstance(value, DenseRows)
        if all(each.rounding is None for each in statistics):
            return self.nearest(value, statistics)
        pieces = [self._run(value, each) for each in statistics]
        return stack_rows([made for made, _ in pieces]), _joined(
            [found for _, found in pieces], statistics, value.width
        )

    def _run(self, value: DenseRows, given: RowStatistics) -> tuple[Value, Finding]:
        """The rows of one linear."""
        from qconvert.ops.calibrated import round_together

        rows = DenseRows(value.rows_RI[given.first : given.last], value.dtype)
        own = (replace(given, first=0, last=rows.rows),)
        if given.rounding is None:
            return self.nearest(rows, own)
        return round_together(rows, given.rounding, given.outputs, lambda each: self.nearest(each, own))

    def nearest(self, value: DenseRows, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        """The rows with every number at the nearest one that can be stored, and what was noticed."""
        raise NotImplementedError


def _joined(findings: Sequence[Finding], statistics: Sequence[RowStatistics], width: int) -> Finding:
    """What was noticed in the rows of several linears, one below the other."""
    flaws = [
        s.first * width + f.nonfinite for f, s in zip(findings, statistics, strict=True) if f.nonfinite >= 0
    ]
    errors = [f.error for f in findings if f.error is not None]
    output_errors = [f.output_error for f in findings if f.output_error is not None]
    return Finding(
        nonfinite=flaws[0] if flaws else -1,
        overflow=sum(f.overflow for f in findings),
        error=reduce(add, errors) if errors else None,
        output_error=reduce(add, output_errors) if output_errors else None,
    )


@dataclass(frozen=True, slots=True)
class Quantize(Encode):
    """Group-quantize a dense tensor to `encoding`, by scale search or plain min-max.

    Where statistics are given, the search weighs the error of a column by its mean square.
    """

    encoding: AffineInt
    search: bool

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def nearest(self, value: DenseRows, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.affine import quantize

        assert len(statistics) <= 1, "one linear has one input"
        weights_I = statistics[0].second_moments_I if statistics else None
        quantized, error = quantize(value, self.encoding, search=self.search, weights_I=weights_I)
        return quantized, Finding(error.nonfinite, error.overflow, error)

    def apply_stacked(self, value: Value, count: int) -> tuple[Value, list[Finding]]:
        from qconvert.quant.affine import quantize_stacked

        assert isinstance(value, DenseRows)
        if value.dtype is DType.F64:  # of which the kernels do not tell what exceeds float32 where
            return Encode.apply_stacked(self, value, count)
        made, errors = quantize_stacked(value, count, self.encoding, search=self.search)
        return made, [Finding(error.nonfinite, error.overflow, error) for error in errors]


@dataclass(frozen=True, slots=True)
class EncodeBlocks(Encode):
    """Encode a dense tensor as GGML blocks, bit for bit as llama-quantize does.

    Where statistics are given they are llama.cpp's importance matrix; of a stack of experts, each
    expert has its own.
    """

    encoding: GgmlBlocks

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def nearest(self, value: DenseRows, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        import numpy as np

        from qconvert.quant.casts import flaw_and_peak
        from qconvert.quant.ggml import encode_rows, overflowed

        name = self.encoding.type
        pieces = [
            encode_rows(
                DenseRows(value.rows_RI[s.first : s.last], value.dtype), name, importance_I=s.second_moments_I
            )
            for s in statistics
        ]
        bytes_RB = np.concatenate(pieces) if len(pieces) > 1 else (pieces or [encode_rows(value, name)])[0]
        flaw, peak = flaw_and_peak(value)
        peak = peak if flaw < 0 else inf  # of which numbers after the flaw may be the largest
        overflow = overflowed(value, bytes_RB, name, peak)
        return GgmlRows(bytes_RB, self.encoding), Finding(flaw, overflow)


@dataclass(frozen=True, slots=True)
class EncodeTable(Encode):
    """Encode a dense tensor as codes of a table, rounded as a layout's own tool does it.

    `rounding` are the rules of its scales and ties. `whole` is the largest magnitude of the
    whole tensor, or of its shared scale group, once it is known, for encodings that need it.
    Where statistics are given, scales are searched, and the error of a column is weighed by its mean square;
    not where two experts share a scale.
    """

    encoding: Codebook
    rounding: RoundingRules = NEAREST
    shares_scale_with: str = ""
    whole: float | None = None

    @property
    def granule(self) -> int:
        return self.encoding.group_rows or 1

    @property
    def needs_reduction(self) -> bool:
        from qconvert.quant.codebook_encode import needs_whole

        return self.whole is None and needs_whole(self.encoding)

    @property
    def shared_scale_group(self) -> str:
        return self.shares_scale_with

    def reduce(self, value: Value) -> np.ndarray:
        """The largest magnitude of these rows, one number."""
        from qconvert.quant.codebook_encode import peaks

        assert isinstance(value, DenseRows)
        return peaks(value, replace(self.encoding, group_rows=None, group_size=None)).ravel()

    def finalize(self, found: np.ndarray) -> EncodeTable:
        return replace(self, whole=float(found.max(initial=0.0)))

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Unquantized), encoding
        return self.encoding

    def nearest(self, value: DenseRows, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        if any(each.last % self.granule for each in statistics[:-1]):
            return self._encode(value)
        pieces = [
            self._encode(DenseRows(value.rows_RI[s.first : s.last], value.dtype), s.second_moments_I)
            for s in statistics
        ]
        if not pieces:
            return self._encode(value)
        found = _joined([found for _, found in pieces], statistics, value.width)
        return stack_rows([made for made, _ in pieces]), found

    def _encode(self, value: DenseRows, weights_I: np.ndarray | None = None) -> tuple[Value, Finding]:
        from qconvert.quant.codebook_encode import encode

        made, error = encode(
            value, self.encoding, rounding=self.rounding, whole=self.whole, weights_I=weights_I
        )
        return made, Finding(error.nonfinite, error=error)


@dataclass(frozen=True, slots=True)
class NestScales(Op):
    """Quantize the scales of bitsandbytes' blocks in their turn (see `quant.nested_scales`).

    `width` is that of a row; `offset` the mean that is subtracted from all scales, once it is known.
    """

    width: int
    offset: float | None = None
    keeps_rows: ClassVar[bool] = True

    @property
    def granule(self) -> int:
        from qconvert.quant.nested_scales import rows_together

        return rows_together(self.width)

    @property
    def needs_reduction(self) -> bool:
        return self.offset is None

    def reduce(self, value: Value) -> np.ndarray:
        """Sums over the scales, run by run."""
        from qconvert.quant.nested_scales import sums

        assert isinstance(value, CodebookRows)
        return sums(value.scales_RG)

    def finalize(self, found: np.ndarray) -> NestScales:
        from qconvert.quant.nested_scales import offset_of

        return replace(self, offset=offset_of(found))

    def infer(self, encoding: Encoding) -> Encoding:
        assert isinstance(encoding, Codebook)
        return replace(encoding, second="nested")

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.quant.nested_scales import nest

        assert isinstance(value, CodebookRows) and self.offset is not None
        made, moved = nest(value, self.offset)
        return made, Finding(code_error=moved)
