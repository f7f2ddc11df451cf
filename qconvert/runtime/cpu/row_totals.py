"""Adds up the lanes of many vectors at once, as the rows of a product end."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from qconvert.quant.simd.lanes import LANES, lane, lanes_type
from qconvert.runtime.cpu.simd import FLOATS, INTS, after, instructions, put_float, read, routine, store_f32

ROWS = LANES
"""Rows that end together."""


def _folded(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Runs of `width` lanes of one vector, then of another, their halves added."""
    half = width // 2
    halves = [
        [LANES * v + run + i for v in (0, 1) for run in range(0, LANES, width) for i in range(at, at + half)]
        for at in (0, half)
    ]
    return builder.fadd(*(builder.shuffle_vector(a, b, ir.Constant(INTS, places)) for places in halves))


@instructions(lanes_type, types.intp)
def _totals(builder: Any, held: Any) -> Any:
    """The sums of sixteen vectors, each as `simd.total` makes it."""
    vectors = [read(builder, after(builder, held, 4 * LANES * row), FLOATS) for row in range(ROWS)]
    width = LANES
    while width > 1:
        vectors = [_folded(builder, a, b, width) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        width //= 2
    return vectors[0]


@routine
def put_totals(held, count, y):  # type: ignore[no-untyped-def]
    """Write the sum of each of `count` vectors, at most `ROWS`; there is room for `ROWS` at `held`."""
    sums = _totals(held)
    if count == ROWS:
        store_f32(y, sums)
    else:
        for row in range(count):
            put_float(y + 4 * row, lane(sums, row))
