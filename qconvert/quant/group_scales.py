"""Rounds scales to the type they are stored in, and describes an encoding to the kernels.

Codes are computed with the stored scale, never with the one before rounding. A stored scale is finite and
positive, also of an all-zero group: some readers divide by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.quant.simd.lanes import routine


class GroupSpec(NamedTuple):
    """An encoding as the kernels take it: the range of its codes, and the type of its scales.

    Codes run from 0 to `top`; a symmetric encoding's zero point is `middle`. The scale type has `dropped`
    fewer mantissa bits than float32. Below `normal` its values are multiples of `smallest`, which is also the
    smallest scale in use; `largest` is its maximum.
    """

    bits: int
    symmetric: bool
    top: np.float32
    middle: np.float32
    dropped: int
    normal: np.float32
    smallest: np.float32
    largest: np.float32


# Many processors flush denormals of bfloat16 and float32 to zero, so scales stay above them. Those of float16
# are never flushed, and needed: every scale below 6e-5 is one.
_WIDE = (0, 2.0**-126, 2.0**-126, (2 - 2.0**-23) * 2.0**127)
_SCALE_TYPES = {
    DType.BF16: (16, 2.0**-126, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    DType.F16: (13, 2.0**-14, 2.0**-24, 65504.0),
    DType.F32: _WIDE,
    DType.F64: _WIDE,
}


def group_spec(encoding: AffineInt) -> GroupSpec:
    """Returns the settings of an encoding that kernels need."""
    dropped, *bounds = _SCALE_TYPES[encoding.scale_dtype]
    top, middle = np.float32(2**encoding.bits - 1), np.float32(2 ** (encoding.bits - 1))
    return GroupSpec(encoding.bits, encoding.symmetric, top, middle, int(dropped), *map(np.float32, bounds))


@routine
def stored_scale(scale: Any, spec: Any) -> Any:
    """Rounds a positive float32 to the nearest storable scale, half to even; saturates at both bounds."""
    rounded = scale
    if scale < spec.normal:
        rounded = np.rint(scale / spec.smallest) * spec.smallest
    elif spec.dropped:
        bits = np.int64(np.float32(scale).view(np.uint32))
        bits += (1 << (spec.dropped - 1)) - 1 + ((bits >> spec.dropped) & 1)
        rounded = np.uint32(bits >> spec.dropped << spec.dropped).view(np.float32)
    return min(max(rounded, spec.smallest), spec.largest)
