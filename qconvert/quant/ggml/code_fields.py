"""Reads and writes the codes of GGML blocks: runs of bytes that each hold some bits of several codes.

Source: the block structs and dequantize_row_* of ggml-common.h and ggml-quants.c.

Axes: N blocks, B bytes of a block, I columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_PIECE = 1 << 16  # codes written at a time, so that temporaries stay in the cache


class CodeField(NamedTuple):
    """Bytes [start, stop) of a block, which hold bits [shift, shift + bits) of every code.

    Of each `run` bytes the lowest `bits` belong to the first codes, the next to those after them. `flipped`
    are the bits that are stored inverted.
    """

    start: int
    stop: int
    bits: int
    run: int
    shift: int = 0
    flipped: int = 0


CODE_FIELDS: Mapping[str, tuple[CodeField, ...]] = {
    "Q4_0": (CodeField(2, 18, 4, 16),),
    "Q4_1": (CodeField(4, 20, 4, 16),),
    "Q5_0": (CodeField(6, 22, 4, 16), CodeField(2, 6, 1, 1, 4)),
    "Q5_1": (CodeField(8, 24, 4, 16), CodeField(4, 8, 1, 1, 4)),
    "Q8_0": (CodeField(2, 34, 8, 32, flipped=0x80),),
    "Q2_K": (CodeField(16, 80, 2, 32),),
    "Q3_K": (CodeField(32, 96, 2, 32), CodeField(0, 32, 1, 32, 2)),
    "Q4_K": (CodeField(16, 144, 4, 32),),
    "Q5_K": (CodeField(48, 176, 4, 32), CodeField(16, 48, 1, 32, 4)),
    "Q6_K": (CodeField(0, 128, 4, 64), CodeField(128, 192, 2, 32, 4)),
    "IQ4_NL": (CodeField(2, 18, 4, 16),),
    "IQ4_XS": (CodeField(8, 136, 4, 16),),
    "TQ2_0": (CodeField(0, 64, 2, 32),),
    "MXFP4": (CodeField(1, 17, 4, 16),),
    "NVFP4": (CodeField(4, 36, 4, 8),),
    "Q1_0": (CodeField(2, 18, 1, 1, 1),),
    "Q2_0": (CodeField(2, 18, 2, 1),),
}
"""Where the codes of a block are, by the name of its type. All other bytes hold scales and mins."""


def read_codes(type_name: str, blocks_NB: np.ndarray) -> np.ndarray:
    """Returns the codes of blocks of a type in `CODE_FIELDS`, uint8 [N, I]."""
    codes_NI = None
    for field in CODE_FIELDS[type_name]:
        part_NI = fields(blocks_NB[:, field.start : field.stop], field.bits, field.run)
        if field.shift:
            part_NI <<= np.uint8(field.shift)
        if field.flipped:
            part_NI ^= np.uint8(field.flipped)
        codes_NI = part_NI if codes_NI is None else codes_NI | part_NI
    assert codes_NI is not None
    return codes_NI


def put_codes(type_name: str, blocks_NB: np.ndarray, codes_NI: np.ndarray) -> None:
    """Writes codes, uint8 [N, I] below the type's number of them, into blocks; leaves all other bytes."""
    count = max(1, _PIECE // codes_NI.shape[1])
    for first in range(0, len(codes_NI), count):
        piece = slice(first, first + count)
        for field in CODE_FIELDS[type_name]:
            bits_NI = (codes_NI[piece] ^ np.uint8(field.flipped)) >> np.uint8(field.shift)
            blocks_NB[piece, field.start : field.stop] = joined(bits_NI, field.bits, field.run)


def fields(stored: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Splits bytes into fields of `bits`: of each `run` bytes the lowest fields first, then the next."""
    if bits == run == 1:
        return np.unpackbits(stored, axis=1, bitorder="little")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = stored.reshape(len(stored), -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).reshape(len(stored), -1)


def joined(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Undoes `fields`, of the lowest `bits` of codes."""
    codes = codes & np.uint8((1 << bits) - 1)
    if bits == run == 1:
        return np.packbits(codes, axis=1, bitorder="little")
    parts = codes.reshape(len(codes), -1, 8 // bits, run)
    stored = parts[:, :, 0]
    for k in range(1, 8 // bits):
        stored |= parts[:, :, k] << np.uint8(bits * k)
    return stored.reshape(len(codes), -1)
