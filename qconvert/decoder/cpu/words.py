"""SIMD operations of the CPU kernels, on bare memory: what `quant.lanes` lacks for products.

One compiled function reads weights of every kind and layer. So memory is named by byte addresses,
plain integers out of the records of `records.py`, not by numba arrays, each of whose element types
would need a function of its own. Nothing is checked here: who makes a record vouches for it.
Legend: `words` are sixteen int32, `lanes` sixteen float32.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model

from qconvert.quant import lanes as _lanes
from qconvert.quant.lanes import LANES, call_llvm, lanes_type, primitive

routine: Any = _lanes.routine
"""As there; typed so that kernels may call what they cannot annotate."""

BLOCK = 128
"""Columns whose codes share a load: sixteen words of two nibbles in each of four places."""
PART = 32
"""Columns of one `dot`."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
_SHORTS, _BYTES = ir.VectorType(_I16, PART), ir.VectorType(_I8, PART)


class _Words(types.Type):
    """Sixteen int32 numbers."""


words_type = _Words("words")


@register_model(_Words)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _INTS)  # type: ignore[no-untyped-call]


def _all(value: float, vector: Any = _INTS) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _write(context: Any, builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
    return context.get_dummy_value()


@primitive
def floats(typing: Any, address: Any) -> Any:
    """Sixteen float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _read(builder, args[0], _FLOATS)

    return lanes_type(types.intp), emit


@primitive
def brains(typing: Any, address: Any) -> Any:
    """Sixteen bfloat16, widened."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.zext(_read(builder, args[0], ir.VectorType(_I16, LANES)), _INTS)
        return builder.bitcast(builder.shl(bits, _all(16)), _FLOATS)

    return lanes_type(types.intp), emit


@primitive
def float_at(typing: Any, address: Any) -> Any:
    """One float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _read(builder, args[0], ir.FloatType())

    return types.float32(types.intp), emit


@primitive
def brain_at(typing: Any, address: Any) -> Any:
    """One bfloat16, widened."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.zext(_read(builder, args[0], _I16), _I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 16)), ir.FloatType())

    return types.float32(types.intp), emit


@primitive
def byte_at(typing: Any, address: Any) -> Any:
    """One int8 as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(_read(builder, args[0], _I8), ir.FloatType())

    return types.float32(types.intp), emit


@primitive
def put_float(typing: Any, address: Any, value: Any) -> Any:
    """Write one float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _write(context, builder, *args)

    return types.void(types.intp, types.float32), emit


@primitive
def put_floats(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _write(context, builder, *args)

    return types.void(types.intp, lanes_type), emit


@primitive
def put_brains(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen numbers as bfloat16, rounded half to even; no NaNs."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], _INTS)
        odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
        rounded = builder.add(bits, builder.add(odd, _all(0x7FFF)))
        halves = builder.trunc(builder.lshr(rounded, _all(16)), ir.VectorType(_I16, LANES))
        return _write(context, builder, args[0], halves)

    return types.void(types.intp, lanes_type), emit


@primitive
def put_shorts(typing: Any, address: Any, value: Any) -> Any:
    """Write sixteen whole numbers below 2**15 as int16."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.fptosi(args[1], _INTS)
        return _write(context, builder, args[0], builder.trunc(whole, ir.VectorType(_I16, LANES)))

    return types.void(types.intp, lanes_type), emit


@primitive
def words(typing: Any, address: Any) -> Any:
    """Sixteen int32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _read(builder, args[0], _INTS)

    return words_type(types.intp), emit


def _pairs(context: Any, builder: Any, a: Any, b: Any) -> Any:
    """Products of int16 numbers, neighbours added: sixteen int32."""
    features = context.codegen().magic_tuple()[2].split(",")
    for feature, name, width in (
        ("+avx512bw", "llvm.x86.avx512.pmaddw.d.512", 32),
        ("+avx2", "llvm.x86.avx2.pmadd.wd", 16),
    ):
        if feature in features:
            return _pairs_by(builder, name, width, a, b)
    sums = [
        builder.mul(*(builder.sext(_picked(builder, x, range(odd, PART, 2)), _INTS) for x in (a, b)))
        for odd in (0, 1)
    ]
    return builder.add(*sums)


def _pairs_by(builder: Any, name: str, width: int, a: Any, b: Any) -> Any:
    """The same by the instruction of x86 processors, which LLVM does not find by itself."""
    result = ir.VectorType(_I32, width // 2)
    parts = [
        call_llvm(builder, name, result, *(_picked(builder, x, range(at, at + width)) for x in (a, b)))
        for at in range(0, PART, width)
    ]
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, ir.Constant(_INTS, list(range(LANES))))


def _picked(builder: Any, x: Any, places: range) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(places)), list(places))
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)


