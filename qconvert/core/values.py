"""Defines values: rows of a tensor in memory, one class for each kind of encoding.

All have `rows`, `width` (weights per row), `arrays` (those cut by rows, the main one first) and `with_arrays`
(the same value with other rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Unquantized rows: `rows_RI` [rows, width] in the carrier type of `dtype`."""

    rows_RI: np.ndarray
    dtype: DType

    @property
    def rows(self) -> int:
        return int(self.rows_RI.shape[0])

    @property
    def width(self) -> int:
        return int(self.rows_RI.shape[1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.rows_RI,)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> DenseRows:
        return DenseRows(arrays[0], self.dtype)


@dataclass(frozen=True, slots=True)
class AffineIntRows:
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
    """Rows of a weight quantized with mins: `codes * scales + mins`.

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
    """bitsandbytes' nested scales: `quant.nested_scales.TABLE[codes] * upper + offset`.

    codes_RG uint8 [rows, groups]; upper_B float32, one for every 256 of the flattened codes.
    """

    codes_RG: np.ndarray
    upper_B: np.ndarray
    offset: float


@dataclass(frozen=True, slots=True)
class CodebookRows:
    """Rows of a weight as codes of a table: `table[codes] * scales`.

    codes_RI uint8 [rows, width]; scales_RG [rows, groups] in the carrier type of `encoding.scale_dtype`, also
    where one scale applies to several rows. Nested scales are dequantized to float32; `nested` is set only
    where they are to be written. `divisor` is the float32 that `divided` scales are divided by.
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
    """Rows of GGML blocks as stored: `bytes_RB` uint8 [rows, encoding.row_bytes(width)]."""

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
