"""Encodes rows as MXFP4: blocks of 32 E2M1 codes that share a power of two.

v = 2**(e - 127) * code; e depends on the largest magnitude alone, and every code is the nearest one. Source:
quantize_row_mxfp4_ref in ggml-quants.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import LANES, absolute, kernel, load, peak, routine, splat, store, where

BLOCK = 32
_ZERO, _EIGHT, _SIXTEEN = np.float32(0), np.float32(8), np.float32(16)
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
