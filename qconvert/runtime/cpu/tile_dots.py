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

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES, call_llvm, multiply_add, spread, transposed_lanes
from qconvert.runtime.cpu.coded_dots import pair_sums, small_pair_sums
from qconvert.runtime.cpu.simd import (
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    PART,
    SHORTS,
    after,
    constant,
    instructions,
    read,
    rounded_to_bf16,
    times,
    write,
)

PANEL = 64
"""Rows of a weight that a panel holds."""
_WORD = 4
_VECTOR = _WORD * LANES
_LINE = _WORD * PANEL
"""Bytes of the words of all rows at the same columns."""
_QUADS = ir.VectorType(I8, 2 * PART)
_WIDE = processor.has("avx512bw")
# Vectors of outputs and rows of input that sums are held for: 24 of the 32 registers for bfloat16; half for
# integers, whose sums so far are held in float32 too. Processors with 16 narrower ones hold less.
FLOAT_ROWS, _FLOAT_VECTORS = 6, 4
BYTE_ROWS, BYTE_VECTORS = (3, 4) if _WIDE else (2, 1)


def _rows(builder: Any, address: Any, stride: Any, count: int) -> list[Any]:
    return [builder.add(address, builder.mul(stride, ir.Constant(I64, row))) for row in range(count)]


def _held(builder: Any, starts: list[Any], rows: int) -> list[list[Any]]:
    """Registers for the sums of rows of input, which start from these numbers."""
    held = [[cgutils.alloca_once_value(builder, start) for start in starts] for _ in range(rows)]  # type: ignore[no-untyped-call]
    for registers in held:
        for start, register in zip(starts, registers, strict=True):
            builder.store(start, register)  # here, and not where the function begins
    return held


def quad_sums(builder: Any, sums: Any, bytes_: Any, codes: Any, *, small: bool = False) -> Any:
    """Sums and the products of four unsigned bytes by four signed ones, in each of sixteen words.

    With `small`, unsigned bytes are below 128, so that two products fit 16 bits.
    """
    if processor.has("avx512vnni"):
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, sums, bytes_, codes)
    if small and processor.has("avx2"):
        pairs = small_pair_sums(builder, *(builder.bitcast(x, _QUADS) for x in (bytes_, codes)))
        return builder.add(sums, pair_sums(builder, pairs, constant(1, SHORTS)))
    eight = constant(8, SHORTS)
    x, w = builder.bitcast(bytes_, SHORTS), builder.bitcast(codes, SHORTS)
    even = pair_sums(
        builder, builder.and_(x, constant(255, SHORTS)), builder.ashr(builder.shl(w, eight), eight)
    )
    odd = pair_sums(builder, builder.lshr(x, eight), builder.ashr(w, eight))
    return builder.add(sums, builder.add(even, odd))


@instructions(types.void, *[types.intp] * 8)
def float_tile(
    builder: Any, panel: Any, words: Any, groups: Any, scales: Any, x: Any, x_step: Any, y: Any, y_step: Any
) -> Any:
    """`FLOAT_ROWS` rows of bfloat16 input by a panel: products are exact, outputs and sums float32.

    A row has `groups` of `words` of two numbers each; sums of a group are multiplied by its line of 64
    float32 `scales`. Only for processors that multiply bfloat16.
    """
    zero = ir.Constant(FLOATS, None)
    held = _held(builder, [zero] * _FLOAT_VECTORS, FLOAT_ROWS)
    places = range(0, _VECTOR * _FLOAT_VECTORS, _VECTOR)
    with cgutils.for_range(builder, groups) as group:
        skipped = builder.mul(group.index, words)
        lines = builder.add(panel, times(builder, skipped, _LINE))
        xs = _rows(builder, builder.add(x, times(builder, skipped, _WORD)), x_step, FLOAT_ROWS)
        sums = _held(builder, [zero] * _FLOAT_VECTORS, FLOAT_ROWS)
        with cgutils.for_range(builder, words) as loop:
            line = builder.add(lines, times(builder, loop.index, _LINE))
            pairs = [read(builder, after(builder, line, at), INTS) for at in places]
            for row, registers in zip(xs, sums, strict=True):
                word = read(builder, builder.add(row, times(builder, loop.index, _WORD)), I32)
                number = spread(builder, word, INTS)
                for pair, register in zip(pairs, registers, strict=True):
                    _store_products(builder, register, number, pair)
        here = builder.add(scales, times(builder, group.index, _LINE))
        of_w = [read(builder, after(builder, here, at), FLOATS) for at in places]
        for registers, totals in zip(sums, held, strict=True):
            for scale, register, total in zip(of_w, registers, totals, strict=True):
                more = multiply_add(builder, builder.load(register), scale, builder.load(total))
                builder.store(more, total)
    for start, registers in zip(_rows(builder, y, y_step, FLOAT_ROWS), held, strict=True):
        for at, register in zip(places, registers, strict=True):
            write(builder, after(builder, start, at), builder.load(register))


def _store_products(builder: Any, register: Any, number: Any, pair: Any) -> None:
    """Add two products of bfloat16 numbers in each lane to a register."""
    sums = builder.load(register)
    sums = call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, number, pair)
    builder.store(sums, register)


