"""Multiplies rows of a weight by one vector, at the speed of reading the weight once.

Weights on a grid are multiplied as integers: the vector is rounded to 16 bits per block of 128
columns, at most 2**-16 of the block's largest number off, a hundredth of what rounding it to
bfloat16 costs. Products are exact, their sums over what shares a scale too, up to a block; scales,
zeros and mins are applied in float32, as `scale * (sum of code * x - zero * sum of x) + min * sum of x`.
Numbers of a table are whole multiples of a unit (all but NF4's exactly, those within 2**-14 of the
largest). Dense weights and those of 8-bit floats are multiplied in float32.
All arguments named `x`, `y`, `w`, ... are byte addresses (see `simd.py`). `spread` of `group_scales.py` makes
one float32 of everything that 128, 32 or 16 columns are multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import LANES, peak, rounded_even, splat
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.coded_dots import (
    dot_bytes,
    dot_int6,
    dot_lut,
    dot_nibbles,
    e4m3_floats,
    e5m2_floats,
)
from qconvert.runtime.cpu.group_scales import spread
from qconvert.runtime.cpu.simd import (
    BLOCK,
    LINE,
    PART,
    added,
    address,
    as_floats,
    asks_ahead,
    by_itself,
    float_at,
    floats,
    folded,
    in_narrow_registers,
    kept_apart,
    larger,
    line_in,
    load_bf16,
    put_float,
    put_shorts,
    routine,
    total,
    two_floats,
)

_MOST = np.float32(32767)
_LEAST_PEAK = np.float32(1e-30)
"""Blocks of smaller numbers count as zero: their step would be no normal number."""
_ROWS = 64
"""Rows of one call: so many that calling, some nanoseconds, takes no time."""


@routine
def rounded_up(count):  # type: ignore[no-untyped-def]
    """Round up to a multiple of 16."""
    return (count + LANES - 1) // LANES * LANES


@routine
def sizes(linear, columns):  # type: ignore[no-untyped-def]
    """Blocks and groups of a row, and how many runs of `columns` columns a group has."""
    in_narrow_registers()
    blocks, groups = (linear.width + BLOCK - 1) // BLOCK, (linear.width + linear.group - 1) // linear.group
    return blocks, groups, linear.group // columns


@routine
def _fixed(linear, x, columns):  # type: ignore[no-untyped-def]
    """A vector in fixed point: int16 numbers, the step of each run, the sum of each group of columns.

    Runs are of `columns` columns; the arrays go on in zeros for as long as the kernels read. The numbers
    begin at the `line_in` their array.
    """
    blocks, groups, each = sizes(linear, columns)
    shorts, runs = np.zeros(blocks * BLOCK + LINE // 2, np.int16), BLOCK // columns
    steps = np.zeros(rounded_up(groups) * each + blocks * runs + LANES, np.float32)
    sums, g, left = np.zeros(rounded_up(groups), np.float32), 0, linear.group
    for block in range(blocks):
        first, last = block * BLOCK, min((block + 1) * BLOCK, linear.width)
        biggest = splat(np.float32(0))
        for i in range(first, last, LANES):
            biggest = larger(biggest, floats(x + 4 * i))
        top = peak(biggest)
        step, inverse = top / _MOST, splat(_MOST / top)
        if top < _LEAST_PEAK:
            step, inverse = np.float32(0), splat(np.float32(0))
        steps[block * runs : (block + 1) * runs] = step
        for i in range(first, last, LANES):
            whole = rounded_even(floats(x + 4 * i) * inverse)
            put_shorts(line_in(shorts) + 2 * i, whole)
            sums[g] += step * total(whole)
            left -= LANES
            if not left:
                g, left = g + 1, linear.group
    return shorts, steps, sums


def named(function: Callable[..., None], name: str) -> Any:
    """A routine of its own name. numba links code that it stored by qualified names and argument types
    alone, so two routines of one name could take each other's place.
    """
    function.__qualname__ = function.__name__ = name
    return routine(function)


@routine
def _add_block(dot, w, table, at, scale, a, b):  # type: ignore[no-untyped-def]
    """Add the products of a block whose scale holds for all of it to the sums a."""
    in_narrow_registers()
    low = by_itself(added(dot(w, 0, table, at), dot(w, 1, table, at + 64)))
    high = by_itself(added(dot(w, 2, table, at + 128), dot(w, 3, table, at + 192)))
    return fused(as_floats(added(low, high)), splat(float_at(scale)), a), b


@routine
def _add_parts(dot, w, table, at, scale, a, b):  # type: ignore[no-untyped-def]
    """The same where scales hold for 32 columns, what a `dot` takes; to the sums a and b."""
    in_narrow_registers()
    low = folded(dot(w, 0, table, at), dot(w, 1, table, at + 64))
    high = folded(dot(w, 2, table, at + 128), dot(w, 3, table, at + 192))
    a = fused(as_floats(low), two_floats(scale), a)
    return a, fused(as_floats(high), two_floats(scale + 8), b)


@routine
def _add_half_parts(dot, w, table, at, scale, a, b):  # type: ignore[no-untyped-def]
    """The same where scales hold for 16 columns, half of what a `dot` takes."""
    in_narrow_registers()
    a = fused(as_floats(dot(w, 0, table, at)), two_floats(scale), a)
    b = fused(as_floats(dot(w, 1, table, at + 64)), two_floats(scale + 8), b)
    a = fused(as_floats(dot(w, 2, table, at + 128)), two_floats(scale + 16), a)
    return a, fused(as_floats(dot(w, 3, table, at + 192)), two_floats(scale + 24), b)


def _by_codes(name: str, dot: Any, block_bytes: int, add: Any, columns: int) -> Any:
    """Rows of codes whose scales hold for any multiple of `columns` columns."""
    ask = asks_ahead(block_bytes)

    def some_rows(linear, first, last, numbers, steps, sums, scales, y):  # type: ignore[no-untyped-def]
        """Rows [first, last), of what `_fixed` makes and room for the scales of one row."""
        kept_apart()  # copied into `rows`, it would be in whatever registers that is
        in_narrow_registers()
        blocks, groups, each = sizes(linear, columns)
        for row in range(first, last):
            away = spread(linear, row, groups, each, steps, sums, scales)
            w, at, scale = linear.codes + row * blocks * block_bytes, numbers, scales
            a = splat(np.float32(0))
            b = a
            for _ in range(blocks):
                ask(w)
                a, b = add(dot, w, linear.table, at, scale, a, b)
                w += block_bytes
                at += 2 * BLOCK
                scale += 4 * (BLOCK // columns)
            put_float(y + 4 * row, total(a + b) - away)

    multiply = named(some_rows, f"{name}_of_some")

    def rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
        shorts, steps, sums = _fixed(linear, x, columns)
        scales = np.zeros(len(steps) + LANES, np.float32)
        for first in range(start, stop, _ROWS):  # not one call: numba frees arrays when it has their address
            last, numbers = min(first + _ROWS, stop), line_in(shorts)
            multiply(linear, first, last, numbers, address(steps), address(sums), line_in(scales), y)

    return named(rows, name)


def _by_floats(name: str, number: Any) -> Any:
    """Rows of 8-bit floats."""
    ask = asks_ahead(BLOCK)

    def rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
        columns = LANES if linear.group % BLOCK else BLOCK
        blocks, groups, each = sizes(linear, columns)
        ones = np.ones(rounded_up(groups) * each + LANES, np.float32)
        scales, none = np.zeros(len(ones), np.float32), np.zeros(rounded_up(groups), np.float32)
        for row in range(start, stop):
            spread(linear, row, groups, each, address(ones), address(none), address(scales))
            w, even = linear.codes + row * blocks * BLOCK, 0
            sum_ = splat(np.float32(0))
            if columns == BLOCK:
                even = linear.width - linear.width % BLOCK
                for i in range(0, even, BLOCK):
                    ask(w + i)
                    part = _block_of_floats(number, w + i, x + 4 * i)
                    sum_ = fused(part, splat(scales[i // BLOCK]), sum_)
            for i in range(even, linear.width, LANES):
                scale = splat(scales[i // BLOCK if columns == BLOCK else i // LANES])
                sum_ = fused(number(w + i) * scale, floats(x + 4 * i), sum_)
            put_float(y + 4 * row, total(sum_))

    return named(rows, name)


@routine
def _block_of_floats(number, w, x):  # type: ignore[no-untyped-def]
    """Products of 128 columns, in four chains of sums that need not wait for one another."""
    a, b = number(w) * floats(x), number(w + 16) * floats(x + 64)
    c, d = number(w + 32) * floats(x + 128), number(w + 48) * floats(x + 192)
    a, b = fused(number(w + 64), floats(x + 256), a), fused(number(w + 80), floats(x + 320), b)
    c, d = fused(number(w + 96), floats(x + 384), c), fused(number(w + 112), floats(x + 448), d)
    return (a + b) + (c + d)


def _dense(name: str, number: Any, size: int) -> Any:
    """Rows of plain numbers.

    They are read so fast that the processor's own foresight is enough, and asking takes longer than it saves:
    a token of a 0.5B model in bfloat16, one core of a Zen 4, 55 ms with it and 43 without.
    """

    def rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
        width, step = linear.width, size * LANES
        even = width - width % (4 * LANES)
        for row in range(start, stop):
            at = linear.codes + size * width * row
            a = splat(np.float32(0))
            b, c, d = a, a, a
            for i in range(0, even, 4 * LANES):
                a = fused(number(at), floats(x + 4 * i), a)
                b = fused(number(at + step), floats(x + 4 * i + 64), b)
                c = fused(number(at + 2 * step), floats(x + 4 * i + 128), c)
                d = fused(number(at + 3 * step), floats(x + 4 * i + 192), d)
                at += 4 * step
            for i in range(even, width, LANES):
                a = fused(number(at), floats(x + 4 * i), a)
                at += step
            put_float(y + 4 * row, total((a + b) + (c + d)))

    return named(rows, name)


_DOTS = {
    "int4": (dot_nibbles, BLOCK // 2),
    "int6": (dot_int6, BLOCK * 3 // 4),
    "int8": (dot_bytes, BLOCK),
    "lut": (dot_lut, BLOCK // 2),
}
_SCALES = {"blocks": (_add_block, BLOCK), "parts": (_add_parts, PART), "half_parts": (_add_half_parts, LANES)}
ROUTINES = {
    "float32": _dense("float32", floats, 4),
    "bfloat16": _dense("bfloat16", load_bf16, 2),
    "e4m3": _by_floats("e4m3", e4m3_floats),
    "e5m2": _by_floats("e5m2", e5m2_floats),
    **{
        f"{kind}_by_{by}": _by_codes(f"{kind}_by_{by}", dot, block_bytes, add, columns)
        for kind, (dot, block_bytes) in _DOTS.items()
        for by, (add, columns) in _SCALES.items()
        if (kind, by) != ("lut", "blocks")  # whose sums would not fit 32 bits
    },
}
"""How rows of each kind of weight are multiplied, by the names under which the machine code is cached."""
