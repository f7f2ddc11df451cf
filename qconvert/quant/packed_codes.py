"""Codes in memory: one number a byte, or still packed as most layouts store them.

`codes_RX` is either uint8 [rows, width], or int32 [rows, width * bits / 32], one dense little-endian
stream a row (`quant.simd.packing`). An operation that looks at codes asks for them unpacked; whatever moves
rows, or stores the stream again, never unpacks it. Numba is loaded only to change one into the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, is_packed

if TYPE_CHECKING:
    import numpy as np

_WORD = 32


def from_words(words_RW: np.ndarray, bits: int, width: int) -> np.ndarray:
    """The `width` codes of each row of a stream as `codes_RX`: packed where they fill whole words."""
    if width * bits == words_RW.shape[1] * _WORD:
        return words_RW
    from qconvert.quant.simd.packing import unpack_stream

    return unpack_stream(words_RW, bits, width)


def codes_of(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """The codes of a value, unpacked: uint8 [rows, width]."""
    if isinstance(value, CodebookRows):
        return value.codes_RI
    if not is_packed(value.codes_RX):
        return value.codes_RX
    from qconvert.quant.simd.packing import unpack_stream

    return unpack_stream(value.codes_RX, value.encoding.bits, value.width)


def words_of(value: AffineIntRows | AffineMinRows) -> np.ndarray:
    """The codes of a value as a stream, int32 [rows, ceil(width * bits / 32)]."""
    if is_packed(value.codes_RX):
        return value.codes_RX
    from qconvert.quant.simd.packing import pack_stream

    return pack_stream(value.codes_RX, value.encoding.bits)
