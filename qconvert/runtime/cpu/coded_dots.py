"""Multiplies codes of weights by inputs of 16 bits inside the CPU kernels, and converts codes to numbers.

A block of 128 columns has four parts of 32. Codes of 8 bits lie in the order of their columns. Those of
4 bits take two runs of 32 bytes, a byte's low half for one part and its high half for the next:

    bytes of a run      0-7   8-15   16-23  24-31
    columns of a part   0-7   16-23  8-15   24-31

so that one mask takes a part out of its run, and interleaving bytes with the upper halves of what they
stand for, which AVX2 does within each half of a register, gives 16-bit numbers in the order of columns.
Codes of 5 and 6 bits have their lower four like that, and behind the two runs 32 bytes of upper pairs: a
byte's pairs, the lowest first, are those of the parts, in the same order of columns.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES, call_llvm, lanes_type, spread, widen_halves
from qconvert.runtime.cpu.simd import (
    BYTES,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    PART,
    SHORTS,
    after,
    constant,
    instructions,
    picked,
    read,
    rounded_to_bf16,
    words_type,
    write,
)

# The byte of a run that holds each column of a part.
BYTE_OF = [8 * (2 * (column // 8 % 2) + column // 16) + column % 8 for column in range(PART)]
TABLE_BYTES, TABLE_NUMBERS = 64, 16
"""A table is the lower bytes of its 16 whole numbers, twice, the upper bytes, twice, and 16 float32."""

_WIDE = processor.has("avx512bw") and not processor.halves_512()
"""Whether a `dot` multiplies 32 numbers in a register of 512 bits."""
_COPIES = 2 if _WIDE else 1
"""Of a run in a register that a `dot` multiplies: reading fills both halves of 512 bits, after which no byte
has to go from half to half."""


def pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """Products of int16 numbers, neighbours added: half as many int32."""
    count = a.type.count
    for has, name, width in (
        (_WIDE, "llvm.x86.avx512.pmaddw.d.512", 32),
        (processor.has("avx2"), "llvm.x86.avx2.pmadd.wd", 16),
    ):
        if has and width <= count:
            return by_parts(builder, name, ir.VectorType(I32, width // 2), width, a, b)
    whole = ir.VectorType(I32, count // 2)
    sums = [
        builder.mul(*(builder.sext(picked(builder, x, range(odd, count, 2)), whole) for x in (a, b)))
        for odd in (0, 1)
    ]
    return builder.add(*sums)


def small_pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """Products of unsigned bytes by signed ones, neighbours added: half as many int16, which must hold them.

    On AVX2.
    """
    sixteen = ir.VectorType(I16, PART // 2)
    return by_parts(builder, "llvm.x86.avx2.pmadd.ub.sw", sixteen, PART, a, b)


def by_parts(builder: Any, name: str, result: Any, width: int, *operands: Any) -> Any:
    """Something by an instruction of the processor that LLVM does not find by itself, on `width` elements."""
    parts = [
        call_llvm(builder, name, result, *(picked(builder, x, range(at, at + width)) for x in operands))
        for at in range(0, operands[0].type.count, width)
    ]
    while len(parts) > 1:
        parts = [joined(builder, *parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


def joined(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors as one."""
    return builder.shuffle_vector(first, second, _order(2 * first.type.count))


def _order(count: int) -> Any:
    return ir.Constant(ir.VectorType(I32, count), list(range(count)))