@primitive
def dot_nibbles(typing: Any, codes: Any, place: Any, x: Any) -> Any:
    """Products of 32 nibbles with 32 int16 at `x`, neighbours added.

    Word l holds codes 2l and 2l + 1 of place p in its bits 4p and 16 + 4p.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes, place, x = args
        shift = builder.trunc(builder.shl(place, ir.Constant(place.type, 2)), _I32)
        spread = builder.insert_element(ir.Constant(_INTS, ir.Undefined), shift, ir.Constant(_I32, 0))
        spread = builder.shuffle_vector(spread, spread, _all(0))
        nibbles = builder.and_(builder.lshr(codes, spread), _all(0x000F000F))
        return _pairs(context, builder, builder.bitcast(nibbles, _SHORTS), _read(builder, x, _SHORTS))

    return words_type(words_type, types.intp, types.intp), emit


@primitive
def dot_bytes(typing: Any, codes: Any, x: Any) -> Any:
    """Products of 32 int8 at `codes` with 32 int16 at `x`, neighbours added."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes, x = args
        wide = builder.sext(_read(builder, codes, _BYTES), _SHORTS)
        return _pairs(context, builder, wide, _read(builder, x, _SHORTS))

    return words_type(types.intp, types.intp), emit


@primitive
def added(typing: Any, a: Any, b: Any) -> Any:
    """The sum of words."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.add(*args)

    return words_type(words_type, words_type), emit


@primitive
def as_floats(typing: Any, value: Any) -> Any:
    """Words as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], _FLOATS)

    return lanes_type(words_type), emit


@primitive
def nibble_floats(typing: Any, codes: Any, place: Any, high: Any) -> Any:
    """The nibbles of one place and half of each word, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes, place, high = args
        four, sixteen = ir.Constant(place.type, 4), ir.Constant(place.type, 16)
        shift = builder.trunc(builder.add(builder.mul(place, four), builder.mul(high, sixteen)), _I32)
        spread = builder.insert_element(ir.Constant(_INTS, ir.Undefined), shift, ir.Constant(_I32, 0))
        spread = builder.shuffle_vector(spread, spread, _all(0))
        return builder.uitofp(builder.and_(builder.lshr(codes, spread), _all(15)), _FLOATS)

    return lanes_type(words_type, types.intp, types.intp), emit


@primitive
def byte_floats(typing: Any, address: Any) -> Any:
    """Sixteen int8 as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(_read(builder, args[0], ir.VectorType(_I8, LANES)), _FLOATS)

    return lanes_type(types.intp), emit


@primitive
def paired(typing: Any, even: Any, odd: Any, high: Any) -> Any:
    """Lanes of `even` and `odd` by turns: those of the first eight, or if `high` of the last eight."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        even, odd, high = args
        low_half, high_half = (
            builder.shuffle_vector(
                even, odd, ir.Constant(_INTS, [first + i // 2 + LANES * (i % 2) for i in range(LANES)])
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
        return call_llvm(builder, "llvm.fma.v16f32", _FLOATS, *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), emit


@primitive
def total(typing: Any, value: Any) -> Any:
    """The sum of the lanes, halves added to halves."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            value = builder.fadd(
                _picked(builder, value, range(width)), _picked(builder, value, range(width, 2 * width))
            )
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(lanes_type), emit


@primitive
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger magnitude of each lane; NaN counts as larger than all."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = [builder.and_(builder.bitcast(x, _INTS), _all(0x7FFFFFFF)) for x in args]
        return builder.bitcast(builder.select(builder.icmp_unsigned(">", *bits), *bits), _FLOATS)

    return lanes_type(lanes_type, lanes_type), emit


@primitive
def power_of_two(typing: Any, exponent: Any) -> Any:
    """2 to whole numbers from -126 to 127."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.add(builder.fptosi(args[0], _INTS), _all(127))
        return builder.bitcast(builder.shl(whole, _all(23)), _FLOATS)

    return lanes_type(lanes_type), emit


@primitive
def add_and_fetch(typing: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in one step that all threads see in one order; returns the sum."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.add(builder.atomic_rmw("add", pointer, args[1], "seq_cst"), args[1])

    return types.int64(types.intp, types.int64), emit


@primitive
def fetch(typing: Any, address: Any) -> Any:
    """An int64 as other threads have left it, with all that they wrote before."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), emit


@primitive
def rest(typing: Any) -> Any:
    """Let another thread have the processor, if one waits for it."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sys.platform != "win32":
            call_llvm(builder, "sched_yield", _I32)
        return context.get_dummy_value()

    return types.void(), emit
