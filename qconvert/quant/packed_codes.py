"""Converts codes in memory between one uint8 each and the packed stream that most layouts store.

`codes_RX` is either uint8 [rows, width], or int32 [rows, width * bits / 32], one dense little-endian stream a
row (`quant.simd.packing`). Operations that compute with codes unpack them; those that move rows or store the
stream never do. Numba is imported only for a conversion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, is_packed

if TYPE_CHECKING:
    import numpy as np

_WORD = 32


def from_words(words_RW: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Returns the `width` codes of each row of a stream as `codes_RX`: packed where they fill whole words."""
    if width * bits == words_RW.shape[1] * _WORD:
        return words_RW
    from qconvert.quant.simd.packing import unpack_stream

    return unpack_stream(words_RW, bits, width)


def codes_of(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """Returns the codes of a value, unpacked: uint8 [rows, width]."""
    if isinstance(value, CodebookRows):
        return value.codes_RI
    if not is_packed(value.codes_RX):
        return value.codes_RX
    from qconvert.quant.simd.packing import unpack_stream

    return unpack_stream(value.codes_RX, value.encoding.bits, value.width)


def words_of(value: AffineIntRows | AffineMinRows) -> np.ndarray:
    """Returns the codes of a value as a stream, int32 [rows, ceil(width * bits / 32)]."""
    if is_packed(value.codes_RX):
        return value.codes_RX
    from qconvert.quant.simd.packing import pack_stream

    return pack_stream(value.codes_RX, value.encoding.bits)
