"""Rounds plain tensors to another float dtype."""

from __future__ import annotations

from qconvert.core.encodings import Encoding, Unquantized
from qconvert.ops import Cast, Op
from qconvert.plan.state import Compiled


def cast_plain(state: Compiled) -> Compiled:
    """Every plain float tensor in the asked dtype."""
    dtype = state.request.dtype
    if dtype is None:
        return state

    def choose(encoding: Encoding) -> Op | None:
        plain = isinstance(encoding, Unquantized) and encoding.dtype.is_float
        return Cast(dtype) if plain and encoding != Unquantized(dtype) else None

    return state.with_plan(state.plan.where(choose))