def _run(builder: Any, address: Any, copies: int) -> Any:
    """The 32 bytes of a run, once or twice."""
    run = read(builder, address, ir.VectorType(I16, PART // 2))
    return joined(builder, run, run) if copies == 2 else run


def _part(builder: Any, codes: Any, part: Any, copies: int = 1) -> Any:
    """The 32 nibbles of a part as bytes, once or twice; `codes` is the address of its block."""
    one = ir.Constant(I64, 1)
    run = builder.mul(builder.lshr(part, one), ir.Constant(I64, PART))
    stored = _run(builder, builder.add(codes, run), copies)
    shift = builder.trunc(builder.shl(builder.and_(part, one), ir.Constant(I64, 2)), I16)
    shifted = builder.lshr(stored, spread(builder, shift, stored.type))
    return as_bytes(builder, builder.and_(shifted, constant(0x0F0F, stored.type)))


def _with_pairs(builder: Any, codes: Any, part: Any, copies: int = 1) -> Any:
    """The 32 codes of 6 bits of a part as bytes, once or twice; `codes` is the address of its block."""
    stored = _run(builder, builder.add(codes, ir.Constant(I64, 2 * PART)), copies)
    shift = builder.trunc(builder.shl(part, ir.Constant(I64, 1)), I16)
    shifted = builder.lshr(stored, spread(builder, shift, stored.type))
    pairs = builder.and_(shifted, constant(0x0303, stored.type))
    upper = as_bytes(builder, builder.shl(pairs, constant(4, stored.type)))
    return builder.or_(_part(builder, codes, part, copies), upper)


def as_bytes(builder: Any, value: Any) -> Any:
    """A vector of whole numbers as the bytes that it is made of."""
    return builder.bitcast(value, ir.VectorType(I8, value.type.element.width // 8 * value.type.count))


def _woven(builder: Any, low: Any, high: Any) -> Any:
    """Bytes of a run, once or twice, and the upper bytes they get, as int16 in the order of columns."""
    copies, parts = low.type.count // PART, []
    for first in (0, LANES):
        copy = PART * (first // LANES) * (copies - 1)
        bytes_ = [copy + byte for byte in BYTE_OF[first : first + LANES]]
        places = [at for byte in bytes_ for at in (byte, copies * PART + byte)]
        woven = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, PART), places))
        parts.append(builder.bitcast(woven, ir.VectorType(I16, LANES)))
    return joined(builder, *parts)


def _lut(builder: Any, table: Any, index: Any) -> Any:
    """Bytes of a table of 16 bytes, which lies twice at an address, at 32 indices, once or twice."""
    if index.type.count > PART:
        twice = joined(builder, *[read(builder, table, BYTES)] * 2)
        return call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", index.type, twice, index)
    if processor.has("avx2"):
        return call_llvm(builder, "llvm.x86.avx2.pshuf.b", BYTES, read(builder, table, BYTES), index)
    sixteen = ir.VectorType(I8, LANES)
    name = "llvm.x86.ssse3.pshuf.b.128" if processor.has("ssse3") else ""
    name = "llvm.aarch64.neon.tbl1.v16i8" if processor.is_arm() else name
    if name:
        return by_parts(builder, name, sixteen, LANES, read(builder, table, BYTES), index)
    found = ir.Constant(BYTES, ir.Undefined)
    for i in range(PART):
        place = ir.Constant(I32, i)
        at = builder.add(table, builder.zext(builder.extract_element(index, place), I64))
        found = builder.insert_element(found, read(builder, at, I8), place)
    return found


@instructions(words_type, *[types.intp] * 4)
def dot_nibbles(builder: Any, codes: Any, part: Any, table: Any, x: Any) -> Any:
    """Products of the 32 nibbles of a part with 32 int16 at `x`, neighbours added: lane l has columns 2l
    and 2l + 1. `codes` is the address of a block; there is no table.
    """
    nibbles = _part(builder, codes, part, _COPIES)
    wide = _woven(builder, nibbles, constant(0, nibbles.type))
    return pair_sums(builder, wide, read(builder, x, SHORTS))


@instructions(words_type, *[types.intp] * 4)
def dot_int6(builder: Any, codes: Any, part: Any, table: Any, x: Any) -> Any:
    """The same with codes of 6 bits."""
    bytes_ = _with_pairs(builder, codes, part, _COPIES)
    wide = _woven(builder, bytes_, constant(0, bytes_.type))
    return pair_sums(builder, wide, read(builder, x, SHORTS))


@instructions(words_type, *[types.intp] * 4)
def dot_lut(builder: Any, codes: Any, part: Any, table: Any, x: Any) -> Any:
    """The same with what a table has for the nibbles."""
    nibbles, upper = _part(builder, codes, part, _COPIES), builder.add(table, ir.Constant(I64, PART))
    low, high = (_lut(builder, at, nibbles) for at in (table, upper))
    return pair_sums(builder, _woven(builder, low, high), read(builder, x, SHORTS))


@instructions(words_type, *[types.intp] * 4)
def dot_bytes(builder: Any, codes: Any, part: Any, table: Any, x: Any) -> Any:
    """The same with int8 as they are."""
    at = builder.add(codes, builder.mul(part, ir.Constant(I64, PART)))
    wide = builder.sext(read(builder, at, BYTES), SHORTS)
    return pair_sums(builder, wide, read(builder, x, SHORTS))


def _less(builder: Any, codes: Any, first: Any, second: Any) -> Any:
    """Bytes in the order of columns, less one number in the first 16 columns of a part, one in the others."""
    half = ir.VectorType(I8, LANES)
    numbers = [spread(builder, builder.trunc(number, I8), half) for number in (first, second)]
    return builder.sub(picked(builder, codes, BYTE_OF), builder.shuffle_vector(*numbers, _order(PART)))


@instructions(types.void, *[types.intp] * 5)
def put_nibbles(builder: Any, out: Any, codes: Any, part: Any, first: Any, second: Any) -> Any:
    """Write the 32 nibbles of a part as int8, less a zero for each half of it."""
    write(builder, out, _less(builder, _part(builder, codes, part), first, second))


@instructions(types.void, *[types.intp] * 5)
def put_int6(builder: Any, out: Any, codes: Any, part: Any, first: Any, second: Any) -> Any:
    """The same with codes of 6 bits."""
    write(builder, out, _less(builder, _with_pairs(builder, codes, part), first, second))


@instructions(types.void, *[types.intp] * 4)
def put_lut(builder: Any, out: Any, codes: Any, part: Any, table: Any) -> Any:
    """Write the lower bytes of what a table has for the nibbles of a part."""
    write(builder, out, picked(builder, _lut(builder, table, _part(builder, codes, part)), BYTE_OF))


def _half_as_floats(builder: Any, codes: Any, high: Any) -> Any:
    """The bytes of the first 16 columns of a part, or of the others, as float32."""
    low_half, high_half = (picked(builder, codes, BYTE_OF[first : first + LANES]) for first in (0, LANES))
    second = builder.icmp_unsigned("!=", high, ir.Constant(high.type, 0))
    return builder.uitofp(builder.select(second, high_half, low_half), FLOATS)


@instructions(lanes_type, types.intp, types.intp, types.intp)
def nibble_floats(builder: Any, codes: Any, part: Any, high: Any) -> Any:
    """The first 16 nibbles of a part, or if `high` the others, as float32."""
    return _half_as_floats(builder, _part(builder, codes, part), high)


@instructions(lanes_type, types.intp, types.intp, types.intp)
def int6_floats(builder: Any, codes: Any, part: Any, high: Any) -> Any:
    """The same of codes of 6 bits."""
    return _half_as_floats(builder, _with_pairs(builder, codes, part), high)


@instructions(types.void, types.intp, lanes_type)
def put_table_bf16(builder: Any, table: Any, numbers: Any) -> None:
    """Write sixteen numbers as `put_named_bf16` looks them up, rounded half to even; no NaNs."""
    _put_planes(builder, table, rounded_to_bf16(builder, numbers))


@instructions(types.void, types.intp, lanes_type)
def put_table_f32(builder: Any, table: Any, numbers: Any) -> None:
    """Write sixteen numbers as `put_named_f32` looks them up."""
    _put_planes(builder, table, builder.bitcast(numbers, INTS))


def _put_planes(builder: Any, table: Any, numbers: Any) -> None:
    """Write the lowest bytes of sixteen numbers, twice, then those above, up to the highest."""
    for place in range(numbers.type.element.width // 8):
        shifted = builder.lshr(numbers, constant(8 * place, numbers.type))
        plane = builder.trunc(shifted, ir.VectorType(I8, LANES))
        write(builder, after(builder, table, PART * place), joined(builder, plane, plane))


@instructions(types.void, *[types.intp] * 5)
def put_named_bf16(builder: Any, out: Any, codes: Any, part: Any, first: Any, second: Any) -> None:
    """Write what the 32 nibbles of a part stand for in the table of each half of it, as bfloat16."""
    planes = _named(builder, _part(builder, codes, part), first, second, 2)
    write(builder, out, _woven(builder, *planes))


@instructions(types.void, *[types.intp] * 5)
def put_named_f32(builder: Any, out: Any, codes: Any, part: Any, first: Any, second: Any) -> None:
    """The same as float32."""
    planes = _named(builder, _part(builder, codes, part), first, second, 4)
    low, high = _woven(builder, *planes[:2]), _woven(builder, *planes[2:])
    places = [at for column in range(PART) for at in (column, PART + column)]
    write(builder, out, builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * PART), places)))


