"""Encodes rows as MXFP4 and NVFP4: blocks of 32 or 64 E2M1 codes with a scale of 8 bits per 32 or 16.

v = scale * code; the scale depends on the largest magnitude alone, and every code is the nearest one. Scales
are powers of two (MXFP4) or unsigned E4M3 numbers (NVFP4; there is no second scale). Source:
quantize_row_mxfp4_ref, quantize_row_nvfp4_ref, ggml_fp32_to_ue4m3 and ggml_ue4m3_to_fp32 of ggml.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.decode import E2M1_DOUBLED
from qconvert.quant.simd.lanes import LANES, absolute, kernel, load, peak, routine, splat, store, where

BLOCK = 32
_ZERO, _HALF, _SIX, _EIGHT, _SIXTEEN = (np.float32(number) for number in (0, 0.5, 6, 8, 16))
_E4M3_LARGEST, _PER_STEP = np.float32(448), np.float32(512)  # and codes per 1 below 2**-6
_CODES = np.arange(8, dtype=np.float32)
# Midpoints of the doubled magnitudes 0 1 2 3 4 6 8 12; ties round down.
_MIDDLES = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)


@kernel
def encode_mxfp4(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes MXFP4 blocks of the flat array of whole rows to the flat `out`: 17 bytes a block, e first."""
    for block in range(rows.size // BLOCK):
        a, b = load(rows, block * BLOCK), load(rows, block * BLOCK + LANES)
        exponent = _exponent(max(peak(a), peak(b)))
        half = _half_power(exponent)
        out[block * 17] = exponent
        store(out, block * 17 + 1, _codes(a, half) + _codes(b, half) * _SIXTEEN)


@kernel
def encode_nvfp4(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes NVFP4 blocks of the flat array of whole rows to the flat `out`: four scales, then the codes."""
    codes = np.empty(LANES, np.uint8)
    for group in range(rows.size // LANES):
        block, part = group // 4, group % 4
        x = load(rows, group * LANES)
        scale = _e4m3_code(peak(x) / _SIX)
        out[block * 36 + part] = scale
        store(codes, 0, _nearest_codes(x, _e4m3_half(scale)))
        for byte in range(8):
            out[block * 36 + 4 + part * 8 + byte] = codes[byte] | codes[8 + byte] << 4


@routine
def _e4m3_code(value: np.float32) -> Any:
    """Returns the code of a number that is 0 or more, ties away from 0; 248 and more become 448, as in C."""
    bits = np.int64(np.float32(min(value, _E4M3_LARGEST)).view(np.uint32))
    exponent = (bits >> 23) - 127 + 7
    if exponent <= 0:
        return min(np.int64(value * _PER_STEP + _HALF), 7)
    code = (exponent << 3) + (bits >> 20 & 7) + (bits >> 19 & 1)
    return code if code < 0x78 else 0x7E


@routine
def _e4m3_half(code: int) -> Any:
    """Returns half of the number of an E4M3 code, to go with doubled E2M1 numbers."""
    if code < 8:
        return np.float32(code) * _HALF / _PER_STEP
    return np.uint32((code >> 3) + 119 << 23 | (code & 7) << 20).view(np.float32)


@routine
def _nearest_codes(x: Any, scale: np.float32) -> Any:
    """Returns the codes of least rounded difference, the first of equal ones."""
    found, least = splat(_ZERO), absolute(x)
    for code in range(1, 16):
        error = absolute(E2M1_DOUBLED[code] * scale - x)
        smaller = error < least
        found, least = where(smaller, splat(np.float32(code)), found), where(smaller, error, least)
    return found


@routine
def _exponent(size: np.float32) -> Any:
    """Returns the stored exponent of a block's largest magnitude. Below 2**-125 it wraps, as in C."""
    if size == 0:
        return 0
    # The reference takes floorf(log2f(size)), which is one more just below a power of two.
    return (np.int64(np.floor(np.float32(np.log2(np.float64(size))))) - 2 + 127) & 0xFF


@routine
def _half_power(exponent: int) -> Any:
    """Returns 2**(exponent - 128)."""
    bits = 0x00200000 << exponent if exponent < 2 else (exponent - 1) << 23
    return np.uint32(bits).view(np.float32)


@routine
def _codes(x: Any, half: np.float32) -> Any:
    size = absolute(x)
    code = splat(_ZERO)
    for step in range(7):
        code = where(size > _MIDDLES[step] * half, splat(_CODES[step + 1]), code)
    negative = (x < _ZERO) & (code > _ZERO)
    return where(negative, code + _EIGHT, code)
