"""Rows of a weight times one vector, at the speed of reading the weight once.

Weights on a grid are multiplied as integers: the vector is rounded to 16 bits per block of 128
columns, at most 2**-16 of the block's largest number off, a hundredth of what rounding it to
bfloat16 costs. Products are exact, their sums over a block too; scales and zeros are applied in
float32, as `scale * (sum of code * x - zero * sum of x)`. Dense weights are multiplied in float32.
All arguments named `x`, `y`, `w`, ... are byte addresses (see `words.py`).
"""

from __future__ import annotations

import numpy as np

from qconvert.decoder.cpu.records import BRAIN, INT4, INT8
from qconvert.decoder.cpu.words import (
    BLOCK,
    PART,
    added,
    as_floats,
    brain_at,
    brains,
    byte_at,
    dot_bytes,
    dot_nibbles,
    float_at,
    floats,
    fused,
    larger,
    put_float,
    put_shorts,
    routine,
    total,
    words,
)
from qconvert.quant.lanes import LANES, peak, rounded_even, splat

_MOST = np.float32(32767)
_LEAST_PEAK = np.float32(1e-30)
"""Blocks of smaller numbers count as zero: their step would be no normal number."""


@routine
def fixed(x, width, group):  # type: ignore[no-untyped-def]
    """A vector in fixed point: int16 numbers, the step of each block, the sum of each group of columns."""
    blocks = (width + BLOCK - 1) // BLOCK
    shorts = np.zeros(blocks * BLOCK, np.int16)
    steps, sums = np.zeros(blocks, np.float32), np.zeros(max(1, width // group), np.float32)
    for block in range(blocks):
        first, last = block * BLOCK, min((block + 1) * BLOCK, width)
        biggest = splat(np.float32(0))
        for i in range(first, last, LANES):
            biggest = larger(biggest, floats(x + 4 * i))
        top = peak(biggest)
        if top < _LEAST_PEAK:
            continue
        step, inverse = top / _MOST, splat(_MOST / top)
        steps[block] = step
        for i in range(first, last, PART):
            low = rounded_even(floats(x + 4 * i) * inverse)
            high = rounded_even(floats(x + 4 * i + 4 * LANES) * inverse)
            put_shorts(shorts.ctypes.data + 2 * i, low)
            put_shorts(shorts.ctypes.data + 2 * i + 2 * LANES, high)
            sums[i // group] += step * total(low + high)
    return shorts, steps, sums


@routine
def multiply_rows(linear, x, y, start, stop):  # type: ignore[no-untyped-def]
    """y[start:stop] of `y = W x + bias`; the width must be a multiple of 32 (dense: of 16)."""
    if linear.kind in (INT4, INT8):
        shorts, steps, sums = fixed(x, linear.width, linear.group)
        if linear.kind == INT4 and linear.group in (PART, 2 * PART) and linear.width % BLOCK == 0:
            _small_nibbles(linear, shorts, steps, sums, y, start, stop)
        elif linear.group % BLOCK:
            _small_groups(linear, shorts, steps, sums, y, start, stop)
        elif linear.kind == INT4:
            _nibbles(linear, shorts, steps, sums, y, start, stop)
        else:
            _bytes(linear, shorts, steps, sums, y, start, stop)
    elif linear.kind == BRAIN:
        _brains(linear.codes, linear.width, x, y, start, stop)
    else:
        _floats(linear.codes, linear.width, x, y, start, stop)
    if linear.bias:
        for row in range(start, stop):
            put_float(y + 4 * row, float_at(y + 4 * row) + float_at(linear.bias + 4 * row))


@routine
def scale_at(scales, brain_scales, i):  # type: ignore[no-untyped-def]
    """A scale, of either type."""
    if brain_scales:
        return brain_at(scales + 2 * i)
    return float_at(scales + 4 * i)


@routine
def _offset(linear, row, sums):  # type: ignore[no-untyped-def]
    """The sum over groups of `scale * zero * sum of x`."""
    scales, brain_scales, groups = linear.scales, linear.brain_scales, len(sums)
    offset = np.float32(0)
    if linear.zeros:
        for g in range(groups):
            zero = byte_at(linear.zeros + row * groups + g)
            offset += scale_at(scales, brain_scales, row * groups + g) * zero * sums[g]
    elif linear.zero:
        for g in range(groups):
            offset += scale_at(scales, brain_scales, row * groups + g) * sums[g]
        offset *= np.float32(linear.zero)
    return offset


@routine
def _nibbles(linear, shorts, steps, sums, y, start, stop):  # type: ignore[no-untyped-def]
    x, blocks, groups = shorts.ctypes.data, len(steps), len(sums)
    codes, scales, brain_scales = linear.codes, linear.scales, linear.brain_scales
    each = blocks // groups
    for row in range(start, stop):
        w, block, sum_ = codes + row * blocks * (BLOCK // 2), 0, splat(np.float32(0))
        for g in range(groups):
            scale = scale_at(scales, brain_scales, row * groups + g)
            for _ in range(each):
                word, at = words(w), x + 2 * BLOCK * block
                a = added(dot_nibbles(word, 0, at), dot_nibbles(word, 1, at + 64))
                b = added(dot_nibbles(word, 2, at + 128), dot_nibbles(word, 3, at + 192))
                sum_ = fused(as_floats(added(a, b)), splat(scale * steps[block]), sum_)
                w += BLOCK // 2
                block += 1
        put_float(y + 4 * row, total(sum_) - _offset(linear, row, sums))


@routine
def _bytes(linear, shorts, steps, sums, y, start, stop):  # type: ignore[no-untyped-def]
    x, blocks, groups = shorts.ctypes.data, len(steps), len(sums)
    codes, scales, brain_scales = linear.codes, linear.scales, linear.brain_scales
    each = blocks // groups
    for row in range(start, stop):
        w, block, sum_ = codes + row * blocks * BLOCK, 0, splat(np.float32(0))
        for g in range(groups):
            scale = scale_at(scales, brain_scales, row * groups + g)
            for _ in range(each):
                at = x + 2 * BLOCK * block
                a = added(dot_bytes(w, at), dot_bytes(w + 32, at + 64))
                b = added(dot_bytes(w + 64, at + 128), dot_bytes(w + 96, at + 192))
                sum_ = fused(as_floats(added(a, b)), splat(scale * steps[block]), sum_)
                w += BLOCK
                block += 1
        put_float(y + 4 * row, total(sum_) - _offset(linear, row, sums))


@routine
def _small_nibbles(linear, shorts, steps, sums, y, start, stop):  # type: ignore[no-untyped-def]
    """Whole blocks of groups of 32 or 64."""
    x, blocks, groups = shorts.ctypes.data, len(steps), len(sums)
    codes, scales, brain_scales = linear.codes, linear.scales, linear.brain_scales
    half = 0 if linear.group == PART else 1
    for row in range(start, stop):
        w, first = codes + row * blocks * (BLOCK // 2), row * groups
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for block in range(blocks):
            word, at, step, g = words(w), x + 2 * BLOCK * block, steps[block], 4 * block
            scale = scale_at(scales, brain_scales, first + (g >> half))
            a = fused(as_floats(dot_nibbles(word, 0, at)), splat(scale * step), a)
            scale = scale_at(scales, brain_scales, first + (g + 1 >> half))
            b = fused(as_floats(dot_nibbles(word, 1, at + 64)), splat(scale * step), b)
            scale = scale_at(scales, brain_scales, first + (g + 2 >> half))
            c = fused(as_floats(dot_nibbles(word, 2, at + 128)), splat(scale * step), c)
            scale = scale_at(scales, brain_scales, first + (g + 3 >> half))
            d = fused(as_floats(dot_nibbles(word, 3, at + 192)), splat(scale * step), d)
            w += BLOCK // 2
        put_float(y + 4 * row, total((a + b) + (c + d)) - _offset(linear, row, sums))


@routine
def _small_groups(linear, shorts, steps, sums, y, start, stop):  # type: ignore[no-untyped-def]
    """Groups of any multiple of 32 columns that is none of a block."""
    x, blocks, groups = shorts.ctypes.data, len(steps), len(sums)
    kind, codes, scales, brain_scales = linear.kind, linear.codes, linear.scales, linear.brain_scales
    each = linear.group // PART
    for row in range(start, stop):
        first, sum_ = row * blocks * BLOCK, splat(np.float32(0))
        for g in range(groups):
            scale = scale_at(scales, brain_scales, row * groups + g)
            for part in range(g * each, (g + 1) * each):
                at, block = x + 2 * PART * part, part // 4
                if kind == INT4:
                    word = words(codes + (first + BLOCK * block) // 2)
                    dot = dot_nibbles(word, part % 4, at)
                else:
                    dot = dot_bytes(codes + first + PART * part, at)
                sum_ = fused(as_floats(dot), splat(scale * steps[block]), sum_)
        put_float(y + 4 * row, total(sum_) - _offset(linear, row, sums))


@routine
def _brains(w, width, x, y, start, stop):  # type: ignore[no-untyped-def]
    even = width - width % (4 * LANES)
    for row in range(start, stop):
        at = w + 2 * width * row
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for i in range(0, even, 4 * LANES):
            a = fused(brains(at + 2 * i), floats(x + 4 * i), a)
            b = fused(brains(at + 2 * i + 32), floats(x + 4 * i + 64), b)
            c = fused(brains(at + 2 * i + 64), floats(x + 4 * i + 128), c)
            d = fused(brains(at + 2 * i + 96), floats(x + 4 * i + 192), d)
        for i in range(even, width, LANES):
            a = fused(brains(at + 2 * i), floats(x + 4 * i), a)
        put_float(y + 4 * row, total((a + b) + (c + d)))


@routine
def _floats(w, width, x, y, start, stop):  # type: ignore[no-untyped-def]
    even = width - width % (4 * LANES)
    for row in range(start, stop):
        at = w + 4 * width * row
        a = splat(np.float32(0))
        b, c, d = a, a, a
        for i in range(0, even, 4 * LANES):
            a = fused(floats(at + 4 * i), floats(x + 4 * i), a)
            b = fused(floats(at + 4 * i + 64), floats(x + 4 * i + 64), b)
            c = fused(floats(at + 4 * i + 128), floats(x + 4 * i + 128), c)
            d = fused(floats(at + 4 * i + 192), floats(x + 4 * i + 192), d)
        for i in range(even, width, LANES):
            a = fused(floats(at + 4 * i), floats(x + 4 * i), a)
        put_float(y + 4 * row, total((a + b) + (c + d)))