def _named(builder: Any, nibbles: Any, first: Any, second: Any, planes: int) -> list[Any]:
    """The bytes of what nibbles stand for, as they lie: 8 of each half of the part in turns."""
    halves = [byte + PART * (byte // 8 % 2) for byte in range(PART)]
    found = []
    for place in range(planes):
        both = [_lut(builder, after(builder, table, PART * place), nibbles) for table in (first, second)]
        found.append(builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, PART), halves)))
    return found


def _widened(builder: Any, halves: Any) -> Any:
    """Sixteen half-precision numbers, given as int16, as float32."""
    if processor.has("f16c") or processor.is_arm():
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    return widen_halves(builder, builder.zext(halves, INTS))


@instructions(lanes_type, types.intp)
def half_floats(builder: Any, address: Any) -> Any:
    """Sixteen half-precision numbers, widened."""
    return _widened(builder, read(builder, address, ir.VectorType(I16, LANES)))


@instructions(lanes_type, types.intp)
def e4m3_floats(builder: Any, address: Any) -> Any:
    """Sixteen finite numbers of E4M3, times 2**-8: as half precision they have another bias."""
    sixteen = ir.VectorType(I16, LANES)
    wide = builder.sext(read(builder, address, ir.VectorType(I8, LANES)), sixteen)
    halves = builder.and_(builder.shl(wide, constant(7, sixteen)), constant(-0x4080, sixteen))
    return _widened(builder, halves)


