"""Multiplies a tile: some rows of input by 64 rows of a weight, their sums held in registers.

The 64 rows lie as a panel: words of 32 bits, two bfloat16 or four int8 numbers of a row each, those of the
same columns of all rows side by side. So a word of an input row, copied to all lanes, meets sixteen rows of
the weight in one instruction, and outputs come out in the order in which they are stored.
Arguments are byte addresses and sizes in bytes, but for counts.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from qconvert.quant.simd.lanes import LANES, call_llvm, multiply_add, spread, transposed_lanes
from qconvert.runtime.cpu.simd import (
    FLOATS,
    I32,
    I64,
    INTS,
    after,
    instructions,
    read,
    times,
    write,
)

PANEL = 64
"""Rows of a weight that a panel holds."""
WORD = 4
VECTOR = WORD * LANES
LINE = WORD * PANEL
"""Bytes of the words of all rows at the same columns."""
# Rows of input and vectors of outputs that sums are held for, in 24 of the 32 registers.
FLOAT_ROWS, _FLOAT_VECTORS = 6, 4


def row_addresses(builder: Any, address: Any, stride: Any, count: int) -> list[Any]:
    """Where rows begin."""
    return [builder.add(address, builder.mul(stride, ir.Constant(I64, row))) for row in range(count)]


def held_from(builder: Any, starts: list[Any], rows: int) -> list[list[Any]]:
    """Registers for the sums of rows of input, which start from these numbers."""
    held = [[cgutils.alloca_once_value(builder, start) for start in starts] for _ in range(rows)]  # type: ignore[no-untyped-call]
    for registers in held:
        for start, register in zip(starts, registers, strict=True):
            builder.store(start, register)  # here, and not where the function begins
    return held


@instructions(types.void, *[types.intp] * 8)
def float_tile(
    builder: Any, panel: Any, words: Any, groups: Any, scales: Any, x: Any, x_step: Any, y: Any, y_step: Any
) -> Any:
    """`FLOAT_ROWS` rows of bfloat16 input by a panel: products are exact, outputs and sums float32.

    A row has `groups` of `words` of two numbers each; sums of a group are multiplied by its line of 64
    float32 `scales`. Only for processors that multiply bfloat16.
    """
    zero = ir.Constant(FLOATS, None)
    held = held_from(builder, [zero] * _FLOAT_VECTORS, FLOAT_ROWS)
    places = range(0, VECTOR * _FLOAT_VECTORS, VECTOR)
    with cgutils.for_range(builder, groups) as group:
        skipped = builder.mul(group.index, words)
        lines = builder.add(panel, times(builder, skipped, LINE))
        xs = row_addresses(builder, builder.add(x, times(builder, skipped, WORD)), x_step, FLOAT_ROWS)
        sums = held_from(builder, [zero] * _FLOAT_VECTORS, FLOAT_ROWS)
        with cgutils.for_range(builder, words) as loop:
            line = builder.add(lines, times(builder, loop.index, LINE))
            pairs = [read(builder, after(builder, line, at), INTS) for at in places]
            for row, registers in zip(xs, sums, strict=True):
                word = read(builder, builder.add(row, times(builder, loop.index, WORD)), I32)
                number = spread(builder, word, INTS)
                for pair, register in zip(pairs, registers, strict=True):
                    _store_products(builder, register, number, pair)
        here = builder.add(scales, times(builder, group.index, LINE))
        of_w = [read(builder, after(builder, here, at), FLOATS) for at in places]
        for registers, totals in zip(sums, held, strict=True):
            for scale, register, total in zip(of_w, registers, totals, strict=True):
                more = multiply_add(builder, builder.load(register), scale, builder.load(total))
                builder.store(more, total)
    for start, registers in zip(row_addresses(builder, y, y_step, FLOAT_ROWS), held, strict=True):
        for at, register in zip(places, registers, strict=True):
            write(builder, after(builder, start, at), builder.load(register))


def _store_products(builder: Any, register: Any, number: Any, pair: Any) -> None:
    """Add two products of bfloat16 numbers in each lane to a register."""
    sums = builder.load(register)
    sums = call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, number, pair)
    builder.store(sums, register)


@instructions(types.void, *[types.intp] * 3)
def lay_words(builder: Any, rows: Any, row_step: Any, out: Any) -> Any:
    """Write sixteen words of each of sixteen rows into a panel, the rows side by side."""
    read_rows = [read(builder, row, FLOATS) for row in row_addresses(builder, rows, row_step, LANES)]
    for k, line in enumerate(transposed_lanes(builder, read_rows)):
        write(builder, after(builder, out, LINE * k), line)
