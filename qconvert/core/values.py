"""Defines values: rows of a tensor in memory, one class for each kind of encoding.

All have `rows`, `width` (weights per row), `arrays` (those cut by rows, the main one first) and `with_arrays`
(the same value with other rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, GgmlBlocks

if TYPE_CHECKING:
    import numpy as np


def is_packed(codes_RX: np.ndarray) -> bool:
    """True if codes are packed (int32 words of a bit stream), False if they are one uint8 each."""
    return codes_RX.dtype != "u1"


def width_of_codes(codes_RX: np.ndarray, bits: int) -> int:
    """Returns the number of codes in a row, packed or not."""
    stored = int(codes_RX.shape[1])
    return stored * 32 // bits if is_packed(codes_RX) else stored


V = TypeVar("V", bound="_Rows")


class _Rows:
    """The arrays of a value by their names in `_names`; those that are None are not there."""

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        found = (getattr(self, name) for name in self._names)
        return tuple(array for array in found if array is not None)

    @property
    def rows(self) -> int:
        return int(self.arrays[0].shape[0])

    def with_arrays(self: V, arrays: tuple[np.ndarray, ...]) -> V:
        named = dict(zip(self._names, arrays, strict=False))
        return cast(V, replace(cast(Any, self), **named))


@dataclass(frozen=True, slots=True)
class DenseRows(_Rows):
    """Unquantized rows: `rows_RI` [rows, width] in the carrier type of `dtype`."""

    rows_RI: np.ndarray
    dtype: DType
    _names = ("rows_RI",)

    @property
    def width(self) -> int:
        return int(self.rows_RI.shape[1])


@dataclass(frozen=True, slots=True)
class AffineIntRows(_Rows):
    """Rows of a group-quantized weight: `(codes - zeros) * scales`.

    codes_RX are the codes, packed or not (see `quant.packed_codes`); scales_RG [rows, groups] in the carrier
    type of `encoding.scale_dtype`; zeros_RG uint8 [rows, groups] are the zero points, None exactly when the
    encoding is symmetric; groups_I int32 [width] is the group of every column (GPTQ's g_idx), None unless the
    encoding is act-order.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    zeros_RG: np.ndarray | None
    encoding: AffineInt
    groups_I: np.ndarray | None = None
    _names = ("codes_RX", "scales_RG", "zeros_RG")

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.encoding.bits)


@dataclass(frozen=True, slots=True)
class AffineMinRows(_Rows):
    """Rows of a weight quantized with mins: `codes * scales + mins`.

    codes_RX are the codes, packed or not (see `quant.packed_codes`); scales_RG and mins_RG [rows, groups] in
    the carrier type of `encoding.scale_dtype`. mins_RG holds what `encoding.offset` says.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    mins_RG: np.ndarray
    encoding: AffineMin
    _names = ("codes_RX", "scales_RG", "mins_RG")

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.encoding.bits)


@dataclass(frozen=True, slots=True)
class Nested:
    """bitsandbytes' nested scales: `quant.nested_scales.TABLE[codes] * upper + offset`.

    codes_RG uint8 [rows, groups]; upper_B float32, one for every 256 of the flattened codes.
    """

    codes_RG: np.ndarray
    upper_B: np.ndarray
    offset: float


@dataclass(frozen=True, slots=True)
class CodebookRows(_Rows):
    """Rows of a weight as codes of a table: `table[codes] * scales`.

    codes_RI uint8 [rows, width]; scales_RG [rows, groups] in the carrier type of `encoding.scale_dtype`, also
    where one scale applies to several rows. Nested scales are dequantized to float32; `nested` is set only
    where they are to be written. `divisor` is the float32 that `divided` scales are divided by, `factor` the
    one that `multiplied` scales are multiplied with.
    """

    codes_RI: np.ndarray
    scales_RG: np.ndarray
    encoding: Codebook
    divisor: float | None = None
    nested: Nested | None = None
    factor: float | None = None
    _names = ("codes_RI", "scales_RG")

    @property
    def width(self) -> int:
        return int(self.codes_RI.shape[1])

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> CodebookRows:
        return CodebookRows(arrays[0], arrays[1], self.encoding, self.divisor, factor=self.factor)


@dataclass(frozen=True, slots=True)
class GgmlRows(_Rows):
    """Rows of GGML blocks as stored: `bytes_RB` uint8 [rows, encoding.row_bytes(width)]."""

    bytes_RB: np.ndarray
    encoding: GgmlBlocks
    _names = ("bytes_RB",)

    @property
    def width(self) -> int:
        return int(self.bytes_RB.shape[1]) // self.encoding.block_bytes * self.encoding.block


Value = DenseRows | AffineIntRows | AffineMinRows | CodebookRows | GgmlRows


def stack_rows(values: Sequence[Value]) -> Value:
    """Values of one encoding stacked by rows; what a tensor has only once is the first one's."""
    import numpy as np

    if len(values) == 1:
        return values[0]
    columns = zip(*(value.arrays for value in values), strict=True)
    return values[0].with_arrays(tuple(np.concatenate(column) for column in columns))