@instructions(lanes_type, types.intp)
def e5m2_floats(builder: Any, address: Any) -> Any:
    """Sixteen numbers of E5M2: half precision without its lower byte."""
    sixteen = ir.VectorType(I16, LANES)
    wide = builder.zext(read(builder, address, ir.VectorType(I8, LANES)), sixteen)
    return _widened(builder, builder.shl(wide, constant(8, sixteen)))


@instructions(lanes_type, types.intp)
def byte_floats(builder: Any, address: Any) -> Any:
    """Sixteen int8 as float32."""
    return builder.sitofp(read(builder, address, ir.VectorType(I8, LANES)), FLOATS)


@instructions(lanes_type, lanes_type, types.intp, lanes_type)
def rounded_to(builder: Any, value: Any, bits: Any, least: Any) -> Any:
    """Numbers rounded half to even to a float type of so many bits of fraction, still as float32.

    `least` is the type's smallest normal number, below which its steps get no finer. Adding and taking
    away 1.5 * 2**(23 - bits) times the number's power of two leaves no bits behind those.
    """
    power = builder.and_(builder.bitcast(value, INTS), constant(0x7F800000))
    power = builder.bitcast(power, FLOATS)
    small = builder.fcmp_ordered("<", power, least)
    power = builder.select(small, least, power)
    shift = builder.sub(ir.Constant(I64, 127 + 23), bits)
    exponent = builder.trunc(builder.shl(shift, ir.Constant(I64, 23)), I32)
    two = builder.bitcast(spread(builder, exponent, INTS), FLOATS)
    magic = builder.fmul(builder.fmul(power, two), constant(1.5, FLOATS))
    return builder.fsub(builder.fadd(value, magic), magic)
