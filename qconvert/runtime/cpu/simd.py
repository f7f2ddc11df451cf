"""Adds SIMD operations on bare memory for the CPU kernels: what `quant.simd.lanes` lacks for products.

One compiled function reads weights of every kind and layer. So memory is named by byte addresses,
plain integers out of the records of `records.py`, not by numba arrays, each of whose element types
would need a function of its own. Nothing is checked here: who makes a record vouches for it.
Legend: `words` are sixteen int32, `lanes` sixteen float32.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from qconvert.quant.simd import lanes as _lanes
from qconvert.quant.simd.lanes import LANES, call_llvm, lanes_type, primitive

routine: Any = _lanes.routine
"""As there; typed so that kernels may call what they cannot annotate."""

BLOCK = 128
"""Columns whose codes share a load: sixteen words of two nibbles in each of four places."""
PART = 32
"""Columns of one `dot`."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES = ir.VectorType(I16, PART), ir.VectorType(I8, PART)


class _Words(types.Type):
    """Sixteen int32 numbers."""


words_type = _Words("words")


@register_model(_Words)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, INTS)  # type: ignore[no-untyped-call]


def constant(value: float, vector: Any = INTS) -> Any:
    """A vector of one number, for code that emits instructions."""
    return ir.Constant(vector, [value] * vector.count)


def read(builder: Any, address: Any, kind: Any) -> Any:
    """What lies at a byte address, for code that emits instructions."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def write(context: Any, builder: Any, address: Any, value: Any) -> Any:
    """Put a value at a byte address, for code that emits instructions."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return context.get_dummy_value()


def picked(builder: Any, x: Any, places: Any) -> Any:
    """A vector of the elements at some places of one, for code that emits instructions."""
    mask = ir.Constant(ir.VectorType(I32, len(places)), list(places))
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)


@routine
def address(array):  # type: ignore[no-untyped-def]
    """Where an array lies. (By itself numba has an unsigned number, whose sums with others are float64.)"""
    return np.intp(array.ctypes.data)


@primitive
def floats(typing: Any, address: Any) -> Any:
    """Sixteen float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return read(builder, args[0], FLOATS)

    return lanes_type(types.intp), emit


@primitive
def load_bf16(typing: Any, address: Any) -> Any:
    """Sixteen bfloat16, widened."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.zext(read(builder, args[0], ir.VectorType(I16, LANES)), INTS)
        return builder.bitcast(builder.shl(bits, constant(16)), FLOATS)

    return lanes_type(types.intp), emit


@primitive
def float_at(typing: Any, address: Any) -> Any:
    """One float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return read(builder, args[0], ir.FloatType())

    return types.float32(types.intp), emit


@primitive
def two_floats(typing: Any, address: Any) -> Any:
    """Two float32, each in eight lanes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        eight = ir.VectorType(ir.FloatType(), LANES // 2)
        spread = []  # from memory one by one, which costs no shuffle
        for offset in (0, 4):
            number = read(builder, builder.add(args[0], ir.Constant(I64, offset)), ir.FloatType())
            first = builder.insert_element(ir.Constant(eight, ir.Undefined), number, ir.Constant(I32, 0))
            spread.append(picked(builder, first, [0] * (LANES // 2)))
        return builder.shuffle_vector(*spread, ir.Constant(INTS, list(range(LANES))))

    return lanes_type(types.intp), emit


@primitive
def put_float(typing: Any, address: Any, value: Any) -> Any:
    """Write one float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return write(context, builder, *args)

    return types.void(types.intp, types.float32), emit


@primitive
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return write(context, builder, *args)

    return types.void(types.intp, lanes_type), emit


@primitive
def store_bf16(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen numbers as bfloat16, rounded half to even; no NaNs."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], INTS)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        halves = builder.trunc(builder.lshr(rounded, constant(16)), ir.VectorType(I16, LANES))
        return write(context, builder, args[0], halves)

    return types.void(types.intp, lanes_type), emit


@primitive
def put_shorts(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen whole numbers below 2**15 as int16."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.fptosi(args[1], INTS)
        return write(context, builder, args[0], builder.trunc(whole, ir.VectorType(I16, LANES)))

    return types.void(types.intp, lanes_type), emit


@primitive
def added(typing: Any, a: Any, b: Any) -> Any:
    """The sum of words."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.add(*args)

    return words_type(words_type, words_type), emit


@primitive
def folded(typing: Any, a: Any, b: Any) -> Any:
    """Eight sums of lanes l and l + 8 of one, then of another."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high = (
            builder.shuffle_vector(
                *args, ir.Constant(INTS, [first + i + LANES * half for half in (0, 1) for i in range(8)])
            )
            for first in (0, LANES // 2)
        )
        return builder.add(low, high)

    return words_type(words_type, words_type), emit


@primitive
def as_floats(typing: Any, value: Any) -> Any:
    """Words as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], FLOATS)

    return lanes_type(words_type), emit


@primitive
def paired(typing: Any, even: Any, odd: Any, high: Any) -> Any:
    """Lanes of `even` and `odd` by turns: those of the first eight, or if `high` of the last eight."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        even, odd, high = args
        low_half, high_half = (
            builder.shuffle_vector(
                even, odd, ir.Constant(INTS, [first + i // 2 + LANES * (i % 2) for i in range(LANES)])
            )
            for first in (0, LANES // 2)
        )
        return builder.select(
            builder.icmp_unsigned("!=", high, ir.Constant(high.type, 0)), high_half, low_half
        )

    return lanes_type(lanes_type, lanes_type, types.intp), emit


@primitive
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.fma.v16f32", FLOATS, *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), emit


@primitive
def total(typing: Any, value: Any) -> Any:
    """The sum of the lanes, halves added to halves."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            value = builder.fadd(
                picked(builder, value, range(width)), picked(builder, value, range(width, 2 * width))
            )
        return builder.extract_element(value, ir.Constant(I32, 0))

    return types.float32(lanes_type), emit


@primitive
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger magnitude of each lane; NaN counts as larger than all."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = [builder.and_(builder.bitcast(x, INTS), constant(0x7FFFFFFF)) for x in args]
        return builder.bitcast(builder.select(builder.icmp_unsigned(">", *bits), *bits), FLOATS)

    return lanes_type(lanes_type, lanes_type), emit


@primitive
def power_of_two(typing: Any, exponent: Any) -> Any:
    """2 to whole numbers from -126 to 127."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.add(builder.fptosi(args[0], INTS), constant(127))
        return builder.bitcast(builder.shl(whole, constant(23)), FLOATS)

    return lanes_type(lanes_type), emit


@primitive
def add_and_fetch(typing: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in one step that all threads see in one order; returns the sum."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.add(builder.atomic_rmw("add", pointer, args[1], "seq_cst"), args[1])

    return types.int64(types.intp, types.int64), emit


@primitive
def fetch(typing: Any, address: Any) -> Any:
    """An int64 as other threads have left it, with all that they wrote before."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), emit


@primitive
def rest(typing: Any) -> Any:
    """Let another thread have the processor, if one waits for it."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sys.platform != "win32":
            call_llvm(builder, "sched_yield", I32)
        return context.get_dummy_value()

    return types.void(), emit
