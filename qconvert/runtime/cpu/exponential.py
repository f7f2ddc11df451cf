"""Computes e to the power of sixteen float32 at once, and the highest of many, taken off them before."""

from __future__ import annotations

import numpy as np

from qconvert.quant.simd.lanes import LANES, highest, rounded_even, splat, where
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.simd import floats, power_of_two, routine

_F = np.float32
MISSING = _F(-1e30)
"""The number of what is not there: finite, so that differences of two are no NaN."""


@routine
def highest_of(x, count, least):  # type: ignore[no-untyped-def]
    """The highest of `count` numbers, which fill lanes, and of `least`."""
    most = splat(least)
    for i in range(0, count, LANES):
        value = floats(x + 4 * i)
        most = where(most < value, value, most)
    return highest(most)


@routine
def exp(x):  # type: ignore[no-untyped-def]
    """e to lanes from -87 to 88, beyond which they count as these; NaN stays NaN.

    Within 1.01 units in the last place: 2**n times a polynomial of the rest, with the constants of Cephes'
    `expf` (Moshier, netlib.org/cephes).
    """
    x = where(x < splat(_F(-87)), splat(_F(-87)), x)
    x = where(x > splat(_F(88)), splat(_F(88)), x)
    n = rounded_even(x * _F(1.44269504))
    r = fused(n, splat(_F(-0.693359375)), x)
    r = fused(n, splat(_F(2.12194440e-4)), r)
    p = splat(_F(1.9875691500e-4))
    p = fused(p, r, splat(_F(1.3981999507e-3)))
    p = fused(p, r, splat(_F(8.3334519073e-3)))
    p = fused(p, r, splat(_F(4.1665795894e-2)))
    p = fused(p, r, splat(_F(1.6666665459e-1)))
    p = fused(p, r, splat(_F(5.0000001201e-1)))
    return (fused(p, r * r, r) + _F(1)) * power_of_two(n)
