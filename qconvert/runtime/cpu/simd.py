"""Adds SIMD operations on bare memory for the CPU kernels: what `quant.simd.lanes` lacks for products.

One compiled function reads weights of every kind and layer. So memory is named by byte addresses,
plain integers out of the records of `kernel_args.py`, not by numba arrays, each of whose element types
would need a function of its own. Nothing is checked here: who makes a record vouches for it.
Legend: `words` are sixteen int32, `lanes` sixteen float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from qconvert.quant.simd import lanes as _lanes
from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES, call_llvm, lanes_type, primitive

routine: Any = _lanes.routine
"""As there; typed so that kernels may call what they cannot annotate."""

BLOCK = 128
"""Columns whose codes share a load: sixteen words of two nibbles in each of four places."""
PART = 32
"""Columns of one `dot`."""
LINE = 64
"""Bytes of a cache line."""
_AHEAD = 4096
"""Bytes before which memory is asked for. Of 0, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384 and 32768 the
fastest for codes of 4 and 6 bits, or within 2 % of it, on a Zen 4 with weights in large pages. For 8 bits it
is 12 % faster than 8192; 512 would be 15 % faster still, and 8 % slower for 4 bits."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, PART), ir.VectorType(I8, PART)


class _Words(types.Type):
    """Sixteen int32 numbers."""


words_type = _Words("words")


register_model(_Words)(lambda manager, kind: models.PrimitiveModel(manager, kind, INTS))  # type: ignore[no-untyped-call]


