"""Multiplies matrices with rows as lanes: a sum is one chain of fused multiply-adds, whatever the blocks.

Sums of a row are its own lane, and run over k upwards from what they were. So how rows and columns are cut
into blocks for the caches changes no bit, and every processor gets the same ones. Matrices with rows as lanes
are flat float32 arrays [columns, tile] of a tile of rows, a whole number of `ROWS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from qconvert.quant.simd.lanes import LANES, lanes_type, multiply_add, primitive, routine, spread

COLUMNS = 8
"""Columns of a product that are computed at once."""
_VECTORS = 2
ROWS = _VECTORS * LANES
"""Rows of a product that are computed at once: with `COLUMNS`, sixteen sums in registers of 512 bits."""
PANEL = 256
"""Terms of a sum for which the rows' numbers stay in the first-level cache."""

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_ZERO = np.float32(0)


@primitive
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns `a * b + c`, rounded once."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return multiply_add(builder, *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), emit


def _lanes_at(builder: Any, data: Any, index: Any, vector: int) -> Any:
    place = builder.add(index, ir.Constant(index.type, vector * LANES))
    return builder.bitcast(builder.gep(data, [place]), _FLOATS.as_pointer())


def _register(builder: Any, value: Any) -> Any:
    return cgutils.alloca_once_value(builder, value)  # type: ignore[no-untyped-call]


@primitive
def _accumulate(
    typing: Any, sums: Any, at: Any, tile: Any, x: Any, x_at: Any, m: Any, starts: Any, step: Any, count: Any
) -> Any:
    """Adds x @ m to `ROWS` rows of `COLUMNS` columns of sums.

    `sums[at + tile * c + r] += x[x_at + tile * k + r] * m[starts[c] + step * k]` for k below `count`.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, at, tile, _, x_at, _, _, step, count = args
        sums, x, m, starts = (
            context.make_array(sig.args[i])(context, builder, args[i]).data for i in (0, 3, 5, 6)
        )
        held, columns = [], []
        for c in range(COLUMNS):
            nth = ir.Constant(at.type, c)
            first = builder.add(at, builder.mul(tile, nth))
            places = [_lanes_at(builder, sums, first, v) for v in range(_VECTORS)]
            held.append((places, [_register(builder, builder.load(place, align=4)) for place in places]))
            columns.append(builder.gep(m, [builder.load(builder.gep(starts, [nth]))]))
        with cgutils.for_range(builder, count) as loop:
            row, k = builder.add(x_at, builder.mul(loop.index, tile)), builder.mul(loop.index, step)
            numbers = [builder.load(_lanes_at(builder, x, row, v), align=4) for v in range(_VECTORS)]
            for column, (_, registers) in zip(columns, held, strict=True):
                factor = spread(builder, builder.load(builder.gep(column, [k])), _FLOATS)
                for number, register in zip(numbers, registers, strict=True):
                    builder.store(multiply_add(builder, number, factor, builder.load(register)), register)
        for places, registers in held:
            for place, register in zip(places, registers, strict=True):
                builder.store(builder.load(register), place, align=4)
        return context.get_dummy_value()

    ints = types.intp
    return types.void(sums, ints, ints, x, ints, m, starts, ints, ints), emit


@routine
def add_product(
    sums: Any,
    at: Any,
    x: Any,
    x_at: Any,
    tile: Any,
    rows: Any,
    m: Any,
    starts: Any,
    step: Any,
    count: Any,
) -> None:
    """Adds x @ m to as many columns of sums as there are `starts`, `COLUMNS` at a time.

    `sums[at + tile * c + r] += x[x_at + tile * k + r] * m[starts[c] + step * k]` for k below `count`, in that
    order, and all r below `rows`, a multiple of `ROWS`. All but `starts` are flat float32 arrays.
    """
    for row in range(0, rows, ROWS):
        for c in range(0, starts.size, COLUMNS):
            _accumulate(
                sums, at + tile * c + row, tile, x, x_at + row, m, starts[c : c + COLUMNS], step, count
            )


@routine
def pack(matrix_KJ: Any, first: Any, count: Any, start: Any, stop: Any, packed: Any, starts: Any) -> None:
    """Copies rows [first, first + count) and columns [start, stop) for `add_product`; columns beyond are 0.

    `COLUMNS` columns lie together, so that the step is `COLUMNS`. Fills `starts` too.
    """
    for column in range(start, stop, COLUMNS):
        at, width = (column - start) * count, min(COLUMNS, stop - column)
        for k in range(count):
            if width == COLUMNS:
                for c in range(COLUMNS):
                    packed[at + COLUMNS * k + c] = matrix_KJ[first + k, column + c]
            else:
                for c in range(COLUMNS):
                    packed[at + COLUMNS * k + c] = matrix_KJ[first + k, column + c] if c < width else _ZERO
    packed_starts(count, starts)


@routine
def packed_starts(count: Any, starts: Any) -> None:
    """Fills where columns of `count` numbers start that are packed as `pack` does it."""
    for c in range(starts.size):
        starts[c] = c // COLUMNS * COLUMNS * count + c % COLUMNS


@routine
def rows_as_lanes(numbers_RC: Any, first: Any, tile: Any, out: Any) -> None:
    """Transposes rows: `out[c * tile + r] = numbers_RC[first + r, c]`, 0 for rows beyond the last one."""
    rows, columns = numbers_RC.shape
    for row in range(tile):
        for c in range(columns):
            out[c * tile + row] = numbers_RC[first + row, c] if first + row < rows else _ZERO
