"""Checks and rounds numbers that come from untrusted files and go into a model's arithmetic."""

from __future__ import annotations

import math
import struct


def positive_number(value: object) -> float | None:
    """Returns `value` as a float if it is a positive number in float32's range, otherwise None.

    Models compute in float32 and GGUF stores it, so None is also returned for what overflows there (1e300, an
    integer of 400 digits) or becomes 0, and for booleans.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    stored = float32(value)
    return float(value) if stored is not None and 0 < stored < math.inf else None


def float32(value: float) -> float | None:
    """Returns the float32 nearest to a number, None beyond float32's range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return None


def shortest(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32: 1e-06, not 9.999999974752427e-07.

    A number beyond float32's range is returned unchanged.
    """
    stored = float32(value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((c for c in candidates if stored is not None and float32(c) == stored), float(value))
