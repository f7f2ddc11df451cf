"""Multiplies rows of a weight by one vector rounded to 8 bits: decoding's arithmetic where it is to be fast.

Inputs are rounded as `core.activations.INT8_GROUPS` says, like those of `byte_products.py`: codes of 4 and 6
bits are multiplied four at a time, their sums over what shares a scale are exact, and scales, zeros and mins
are applied in float32, as in `dots.py`. Half as many instructions as with inputs of 16 bits.
A part of 32 columns of the input lies in the order of a weight's bytes (`coded_dots.py`), the parts of a
block as their low and high halves are read: 0 and 2, then 1 and 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from qconvert.quant.simd.lanes import LANES, clamp, lanes_type, peak, rounded_even, splat
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.coded_dots import BYTE_OF
from qconvert.runtime.cpu.dots import named, rounded_up, sizes
from qconvert.runtime.cpu.group_scales import spread
from qconvert.runtime.cpu.simd import (
    BLOCK,
    BYTES,
    I16,
    I64,
    INTS,
    PART,
    SHORTS,
    address,
    as_floats,
    constant,
    floats,
    instructions,
    larger,
    picked,
    put_float,
    read,
    routine,
    total,
    words_type,
    write,
)
from qconvert.runtime.cpu.tile_dots import quad_sums

_HALF_RANGE = np.float32(127.5)
_F = np.float32
_COLUMN_OF = [BYTE_OF.index(byte) for byte in range(PART)]


def _nibbles(builder: Any, codes: Any, high: bool) -> Any:
    """Half of the nibbles of a block, 64 bytes as int16."""
    stored = read(builder, codes, SHORTS)
    stored = builder.lshr(stored, constant(4, SHORTS)) if high else stored
    return builder.and_(stored, constant(0x0F0F, SHORTS))


def _with_pairs(builder: Any, codes: Any, high: bool) -> Any:
    """The same of codes of 6 bits."""
    half = read(builder, builder.add(codes, ir.Constant(I64, 2 * PART)), ir.VectorType(I16, PART // 2))
    first = 2 if high else 0
    shifts = ir.Constant(SHORTS, [first] * (PART // 2) + [first + 4] * (PART // 2))
    pairs = builder.lshr(picked(builder, half, list(range(PART // 2)) * 2), shifts)
    upper = builder.shl(builder.and_(pairs, constant(0x0303, SHORTS)), constant(4, SHORTS))
    return builder.or_(_nibbles(builder, codes, high), upper)


def _dot(take: Any, high: bool) -> Any:
    @instructions(words_type, types.intp, types.intp)
    def dot(builder: Any, codes: Any, x: Any) -> Any:
        bytes_ = builder.bitcast(take(builder, codes, high), INTS)
        return quad_sums(builder, constant(0), bytes_, read(builder, x, INTS))

    return dot


def _chosen(places: list[int]) -> Any:
    @instructions(lanes_type, lanes_type)
    def chosen(builder: Any, scales: Any) -> Any:
        return picked(builder, scales, places)

    return chosen


_PAIR = LANES // 2
_BY_PARTS = tuple(_chosen([p] * _PAIR + [p + 2] * _PAIR) for p in (0, 1))
_BY_HALVES = tuple(
    _chosen([2 * part + half for part in (p, p + 2) for half in (0, 0, 1, 1) * 2]) for p in (0, 1)
)


@instructions(types.void, types.intp, lanes_type, lanes_type)
def _put_part(builder: Any, out: Any, low: Any, high: Any) -> Any:
    """Write whole numbers of 32 columns as int8; what is no number becomes anything."""
    eight = ir.VectorType(ir.IntType(8), LANES)
    halves = [builder.trunc(builder.fptosi(x, INTS), eight) for x in (low, high)]
    order = ir.Constant(ir.VectorType(ir.IntType(32), PART), _COLUMN_OF)
    write(builder, out, builder.bitcast(builder.shuffle_vector(*halves, order), BYTES))


@routine
def _rounded(linear, x, columns):  # type: ignore[no-untyped-def]
    """A vector in 8 bits: codes, the step of each run of `columns` columns, the sum of each group."""
    blocks, groups, each = sizes(linear, columns)
    codes = np.zeros(blocks * BLOCK, np.int8)
    steps = np.zeros(rounded_up(groups) * each + blocks * (BLOCK // columns) + LANES, np.float32)
    sums = np.zeros(rounded_up(groups), np.float32)
    for i in range(0, linear.width, PART):
        low, high = floats(x + 4 * i), floats(x + 4 * (i + LANES))
        step = peak(larger(low, high)) / _HALF_RANGE
        unit = splat(step) if step != _F(0) else splat(_F(1))
        low = rounded_even(clamp(low / unit, _F(-128), _F(127)))
        high = rounded_even(clamp(high / unit, _F(-128), _F(127)))
        part = i % BLOCK // PART
        _put_part(address(codes) + i // BLOCK * BLOCK + PART * (part // 2 + 2 * (part % 2)), low, high)
        for run in range(i // columns, (i + PART) // columns):
            steps[run] = step
        sums[i // linear.group] += step * total(low)
        sums[(i + LANES) // linear.group] += step * total(high)
    return codes, steps, sums


def _by_bytes(name: str, take: Any, block_bytes: int, chosen: Any, columns: int) -> Any:
    """Rows of codes whose scales hold for any multiple of `columns` columns."""
    dot_low, dot_high = _dot(take, False), _dot(take, True)
    chosen_low, chosen_high = chosen

    def rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
        blocks, groups, each = sizes(linear, columns)
        codes, steps, sums = _rounded(linear, x, columns)
        scales, bytes_ = np.zeros(len(steps), np.float32), address(codes)
        for row in range(start, stop):
            away = spread(linear, row, groups, each, address(steps), address(sums), address(scales))
            w, at, scale = linear.codes + row * blocks * block_bytes, bytes_, address(scales)
            a = splat(_F(0))
            b = a
            for _ in range(blocks):
                four = floats(scale)
                a = fused(as_floats(dot_low(w, at)), chosen_low(four), a)
                b = fused(as_floats(dot_high(w, at + 2 * PART)), chosen_high(four), b)
                w += block_bytes
                at += BLOCK
                scale += 4 * (BLOCK // columns)
            put_float(y + 4 * row, total(a + b) - away)

    return named(rows, name)


BYTE_ROUTINES = {
    f"{kind}_bytes_by_{by}": _by_bytes(f"{kind}_bytes_by_{by}", take, block_bytes, chosen, columns)
    for kind, take, block_bytes in (("int4", _nibbles, BLOCK // 2), ("int6", _with_pairs, BLOCK * 3 // 4))
    for by, chosen, columns in (("parts", _BY_PARTS, PART), ("half_parts", _BY_HALVES, LANES))
}
"""How rows of each kind of weight are multiplied, by the names under which the machine code is cached."""
