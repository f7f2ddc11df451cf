"""Encodes rows as TQ1_0 and TQ2_0: super-blocks of 256 codes -1, 0 and 1 with one scale.

v = d * code, with d the largest magnitude; made for BitNet b1.58 and TriLM weights, which are ternary.
Source: quantize_row_tq1_0_ref and quantize_row_tq2_0_ref in ggml-quants.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.scalars import inverse, put_half
from qconvert.quant.simd.lanes import (
    LANES,
    kernel,
    load,
    peak,
    rounded_away,
    routine,
    splat,
    store,
    truncated,
)

BLOCK = 256
_ZERO, _ONE, _THREE, _FOUR = np.float32(0), np.float32(1), np.float32(3), np.float32(4)
_BYTE, _DIGITS, _LAST_DIGITS = np.float32(256), np.float32(243), np.float32(242)


@kernel
def encode_tq2_0(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes TQ2_0 of the array of whole rows: 64 bytes of 2-bit fields, the quarters of each 128, then d."""
    for block in range(rows.size // BLOCK):
        start, at = block * BLOCK, block * 66
        d = _peak(rows, start)
        for half in range(2):
            for element in range(0, 32, LANES):
                byte = splat(_ZERO)
                for quarter in range(3, -1, -1):
                    index = start + half * 128 + quarter * 32 + element
                    byte = byte * _FOUR + _digit(rows, index, inverse(d))
                store(out, at + half * 32 + element, byte)
        put_half(out, at + 64, d)


@kernel
def encode_tq1_0(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes TQ1_0 of the flat array of whole rows: 52 bytes of five or four base-3 digits each, then d."""
    for block in range(rows.size // BLOCK):
        start, at = block * BLOCK, block * 54
        d = _peak(rows, start)
        put_half(out, at + 52, d)
        for element in range(0, 32, LANES):
            _put_digits(rows, start + element, 32, inverse(d), out, at + element)
        _put_digits(rows, start + 160, 16, inverse(d), out, at + 32)
        _put_last_digits(rows, start + 240, inverse(d), out, at + 48)


@routine
def _peak(rows: np.ndarray, start: int) -> Any:
    size = peak(load(rows, start))
    for element in range(LANES, BLOCK, LANES):
        size = max(size, peak(load(rows, start + element)))
    return size


@routine
def _digit(rows: np.ndarray, index: int, spread: np.float32) -> Any:
    """Returns codes plus one: 0, 1 or 2."""
    return truncated(rounded_away(load(rows, index) * spread)) + _ONE


@routine
def _put_digits(
    rows: np.ndarray, index: int, step: int, spread: np.float32, out: np.ndarray, at: int
) -> None:
    """Writes sixteen bytes of five digits, `step` elements apart, the first one the most significant."""
    number = splat(_ZERO)
    for _ in range(5):
        number = number * _THREE + _digit(rows, index, spread)
        index += step
    store(out, at, _scaled(number))


@routine
def _scaled(number: Any) -> Any:
    """Returns ceil(number * 256 / 243): its digits are the integer parts of repeated products with 3."""
    return truncated((number * _BYTE + _LAST_DIGITS) / _DIGITS)


@routine
def _put_last_digits(rows: np.ndarray, index: int, spread: np.float32, out: np.ndarray, at: int) -> None:
    """Writes four bytes of four digits, four elements apart, and a fifth digit 0."""
    digits = np.empty(LANES, np.uint8)
    store(digits, 0, _digit(rows, index, spread))
    for byte in range(4):
        number = 0
        for parameter in range(4):
            number = number * 3 + digits[parameter * 4 + byte]
        out[at + byte] = (number * 3 * 256 + 242) // 243
