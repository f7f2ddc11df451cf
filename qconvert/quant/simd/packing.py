"""Packs codes of 2 to 8 bits into 32-bit words, as one dense little-endian bit stream.

Code i occupies bits [i * bits, (i + 1) * bits) of the stream, without padding between codes, so codes of 3,
5, 6 and 7 bits may straddle words; the last word is padded with zeros. This is the order of
compressed-tensors (`pack_to_int32`), of GPTQ and of MLX.

Eight codes are one 64-bit number before packing and `bits` whole bytes after it, and three shifts convert
between them: first pairs of codes are joined, then fours, then all eight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import kernel, routine
from qconvert.quant.simd.transpose import transposed

_WORD = 32


def pack_stream(codes_RI: np.ndarray, bits: int) -> np.ndarray:
    """Packs every row: uint8 [R, I] below `2**bits` to int32 [R, ceil(I * bits / 32)]."""
    rows, width = codes_RI.shape
    padding = -width % _WORD
    if padding:
        codes_RI = np.pad(codes_RI, ((0, 0), (0, padding)))
    words_RW = np.empty((rows, (width + padding) * bits // _WORD), "<i4")
    octets = np.ascontiguousarray(codes_RI).reshape(-1).view("<u8")
    if bits == 4:
        _pack_nibbles(octets, words_RW.reshape(-1).view("<u4"))
    else:
        _pack_octets(octets, bits, words_RW.reshape(-1).view(np.uint8))
    return np.ascontiguousarray(words_RW[:, : -(-width * bits // _WORD)])


def unpack_stream(words_RW: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Returns the first `width` codes of every row, uint8 [R, width]. Undoes `pack_stream`."""
    rows, padding = words_RW.shape[0], -width % _WORD
    needed = (width + padding) * bits // _WORD
    words_RW = words_RW[:, :needed]
    if words_RW.shape[1] < needed:
        words_RW = np.pad(words_RW, ((0, 0), (0, needed - words_RW.shape[1])))
    codes_RI = np.empty((rows, width + padding), np.uint8)
    words = np.ascontiguousarray(words_RW).reshape(-1)
    octets = codes_RI.reshape(-1).view("<u8")
    if bits == 4:
        _unpack_nibbles(words.view("<u4"), octets)
    else:
        _unpack_octets(words.view(np.uint8), bits, octets)
    return np.ascontiguousarray(codes_RI[:, :width])


def pack_rows(codes_RG: np.ndarray, bits: int) -> np.ndarray:
    """Packs every column: uint8 [R, G] below `2**bits` to int32 [ceil(R * bits / 32), G]."""
    return transposed(pack_stream(codes_RG.T, bits))


def unpack_rows(words_WG: np.ndarray, bits: int, rows: int) -> np.ndarray:
    """Returns the first `rows` codes of every column's stream, uint8 [rows, G]. Undoes `pack_rows`."""
    return transposed(unpack_stream(words_WG.T, bits, rows))


@routine
def _code_masks(bits: Any) -> Any:
    """Returns masks of the bits that stay in place: the first of two codes, of two pairs, of two fours."""
    one = np.uint64(0x0001000100010001) * ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))
    two = np.uint64(0x0000000100000001) * ((np.uint64(1) << np.uint64(2 * bits)) - np.uint64(1))
    return one, two, (np.uint64(1) << np.uint64(4 * bits)) - np.uint64(1)


@routine
def _compress(codes: Any, free: Any, one: Any, two: Any, four: Any) -> Any:
    """Joins eight codes, one per byte, into consecutive bits; each code has `free` unused bits."""
    codes = (codes & one) | ((codes & ~one) >> free)
    codes = (codes & two) | ((codes & ~two) >> (free + free))
    return (codes & four) | ((codes & ~four) >> (np.uint64(4) * free))


@routine
def _expand(codes: Any, free: Any, one: Any, two: Any, four: Any) -> Any:
    """Undoes `_compress`."""
    codes = (codes & four) | ((codes & ~four) << (np.uint64(4) * free))
    codes = (codes & two) | ((codes & ~two) << (free + free))
    return (codes & one) | ((codes & ~one) << free)


@kernel
def _pack_octets(octets: Any, bits: Any, stream: Any) -> None:
    free = np.uint64(8 - bits)
    one, two, four = _code_masks(bits)
    for i in range(octets.size):
        codes = _compress(octets[i], free, one, two, four)
        for byte in range(bits):
            stream[i * bits + byte] = np.uint8(codes >> np.uint64(8 * byte))


@kernel
def _unpack_octets(stream: Any, bits: Any, octets: Any) -> None:
    free = np.uint64(8 - bits)
    one, two, four = _code_masks(bits)
    for i in range(octets.size):
        codes = np.uint64(0)
        for byte in range(bits):
            codes |= np.uint64(stream[i * bits + byte]) << np.uint64(8 * byte)
        octets[i] = _expand(codes, free, one, two, four)


# Four bits are the common case: eight codes are one word, and without a loop over bytes LLVM uses SIMD.
@kernel
def _pack_nibbles(octets: Any, words: Any) -> None:
    one, two, four = _code_masks(4)
    for i in range(octets.size):
        words[i] = np.uint32(_compress(octets[i], np.uint64(4), one, two, four))


@kernel
def _unpack_nibbles(words: Any, octets: Any) -> None:
    one, two, four = _code_masks(4)
    for i in range(words.size):
        octets[i] = _expand(np.uint64(words[i]), np.uint64(4), one, two, four)
