"""Rounds, stores and reads the half-precision scalars of a block, in numba code.

Scalar counterparts of `qconvert.quant.simd.lanes`. Everything is integer arithmetic on the bits of a float32,
so it does not depend on the conversions the processor has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import routine

_HALF_LARGEST = 0x477FF000  # 65520, from which on rounding gives infinity
_HALF_SMALLEST = 0x38800000  # 2**-14, below which a half is denormal
_INFINITY = 0x7F800000
_DENORMAL_ULP = np.float32(0.5)  # its ulp is 2**-24, that of denormal halves
_DENORMAL_BITS = 126 << 23
_EXPONENT_SHIFT = np.float32(2.0**112)  # from the exponent bias of a half (15) to that of a float (127)


@routine
def half_bits(value: np.float32) -> Any:
    """Returns the 16 bits of the IEEE half nearest to a float32, half to even; NaN becomes a quiet NaN."""
    bits = np.int64(np.float32(value).view(np.uint32))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > _INFINITY:
        return sign | 0x7E00
    if size >= _HALF_LARGEST:
        return sign | 0x7C00
    if size < _HALF_SMALLEST:
        shifted = np.float32(abs(np.float32(value)) + _DENORMAL_ULP)
        return sign | (np.int64(shifted.view(np.uint32)) - _DENORMAL_BITS)
    odd = (size >> 13) & 1
    return sign | ((size - (112 << 23) + 0xFFF + odd) >> 13)


@routine
def half_value(bits: int) -> Any:
    """Returns the float32 equal to the IEEE half with these 16 bits."""
    size = np.uint32((bits & 0x7FFF) << 13).view(np.float32) * _EXPONENT_SHIFT
    if bits & 0x7C00 == 0x7C00:
        size = np.uint32(_INFINITY | (bits & 0x3FF) << 13).view(np.float32)
    return -size if bits & 0x8000 else size


@routine
def put_half(out: np.ndarray, at: int, value: np.float32) -> Any:
    """Writes a float32 as a half to `out[at:at + 2]`; returns it rounded."""
    bits = half_bits(value)
    out[at] = bits & 0xFF
    out[at + 1] = bits >> 8
    return half_value(bits)


@routine
def inverse(value: np.float32) -> Any:
    """Returns `1 / value`, and 0 for 0."""
    return np.float32(1) / value if value != 0 else np.float32(0)
