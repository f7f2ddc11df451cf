"""Numbers from files nobody vouches for: the one reader of those that a model computes with."""

from __future__ import annotations

import math
import struct


def positive_number(value: object) -> float | None:
    """`value` as a float if it is a number above 0 that float32 holds, None if it is anything else.

    Models compute in float32 and GGUF stores it, so what overflows there (1e300, an integer of 400
    digits) or becomes 0 is no number for either; true and false are none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    stored = float32(value)
    return float(value) if stored is not None and 0 < stored < math.inf else None


def float32(value: float) -> float | None:
    """The float32 nearest to a number, None where that is beyond the largest."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return None


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-06, not 9.999999974752427e-07.

    A number that no float32 stands for is returned as it is.
    """
    stored = float32(value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((c for c in candidates if stored is not None and float32(c) == stored), float(value))
