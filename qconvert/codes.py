"""Codes in memory: one number a byte, or still packed as most layouts store them.

`codes_RX` is either uint8 [rows, width], or int32 [rows, width * bits / 32], one dense little-endian
stream a row (`quant.packing`). An operation that looks at codes asks for them unpacked; whatever moves
rows, or stores the stream again, never unpacks it. Numba is loaded only to change one into the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_WORD = 32


def is_packed(codes_RX: np.ndarray) -> bool:
    """Whether these are words of a stream."""
    return codes_RX.dtype != "u1"


def width_of_codes(codes_RX: np.ndarray, bits: int) -> int:
    """The number of codes in a row."""
    stored = int(codes_RX.shape[1])
    return stored * _WORD // bits if is_packed(codes_RX) else stored


def from_words(words_RW: np.ndarray, bits: int, width: int) -> np.ndarray:
    """The `width` codes of each row of a stream as `codes_RX`: packed where they fill whole words."""
    if width * bits == words_RW.shape[1] * _WORD:
        return words_RW
    from qconvert.quant.packing import unpack_stream

    return unpack_stream(words_RW, bits, width)


def unpacked(codes_RX: np.ndarray, bits: int) -> np.ndarray:
    """The codes, uint8 [rows, width]."""
    if not is_packed(codes_RX):
        return codes_RX
    from qconvert.quant.packing import unpack_stream

    return unpack_stream(codes_RX, bits, width_of_codes(codes_RX, bits))


def packed(codes_RX: np.ndarray, bits: int) -> np.ndarray:
    """The codes as a stream, int32 [rows, ceil(width * bits / 32)]."""
    if is_packed(codes_RX):
        return codes_RX
    from qconvert.quant.packing import pack_stream

    return pack_stream(codes_RX, bits)