def _byte_tile(columns: int, corrected: bool) -> Any:
    """Makes the tile of weights whose scales hold for `columns` columns, with mins or without."""
    lines = columns // _WORD

    @instructions(types.void, *[types.intp] * 14)
    def byte_tile(
        builder: Any, panel: Any, starts: Any, scales: Any, mins: Any, bias: Any, x: Any, x_step: Any,
        steps: Any, sums: Any, step_step: Any, groups: Any, y: Any, y_step: Any, narrow: Any,
    ) -> Any:  # fmt: skip
        places = range(0, _VECTOR * BYTE_VECTORS, _VECTOR)
        held = _held(builder, [read(builder, after(builder, bias, at), FLOATS) for at in places], BYTE_ROWS)
        xs, of_x = _rows(builder, x, x_step, BYTE_ROWS), _rows(builder, steps, step_step, BYTE_ROWS)
        of_sums = _rows(builder, sums, step_step, BYTE_ROWS)
        with cgutils.for_range(builder, groups) as loop:
            line = builder.add(panel, times(builder, loop.index, _LINE * lines))
            here, column = times(builder, loop.index, _LINE), times(builder, loop.index, columns)
            number = times(builder, loop.index, _WORD)
            first = [read(builder, after(builder, builder.add(starts, here), at), INTS) for at in places]
            whole = [list(first) for _ in xs]
            for k in range(lines):
                codes = [read(builder, after(builder, line, _LINE * k + at), INTS) for at in places]
                for r, row in enumerate(xs):
                    word = read(builder, after(builder, builder.add(row, column), _WORD * k), I32)
                    bytes_ = spread(builder, word, INTS)
                    whole[r] = [
                        quad_sums(builder, s, bytes_, c) for s, c in zip(whole[r], codes, strict=True)
                    ]
            of_w = [read(builder, after(builder, builder.add(scales, here), at), FLOATS) for at in places]
            for r, registers in enumerate(held):
                step = _float_everywhere(builder, builder.add(of_x[r], number))
                for value, scale, register in zip(whole[r], of_w, registers, strict=True):
                    product = builder.fmul(builder.sitofp(value, FLOATS), step)
                    builder.store(multiply_add(builder, product, scale, builder.load(register)), register)
            if corrected:
                of_m = [read(builder, after(builder, builder.add(mins, here), at), FLOATS) for at in places]
                for r, registers in enumerate(held):
                    sum_ = _float_everywhere(builder, builder.add(of_sums[r], number))
                    for least, register in zip(of_m, registers, strict=True):
                        builder.store(multiply_add(builder, sum_, least, builder.load(register)), register)
        _put(builder, _rows(builder, y, y_step, BYTE_ROWS), held, narrow)

    return byte_tile


def _float_everywhere(builder: Any, address: Any) -> Any:
    return spread(builder, read(builder, address, ir.FloatType()), FLOATS)


def _put(builder: Any, starts: list[Any], held: list[list[Any]], narrow: Any) -> None:
    """Write outputs as float32, or rounded to bfloat16."""
    is_narrow = builder.icmp_unsigned("!=", narrow, ir.Constant(narrow.type, 0))
    with builder.if_else(is_narrow) as (to_bf16, to_float):
        with to_bf16:
            for start, registers in zip(starts, held, strict=True):
                for v, register in enumerate(registers):
                    halves = rounded_to_bf16(builder, builder.load(register))
                    write(builder, after(builder, start, _VECTOR // 2 * v), halves)
        with to_float:
            for start, registers in zip(starts, held, strict=True):
                for v, register in enumerate(registers):
                    write(builder, after(builder, start, _VECTOR * v), builder.load(register))


byte_tile_32 = _byte_tile(PART, corrected=False)
byte_tile_16 = _byte_tile(LANES, corrected=False)
byte_tile_32_with_mins = _byte_tile(PART, corrected=True)
byte_tile_16_with_mins = _byte_tile(LANES, corrected=True)
"""`BYTE_ROWS` rows of input by `16 BYTE_VECTORS` rows of a panel: their exact integer sums over each group
of columns, times both scales and added in float32 to the bias.

Of the input, bytes are codes plus 128, `steps` their scales, a float32 for each group of columns; `sums`
the sums of a group. Of the panel, `starts` are -128 times the sums of codes, int32; `scales` and `mins`
float32: lines of 64 numbers, one for each group. Outputs are bfloat16 if `narrow`, else float32.
"""


@instructions(types.void, *[types.intp] * 3)
def sums_to_take(builder: Any, panel: Any, lines: Any, out: Any) -> Any:
    """Write `starts` of a group of `lines` words: -128 times the sums of its codes, for each row."""
    signs = constant(-0x7F7F7F80, INTS)  # four bytes of 128
    for at in range(0, _LINE, _VECTOR):
        register = cgutils.alloca_once_value(builder, constant(0))  # type: ignore[no-untyped-call]
        builder.store(constant(0), register)
        with cgutils.for_range(builder, lines) as loop:
            line = builder.add(panel, times(builder, loop.index, _LINE))
            codes = read(builder, after(builder, line, at), INTS)
            builder.store(quad_sums(builder, builder.load(register), signs, codes), register)
        write(builder, after(builder, out, at), builder.sub(constant(0), builder.load(register)))


@instructions(types.void, *[types.intp] * 3)
def lay_words(builder: Any, rows: Any, row_step: Any, out: Any) -> Any:
    """Write sixteen words of each of sixteen rows into a panel, the rows side by side."""
    read_rows = [read(builder, row, FLOATS) for row in _rows(builder, rows, row_step, LANES)]
    for k, line in enumerate(transposed_lanes(builder, read_rows)):
        write(builder, after(builder, out, _LINE * k), line)
