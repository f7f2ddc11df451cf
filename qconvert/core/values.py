"""Defines values: rows of a tensor in memory, one class for each kind of encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, GgmlBlocks

if TYPE_CHECKING:
    import numpy as np


def is_packed(codes_RX: np.ndarray) -> bool:
    """Whether codes are words of a stream (int32), not one uint8 each."""
    return codes_RX.dtype != "u1"


def width_of_codes(codes_RX: np.ndarray, bits: int) -> int:
    """The number of codes in a row, packed or not."""
    stored = int(codes_RX.shape[1])
    return stored * 32 // bits if is_packed(codes_RX) else stored


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Rows of numbers: `rows_RI` [rows, width] in the carrier type of `dtype`."""

    rows_RI: np.ndarray
    dtype: DType

    @property
    def rows(self) -> int:
        return int(self.rows_RI.shape[0])

    @property
    def width(self) -> int:
        """The number of weights in a row (so for every kind of value)."""
        return int(self.rows_RI.shape[1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that are cut by rows, the main one first (so for every kind of value)."""
        return (self.rows_RI,)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> DenseRows:
        """This value with other rows (so for every kind of value)."""
        return DenseRows(arrays[0], self.dtype)


@dataclass(frozen=True, slots=True)
class AffineIntRows:
    """Rows of a group-quantized weight on the grid `(codes - zeros) * scales`.

    codes_RX are the codes, packed or not (see `quant.packed_codes`); scales_RG [rows, groups] in the
    carrier type of `encoding.scale_dtype`; zeros_RG uint8 [rows, groups], None exactly when the form is
    symmetric;
    groups_I int32 [width], the group of every column, None unless the form is in activation order.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    zeros_RG: np.ndarray | None
    encoding: AffineInt
    groups_I: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return int(self.codes_RX.shape[0])

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.encoding.bits)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        both = (self.codes_RX, self.scales_RG)
        return both if self.zeros_RG is None else (*both, self.zeros_RG)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> AffineIntRows:
        zeros_RG = arrays[2] if len(arrays) == 3 else None
        return AffineIntRows(arrays[0], arrays[1], zeros_RG, self.encoding, self.groups_I)


@dataclass(frozen=True, slots=True)
class AffineMinRows:
    """Rows of a weight on the grid `codes * scales + mins`.

    codes_RX are the codes, packed or not (see `quant.packed_codes`); scales_RG and mins_RG [rows, groups] in
    the carrier type of `encoding.scale_dtype`.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    mins_RG: np.ndarray
    encoding: AffineMin

    @property
    def rows(self) -> int:
        return int(self.codes_RX.shape[0])

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.encoding.bits)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes_RX, self.scales_RG, self.mins_RG

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> AffineMinRows:
        return AffineMinRows(arrays[0], arrays[1], arrays[2], self.encoding)


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales as bitsandbytes nests them: `quant.nested_scales.TABLE[codes] * upper + offset`.

    codes_RG uint8 [rows, groups]; upper_B float32, one for every 256 of the flat codes.
    """

    codes_RG: np.ndarray
    upper_B: np.ndarray
    offset: float


@dataclass(frozen=True, slots=True)
class CodebookRows:
    """Rows of a weight as codes of a table: `table[codes] * scales`.

    codes_RI uint8 [rows, width]; scales_RG [rows, groups] in the carrier type of
    `encoding.scale_dtype`, also where one scale serves several rows. Nested scales come resolved, as
    float32, and as `nested` where they are about to be written; `divisor` is the float32 by which
    `divided` ones are divided.
    """

    codes_RI: np.ndarray
    scales_RG: np.ndarray
    encoding: Codebook
    divisor: float | None = None
    nested: Nested | None = None

    @property
    def rows(self) -> int:
        return int(self.codes_RI.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes_RI.shape[1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes_RI, self.scales_RG

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> CodebookRows:
        return CodebookRows(arrays[0], arrays[1], self.encoding, self.divisor)


@dataclass(frozen=True, slots=True)
class GgmlRows:
    """Rows of GGML blocks as they are stored: `bytes_RB` uint8 [rows, form.row_bytes(width)]."""

    bytes_RB: np.ndarray
    encoding: GgmlBlocks

    @property
    def rows(self) -> int:
        return int(self.bytes_RB.shape[0])

    @property
    def width(self) -> int:
        return int(self.bytes_RB.shape[1]) // self.encoding.block_bytes * self.encoding.block

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.bytes_RB,)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> GgmlRows:
        return GgmlRows(arrays[0], self.encoding)


Value = DenseRows | AffineIntRows | AffineMinRows | CodebookRows | GgmlRows