def instructions(result: Any, *operands: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a function of numba code, by its types, whose body emits the LLVM instructions of a call."""

    def declare(function: Callable[..., Any]) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = function(builder, *args)
            return context.get_dummy_value() if result == types.void else value

        return primitive(wraps(function)(lambda typing, *args: (result(*operands), emit)))

    return declare


def constant(value: float, vector: Any = INTS) -> Any:
    """A vector of one number, for code that emits instructions."""
    return ir.Constant(vector, [value] * vector.count)


def read(builder: Any, address: Any, kind: Any) -> Any:
    """What lies at a byte address, for code that emits instructions."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def write(builder: Any, address: Any, value: Any) -> None:
    """Put a value at a byte address, for code that emits instructions."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def after(builder: Any, address: Any, offset: Any) -> Any:
    """An address so many bytes further, a number or a value, for code that emits instructions."""
    if isinstance(offset, int):
        return builder.add(address, ir.Constant(I64, offset)) if offset else address
    return builder.add(address, offset)


def times(builder: Any, count: Any, size: int) -> Any:
    """The bytes of so many of a size, for code that emits instructions."""
    return builder.mul(count, ir.Constant(I64, size))


def picked(builder: Any, x: Any, places: Any) -> Any:
    """A vector of the elements at some places of one, for code that emits instructions."""
    mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)


def rounded_to_bf16(builder: Any, value: Any) -> Any:
    """A vector as bfloat16, rounded half to even, for code that emits instructions."""
    count = value.type.count
    ints = ir.VectorType(I32, count)
    bits, sixteen = builder.bitcast(value, ints), constant(16, ints)
    odd = builder.and_(builder.lshr(bits, sixteen), constant(1, ints))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF, ints)))
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(I16, count))


def ask_ahead(builder: Any, address: Any, count: int) -> None:
    """Ask for what lies so far behind `count` bytes that are read now, for code that emits instructions."""
    how = [ir.Constant(I32, number) for number in (0, 3, 1)]  # to read, into all caches, data
    for offset in range(_AHEAD, _AHEAD + count, LINE):
        pointer = builder.inttoptr(builder.add(address, ir.Constant(I64, offset)), I8.as_pointer())
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *how)


def asks_ahead(count: int) -> Any:
    """Makes the function of numba code that does this for a count of bytes."""

    @instructions(types.void, types.intp)
    def ask(builder: Any, address: Any) -> None:
        ask_ahead(builder, address, count)

    return ask


@instructions(types.void)
def kept_apart(builder: Any) -> None:
    """Keep the routine that says this out of its callers, which else make ready what they may not need."""
    builder.function.attributes.add("noinline")


@instructions(types.void)
def in_narrow_registers(builder: Any) -> None:
    """Compute the routine that says this in registers of 256 bits, where those of 512 are taken in halves.

    LLVM heeds it where all routines that it copies into this one say so too, which numba's own (`min`,
    `np.zeros`) do not. It passes vectors in other registers then: no such routine takes one from a routine
    that does not say so.
    """
    if processor.halves_512():
        attributes = ('"min-legal-vector-width"="0"', '"prefer-vector-width"="256"')
        set.update(builder.function.attributes, attributes)  # which llvmlite does not know


@routine
def address(array):  # type: ignore[no-untyped-def]
    """Where an array lies. (By itself numba has an unsigned number, whose sums with others are float64.)"""
    return np.intp(array.ctypes.data)


@routine
def line_in(array):  # type: ignore[no-untyped-def]
    """Where the first cache line in an array begins, which has `LINE` bytes more than it needs.

    A register of 64 bytes that lies across two lines is read twice, and one product in two reads one.
    """
    return (address(array) + LINE - 1) // LINE * LINE


@instructions(lanes_type, types.intp)
def floats(builder: Any, address: Any) -> Any:
    """Sixteen float32."""
    return read(builder, address, FLOATS)


@instructions(lanes_type)
def counted(builder: Any) -> Any:
    """The numbers from 0 to 15."""
    return ir.Constant(FLOATS, [float(lane) for lane in range(LANES)])


@instructions(lanes_type, types.intp)
def load_bf16(builder: Any, address: Any) -> Any:
    """Sixteen bfloat16, widened."""
    bits = builder.zext(read(builder, address, ir.VectorType(I16, LANES)), INTS)
    return builder.bitcast(builder.shl(bits, constant(16)), FLOATS)


@instructions(types.float32, types.intp)
def float_at(builder: Any, address: Any) -> Any:
    """One float32."""
    return read(builder, address, ir.FloatType())


@instructions(lanes_type, types.intp)
def two_floats(builder: Any, address: Any) -> Any:
    """Two float32, each in eight lanes."""
    if processor.has("avx512f") and not processor.halves_512():  # one instruction sorts both into a register
        return picked(builder, read(builder, address, ir.VectorType(ir.FloatType(), 2)), [0] * 8 + [1] * 8)
    eight = ir.VectorType(ir.FloatType(), LANES // 2)
    spread = []  # from memory one by one, which costs no shuffle
    for offset in (0, 4):
        number = read(builder, builder.add(address, ir.Constant(I64, offset)), ir.FloatType())
        first = builder.insert_element(ir.Constant(eight, ir.Undefined), number, ir.Constant(I32, 0))
        spread.append(picked(builder, first, [0] * (LANES // 2)))
    return builder.shuffle_vector(*spread, ir.Constant(INTS, list(range(LANES))))


@instructions(types.void, types.intp, types.float32)
def put_float(builder: Any, address: Any, value: Any) -> None:
    """Write one float32."""
    write(builder, address, value)


@instructions(types.void, types.intp, lanes_type)
def store_f32(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen float32."""
    write(builder, address, value)


