"""Multiplies rows of a weight by one vector rounded to 8 bits: decoding's arithmetic where it is to be fast.

Inputs are rounded as `core.activations.INT8_GROUPS` says, like those of `byte_products.py`: codes are
multiplied four at a time, their sums over what shares a scale are exact, and scales, zeros and mins are
applied in float32. A run is the 32 columns (16 where the weight has smaller groups) whose products are
summed before they are scaled; every kernel knows the type and the group of its weight's numbers, which
so stay in registers from the weight to the sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import (
    LANES,
    clamp,
    lanes_type,
    multiply_add,
    peak,
    rounded_even,
    splat,
    spread,
)
from qconvert.runtime.cpu.byte_tiles import quad_sums
from qconvert.runtime.cpu.coded_dots import BYTE_OF
from qconvert.runtime.cpu.dots import named
from qconvert.runtime.cpu.kernel_args import BF16, F16, F32, I8
from qconvert.runtime.cpu.row_totals import ROWS, put_totals
from qconvert.runtime.cpu.simd import (
    BLOCK,
    BYTES,
    FLOATS,
    I64,
    INTS,
    LINE,
    PART,
    SHORTS,
    address,
    after,
    ask_ahead,
    constant,
    floats,
    instructions,
    larger,
    line_in,
    picked,
    read,
    routine,
    store_f32,
    times,
    total,
    write,
)
from qconvert.runtime.cpu.simd import I8 as BYTE
from qconvert.runtime.cpu.simd import I16 as SHORT
from qconvert.runtime.cpu.simd import I32 as WORD

_HALF_RANGE = np.float32(127.5)
_F = np.float32
_FLOAT = ir.FloatType()
_GROUPS = (LANES, PART, 2 * PART, BLOCK)
_NUMBERS = {F32: "f32", BF16: "bf16", F16: "f16", I8: "i8"}
_COLUMN_OF = [BYTE_OF.index(byte) for byte in range(PART)]
_BLOCK_BYTES = {"int4": BLOCK // 2, "int6": BLOCK * 3 // 4, "int8": BLOCK}
_SUPER = 256
"""Columns whose groups share the float32 that their int8 numbers are multiplied by."""


def byte_kernel(linear: np.void, kind: str) -> str | None:
    """The kernel that multiplies codes of a kind by inputs of 8 bits, as a record of LINEAR has them; None
    for none: groups of other sizes.
    """
    group, number = int(linear["group"]), int(linear["number_type"])
    group = BLOCK if group % BLOCK == 0 or group >= linear["width"] else group
    if kind not in _BLOCK_BYTES or group not in _GROUPS:
        return None
    if number == F16 and not (processor.has("f16c") or processor.is_arm()):
        return None
    if number == I8 and (group == BLOCK or linear["shared"] * group != _SUPER):
        return None
    zeros = (
        "mins" if linear["mins"] else "zeros" if linear["zeros"] else "zero" if linear["zero"] else "middle"
    )
    return f"{kind}_bytes_{_NUMBERS[number]}_{group}_{zeros}"


def _few(count: int) -> Any:
    return ir.VectorType(_FLOAT, count)


def _numbers(builder: Any, number: int, stored: Any, supers: Any, i: Any, count: int, group: int) -> Any:
    """Numbers [i, i + count) of groups as float32."""
    if number == F32:
        return read(builder, after(builder, stored, times(builder, i, 4)), _few(count))
    if number == I8:
        small = read(builder, after(builder, stored, i), ir.VectorType(BYTE, count))
        run = builder.lshr(i, ir.Constant(I64, (_SUPER // group).bit_length() - 1))
        factor = read(builder, after(builder, supers, times(builder, run, 4)), _FLOAT)
        return builder.fmul(builder.sitofp(small, _few(count)), spread(builder, factor, _few(count)))
    halves = read(builder, after(builder, stored, times(builder, i, 2)), ir.VectorType(SHORT, count))
    if number == F16:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), count)), _few(count))
    wide = ir.VectorType(WORD, count)
    return builder.bitcast(builder.shl(builder.zext(halves, wide), constant(16, wide)), _few(count))


def _half_codes(builder: Any, kind: str, codes: Any, half: int) -> Any:
    """Half of the codes of a block, 64 bytes as int16: the low nibbles or the high ones, or int8 plus 128."""
    if kind == "int8":
        signed = read(builder, after(builder, codes, 2 * PART * half), SHORTS)
        return builder.xor(signed, constant(-0x7F80, SHORTS))
    stored = read(builder, codes, SHORTS)
    stored = builder.lshr(stored, constant(4, SHORTS)) if half else stored
    nibbles = builder.and_(stored, constant(0x0F0F, SHORTS))
    if kind == "int4":
        return nibbles
    pairs = read(builder, after(builder, codes, 2 * PART), ir.VectorType(SHORT, PART // 2))
    first = 2 * half
    shifts = ir.Constant(SHORTS, [first] * (PART // 2) + [first + 4] * (PART // 2))
    pairs = builder.lshr(picked(builder, pairs, list(range(PART // 2)) * 2), shifts)
    upper = builder.shl(builder.and_(pairs, constant(0x0303, SHORTS)), constant(4, SHORTS))
    return builder.or_(nibbles, upper)


def _registers(builder: Any, *starts: Any) -> list[Any]:
    """Registers that start from these numbers."""
    registers = [cgutils.alloca_once_value(builder, start) for start in starts]  # type: ignore[no-untyped-call]
    for start, register in zip(starts, registers, strict=True):
        builder.store(start, register)  # here, and not where the function begins
    return registers


def _count_blocks(builder: Any, each: Any, left: Any, group: Any) -> None:
    """Go on to the next group after `each` blocks."""
    rest = builder.sub(builder.load(left), ir.Constant(I64, 1))
    ends = builder.icmp_signed("==", rest, ir.Constant(I64, 0))
    builder.store(builder.select(ends, each, rest), left)
    builder.store(builder.add(builder.load(group), builder.zext(ends, I64)), group)


def _run_of_lanes(runs: int, signed: bool) -> list[list[int]]:
    """The run whose products the lanes have that the two halves of a block's codes are multiplied in."""
    parts = ((0, 1), (2, 3)) if signed else ((0, 2), (1, 3))
    if runs == BLOCK // PART:
        return [[part for part in pair for _ in range(LANES // 2)] for pair in parts]
    halves = (0, 0, 0, 0, 1, 1, 1, 1) if signed else (0, 0, 1, 1) * 2
    return [[2 * part + half for part in pair for half in halves] for pair in parts]


def _row(kind: str, number: int, group: int, zeros: str) -> Any:
    """Makes the product of one row: sixteen numbers whose sum it is."""
    signed, count = kind == "int8", BLOCK // group
    runs = BLOCK // (LANES if group == LANES else PART)
    places = _run_of_lanes(runs, signed)

    def of_runs(builder: Any, numbers: Any) -> Any:
        return picked(builder, numbers, [run * count // runs for run in range(runs)])

    @instructions(lanes_type, *[types.intp] * 12, types.float32)
    def row(
        builder: Any, w: Any, scales: Any, supers: Any, mins: Any, super_mins: Any, zeros_at: Any, first: Any,
        x: Any, steps: Any, sums: Any, blocks: Any, each: Any, zero: Any,
    ) -> Any:  # fmt: skip
        none, nothing = ir.Constant(FLOATS, None), ir.Constant(_few(runs), None)
        held, (away, least) = _registers(builder, none, none), _registers(builder, nothing, nothing)
        left, group_at = _registers(builder, each, ir.Constant(I64, 0))
        with cgutils.for_range(builder, blocks) as loop:
            block = loop.index
            i = builder.add(first, times(builder, block, count) if count > 1 else builder.load(group_at))
            if count == 1:
                _count_blocks(builder, each, left, group_at)
            scale = of_runs(builder, _numbers(builder, number, scales, supers, i, count, group))
            sum_ = read(builder, after(builder, sums, times(builder, block, 4 * runs)), _few(runs))
            if zeros == "mins":
                own = of_runs(builder, _numbers(builder, number, mins, super_mins, i, count, group))
                builder.store(multiply_add(builder, own, sum_, builder.load(least)), least)
            if zeros == "zeros":
                small = read(builder, after(builder, zeros_at, i), ir.VectorType(BYTE, count))
                sum_ = builder.fmul(sum_, of_runs(builder, builder.sitofp(small, _few(count))))
            if zeros != "middle":
                builder.store(multiply_add(builder, scale, sum_, builder.load(away)), away)
            steps_at = after(builder, steps, times(builder, block, 4 * runs))
            scale = builder.fmul(scale, read(builder, steps_at, _few(runs)))
            codes = after(builder, w, times(builder, block, _BLOCK_BYTES[kind]))
            ask_ahead(builder, codes, _BLOCK_BYTES[kind])
            xs = after(builder, x, times(builder, block, BLOCK * (2 if signed else 1)))
            for half, register in enumerate(held):
                x_half = after(builder, xs, 2 * PART * half)
                start = constant(0)
                if signed:
                    start = read(builder, after(builder, xs, BLOCK + 4 * LANES * half), INTS)
                words = builder.bitcast(_half_codes(builder, kind, codes, half), INTS)
                dot = builder.sitofp(
                    quad_sums(builder, start, words, read(builder, x_half, INTS), small=not signed), FLOATS
                )
                wide = picked(builder, scale, places[half])
                builder.store(multiply_add(builder, dot, wide, builder.load(register)), register)
        made = builder.fadd(*(builder.load(register) for register in held))
        gone = builder.fmul(builder.load(away), spread(builder, zero, _few(runs)))
        gone = builder.fsub(gone, builder.load(least))
        padded = ir.Constant(ir.VectorType(WORD, LANES), [*range(runs), *[runs] * (LANES - runs)])
        return builder.fsub(made, builder.shuffle_vector(gone, nothing, padded))

    return row


@instructions(types.void, types.intp, lanes_type, lanes_type)
def _put_woven(builder: Any, out: Any, low: Any, high: Any) -> Any:
    """Write whole numbers of 32 columns as int8, as nibbles lie; what is no number becomes anything."""
    write(builder, out, builder.bitcast(_bytes_of(builder, low, high, _COLUMN_OF), BYTES))


@instructions(types.void, types.intp, lanes_type, lanes_type)
def _put_straight(builder: Any, out: Any, low: Any, high: Any) -> Any:
    """The same in the order of columns."""
    write(builder, out, builder.bitcast(_bytes_of(builder, low, high, list(range(PART))), BYTES))


def _bytes_of(builder: Any, low: Any, high: Any, order: list[int]) -> Any:
    eight = ir.VectorType(BYTE, LANES)
    halves = [builder.trunc(builder.fptosi(x, INTS), eight) for x in (low, high)]
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(WORD, PART), order))


@instructions(types.void, types.intp)
def _put_starts(builder: Any, x: Any) -> Any:
    """Write, behind the codes of a block, what compensates 128 added to what they are multiplied by."""
    added = builder.bitcast(constant(-0x7F80, SHORTS), INTS)
    for half in range(2):
        codes = read(builder, after(builder, x, 2 * PART * half), INTS)
        sums = quad_sums(builder, constant(0), added, codes)
        write(builder, after(builder, x, BLOCK + 4 * LANES * half), builder.neg(sums))


@routine
def _rounded(linear, x, columns, signed):  # type: ignore[no-untyped-def]
    """A vector in 8 bits: its codes as a row's are met, and of each run its step and its sum."""
    blocks = (linear.width + BLOCK - 1) // BLOCK
    size = BLOCK * (2 if signed else 1)
    codes = np.zeros(blocks * size + LINE, np.int8)
    numbers = np.zeros((2, blocks * (BLOCK // columns)), np.float32)
    factor = linear.factor * linear.unit / linear.divisor
    for i in range(0, linear.width, PART):
        low, high = floats(x + 4 * i), floats(x + 4 * (i + LANES))
        step = peak(larger(low, high)) / _HALF_RANGE
        unit = splat(step) if step != _F(0) else splat(_F(1))
        low = rounded_even(clamp(low / unit, _F(-128), _F(127)))
        high = rounded_even(clamp(high / unit, _F(-128), _F(127)))
        part, out = i % BLOCK // PART, line_in(codes) + i // BLOCK * size
        if signed:
            _put_straight(out + PART * part, low, high)
        else:
            _put_woven(out + PART * (part // 2 + 2 * (part % 2)), low, high)
        step *= factor
        if columns == PART:
            numbers[0, i // PART], numbers[1, i // PART] = step, step * total(low + high)
        else:
            run = i // LANES
            numbers[0, run], numbers[0, run + 1] = step, step
            numbers[1, run], numbers[1, run + 1] = step * total(low), step * total(high)
    if signed:
        for block in range(blocks):
            _put_starts(line_in(codes) + block * size)
    return codes, numbers


def _rows(kind: str, number: int, group: int, zeros: str) -> Any:
    """Rows of one kind of weight."""
    row, block_bytes, signed = _row(kind, number, group, zeros), _BLOCK_BYTES[kind], kind == "int8"
    columns, own_zeros = LANES if group == LANES else PART, zeros == "zeros"

    def rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
        codes, numbers = _rounded(linear, x, columns, signed)
        runs, groups = numbers.shape[1], (linear.width + linear.group - 1) // linear.group
        blocks = (linear.width + BLOCK - 1) // BLOCK
        each = linear.group // BLOCK if groups > 1 else blocks
        zero = _F(1) if own_zeros else _F(linear.zero)
        held = np.empty(LANES * ROWS, np.float32)
        for first in range(start, stop, ROWS):
            count = min(ROWS, stop - first)
            for r in range(count):
                w = linear.codes + (first + r) * blocks * block_bytes
                made = row(
                    w, linear.scales, linear.supers, linear.mins, linear.super_mins, linear.zeros,
                    (first + r) * groups, line_in(codes), address(numbers), address(numbers) + 4 * runs,
                    blocks, each, zero,
                )  # fmt: skip
                store_f32(address(held) + 4 * LANES * r, made)
            put_totals(address(held), count, y + 4 * first)

    return rows


@lru_cache
def byte_routine(name: str) -> Any:
    """The routine of a name that `byte_kernel` gives."""
    kind, _, number, group, zeros = name.split("_")
    numbers = {label: number for number, label in _NUMBERS.items()}
    return named(_rows(kind, numbers[number], int(group), zeros), name)
