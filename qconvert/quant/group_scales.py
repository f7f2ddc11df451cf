"""Which numbers may a group's scale and codes be? Scales are rounded to the type they are stored in.

Codes are computed with the stored scale, never with the one before rounding. A stored scale is finite
and positive, also where a group is all zeros: some readers divide by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.quant.simd.lanes import routine


class Grid(NamedTuple):
    """A group's form as kernels take it: its codes, and the type of its scales as seen from float32.

    Codes run from 0 to `top`; a symmetric grid's zero is `middle`. The scale type lacks `dropped` bits
    of a float32's mantissa. Below `normal` its numbers are the multiples of `smallest`, which is also
    the smallest scale in use; `largest` is its largest finite number.
    """

    bits: int
    symmetric: bool
    top: np.float32
    middle: np.float32
    dropped: int
    normal: np.float32
    smallest: np.float32
    largest: np.float32


# Many processors flush the denormals of bfloat16 and float32 to zero, so scales stay above them.
# Those of float16 are never flushed, and needed: every scale below 6e-5 is one.
_WIDE = (0, 2.0**-126, 2.0**-126, (2 - 2.0**-23) * 2.0**127)
_SCALE_TYPES = {
    DType.BF16: (16, 2.0**-126, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    DType.F16: (13, 2.0**-14, 2.0**-24, 65504.0),
    DType.F32: _WIDE,
    DType.F64: _WIDE,
}


def grid_of(encoding: AffineInt) -> Grid:
    """What the kernels need to know of a form."""
    dropped, *bounds = _SCALE_TYPES[encoding.scale_dtype]
    top, middle = np.float32(2**encoding.bits - 1), np.float32(2 ** (encoding.bits - 1))
    return Grid(encoding.bits, encoding.symmetric, top, middle, int(dropped), *map(np.float32, bounds))


@routine
def stored_scale(scale: Any, grid: Any) -> Any:
    """The stored number nearest to a positive float32, half to even; the nearer bound beyond them."""
    rounded = scale
    if scale < grid.normal:
        rounded = np.rint(scale / grid.smallest) * grid.smallest
    elif grid.dropped:
        bits = np.int64(np.float32(scale).view(np.uint32))
        bits += (1 << (grid.dropped - 1)) - 1 + ((bits >> grid.dropped) & 1)
        rounded = np.uint32(bits >> grid.dropped << grid.dropped).view(np.float32)
    return min(max(rounded, grid.smallest), grid.largest)