@instructions(types.void, types.intp, lanes_type)
def store_bf16(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen numbers as bfloat16, rounded half to even; no NaNs."""
    write(builder, address, rounded_to_bf16(builder, value))


@instructions(types.void, types.intp, lanes_type)
def put_shorts(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen whole numbers below 2**15 as int16."""
    whole = builder.fptosi(value, INTS)
    write(builder, address, builder.trunc(whole, ir.VectorType(I16, LANES)))


@instructions(types.void, types.intp, lanes_type)
def put_bytes(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen whole numbers from 0 to 255 as bytes; what is no number becomes anything."""
    whole = builder.fptosi(value, INTS)
    write(builder, address, builder.trunc(whole, ir.VectorType(I8, LANES)))


@instructions(types.intp, types.intp)
def byte_at(builder: Any, address: Any) -> Any:
    """One int8."""
    return builder.sext(read(builder, address, I8), I64)


@instructions(types.void, types.intp, types.intp, types.intp)
def copy_bytes(builder: Any, source: Any, count: Any, target: Any) -> None:
    """Copy `count` bytes, a multiple of 32."""
    with cgutils.for_range(builder, builder.lshr(count, ir.Constant(I64, 5))) as loop:
        at = builder.shl(loop.index, ir.Constant(I64, 5))
        write(builder, builder.add(target, at), read(builder, builder.add(source, at), BYTES))


@instructions(words_type, words_type, words_type)
def added(builder: Any, a: Any, b: Any) -> Any:
    """The sum of words."""
    return builder.add(a, b)


@instructions(words_type, words_type)
def by_itself(builder: Any, value: Any) -> Any:
    """Words that are a sum of their own.

    LLVM would else make one chain of all products that are added, each waiting for the one before. The fence
    is no instruction, and is known for float32 alone.
    """
    same = builder.bitcast(value, FLOATS)
    return builder.bitcast(call_llvm(builder, "llvm.arithmetic.fence.v16f32", FLOATS, same), INTS)


@instructions(words_type, words_type, words_type)
def folded(builder: Any, a: Any, b: Any) -> Any:
    """Eight sums of lanes l and l + 8 of one, then of another."""
    low, high = (
        builder.shuffle_vector(
            a, b, ir.Constant(INTS, [first + i + LANES * half for half in (0, 1) for i in range(8)])
        )
        for first in (0, LANES // 2)
    )
    return builder.add(low, high)


@instructions(lanes_type, words_type)
def as_floats(builder: Any, value: Any) -> Any:
    """Words as float32."""
    return builder.sitofp(value, FLOATS)


@instructions(lanes_type, lanes_type, lanes_type, types.intp)
def paired(builder: Any, even: Any, odd: Any, high: Any) -> Any:
    """Lanes of `even` and `odd`, alternating: those of the first eight, or if `high` of the last eight."""
    low_half, high_half = (
        builder.shuffle_vector(
            even, odd, ir.Constant(INTS, [first + i // 2 + LANES * (i % 2) for i in range(LANES)])
        )
        for first in (0, LANES // 2)
    )
    return builder.select(builder.icmp_unsigned("!=", high, ir.Constant(high.type, 0)), high_half, low_half)


@instructions(types.float32, lanes_type)
def total(builder: Any, value: Any) -> Any:
    """The sum of the lanes, halves added to halves."""
    width = LANES
    while width > 1:
        width //= 2
        value = builder.fadd(
            picked(builder, value, range(width)), picked(builder, value, range(width, 2 * width))
        )
    return builder.extract_element(value, ir.Constant(I32, 0))


@instructions(lanes_type, lanes_type, lanes_type)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger magnitude of each lane; NaN counts as larger than all."""
    bits = [builder.and_(builder.bitcast(x, INTS), constant(0x7FFFFFFF)) for x in (a, b)]
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", *bits), *bits), FLOATS)


@instructions(lanes_type, lanes_type)
def power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to whole numbers from -126 to 127."""
    whole = builder.add(builder.fptosi(exponent, INTS), constant(127))
    return builder.bitcast(builder.shl(whole, constant(23)), FLOATS)


@instructions(types.int64, types.intp, types.int64)
def add_and_fetch(builder: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in one step that all threads see in one order; returns the sum."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.add(builder.atomic_rmw("add", pointer, value, "seq_cst"), value)


@instructions(types.int64, types.intp)
def fetch(builder: Any, address: Any) -> Any:
    """An int64 as other threads have left it, with all that they wrote before."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "acquire", 8)


@instructions(types.void)
def rest(builder: Any) -> None:
    """Let another thread have the processor, if one waits for it."""
    if sys.platform != "win32":
        call_llvm(builder, "sched_yield", I32)
