"""Multiplies a tile of bytes: some rows of input in 8 bits by some of a panel's 64 rows, exact in each group.

Processors with VNNI add four products to 32 bits at once. AVX2 adds two products to 16 bits, so how many
such sums fit there before they are widened, a tile's `chain`, is decided by the largest code: eight codes
of up to 8 each, as symmetric nibbles have, four of up to 16, one of up to 64.
Arguments are byte addresses and sizes in bytes, but for counts; panels are those of `tile_dots.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES, entry, multiply_add, spread
from qconvert.runtime.cpu.coded_dots import as_bytes, by_parts, pair_sums, small_pair_sums
from qconvert.runtime.cpu.simd import (
    I16,
    I32,
    INTS,
    after,
    constant,
    instructions,
    read,
    rounded_to_bf16,
    times,
    write,
)
from qconvert.runtime.cpu.tile_dots import LINE, VECTOR, WORD, held_from, row_addresses

_WIDE, _AVX2 = processor.has("avx512bw"), processor.has("avx2")
_QUADS = [
    (bits, bits // 32) for feature, bits in (("avx512vnni", 512), ("avxvnni", 256)) if processor.has(feature)
]
"""Widths, in bits and words, of the instructions that add four products at once."""
_LANES = LANES // 2 if _AVX2 and not _WIDE else LANES
"""Of a register: LLVM, given two of AVX2 as one vector, computes the first of all, then the second, and
keeps the copies of an input's word for that in memory."""
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(I32, _LANES)
_SHORTS = ir.VectorType(I16, 2 * _LANES)
_STEP = WORD * _LANES
BYTE_ROWS, _VECTORS = (3, 4) if _WIDE else (4, 2) if _AVX2 else (2, 1)
"""Rows of input and vectors of outputs that sums are held for: half of the registers, since the sums so far
are held in float32 too."""
TILE_ROWS = _LANES * _VECTORS
"""Rows of a panel that a tile multiplies."""
_MOST_SHORT, _MOST_BYTE = (1 << 15) - 1, 255
_SIGNATURE = types.void(*[types.intp] * 14)


def chain_of(reach: int, columns: int) -> int:
    """How many sums of two products, of unsigned bytes by codes of up to `reach`, fit 16 bits together.

    A power of two, at most what `columns` columns have; 0 where none fits, or nothing is gained.
    """
    if _QUADS or not _AVX2:
        return 0
    fit = min(_MOST_SHORT // (2 * _MOST_BYTE * reach), columns // WORD)
    return 1 << fit.bit_length() - 1 if fit else 0


def quad_sums(builder: Any, sums: Any, bytes_: Any, codes: Any, *, small: bool = False) -> Any:
    """Sums and the products of four unsigned bytes by four signed ones, in each word of vectors of int32.

    With `small`, two products fit 16 bits together.
    """
    count = sums.type.count
    for bits, words in _QUADS:
        if words <= count:
            name = f"llvm.x86.avx512.vpdpbusd.{bits}"
            return by_parts(builder, name, ir.VectorType(I32, words), words, sums, bytes_, codes)
    shorts = ir.VectorType(I16, 2 * count)
    if small and _AVX2:
        pairs = small_pair_sums(builder, *(as_bytes(builder, x) for x in (bytes_, codes)))
        return builder.add(sums, pair_sums(builder, pairs, constant(1, shorts)))
    eight, low = constant(8, shorts), constant(255, shorts)
    x, w = builder.bitcast(bytes_, shorts), builder.bitcast(codes, shorts)
    even = pair_sums(builder, builder.and_(x, low), builder.ashr(builder.shl(w, eight), eight))
    odd = pair_sums(builder, builder.lshr(x, eight), builder.ashr(w, eight))
    return builder.add(sums, builder.add(even, odd))


class _Sums:
    """The sums of a group for one row and one vector of outputs, which a chain's products are added to."""

    def __init__(self, builder: Any, first: Any, chain: int) -> None:
        self._builder, self._whole, self._chain = builder, first, chain
        self._pairs, self._count = None, 0

    def add(self, bytes_: Any, codes: Any) -> None:
        """Add the products of four unsigned bytes by four codes in each lane."""
        if not self._chain:
            self._whole = quad_sums(self._builder, self._whole, bytes_, codes)
            return
        two = small_pair_sums(self._builder, *(as_bytes(self._builder, x) for x in (bytes_, codes)))
        self._pairs = two if self._pairs is None else self._builder.add(self._pairs, two)
        self._count += 1
        if self._count % self._chain == 0:
            wide = pair_sums(self._builder, self._pairs, constant(1, _SHORTS))
            self._whole, self._pairs = self._builder.add(self._whole, wide), None

    @property
    def latest(self) -> Any:
        """What was computed last."""
        return self._whole if self._pairs is None else self._pairs

    @latest.setter
    def latest(self, value: Any) -> None:
        if self._pairs is None:
            self._whole = value
        else:
            self._pairs = value

    def as_floats(self) -> Any:
        """The sums, when all products are in."""
        return self._builder.sitofp(self._whole, _FLOATS)


def _tile(columns: int, corrected: bool, chain: int) -> Any:
    """The instructions of `byte_tile`."""
    lines = columns // WORD

    @instructions(types.void, *[types.intp] * 14)
    def tile(
        builder: Any, panel: Any, starts: Any, scales: Any, mins: Any, bias: Any, x: Any, x_step: Any,
        steps: Any, sums: Any, step_step: Any, groups: Any, y: Any, y_step: Any, narrow: Any,
    ) -> Any:  # fmt: skip
        def vectors(at: Any, kind: Any) -> list[Any]:
            return [read(builder, after(builder, at, _STEP * v), kind) for v in range(_VECTORS)]

        held = held_from(builder, vectors(bias, _FLOATS), BYTE_ROWS)
        xs, of_x, of_sums = (
            row_addresses(builder, start, step, BYTE_ROWS)
            for start, step in ((x, x_step), (steps, step_step), (sums, step_step))
        )
        with cgutils.for_range(builder, groups) as loop:
            line = builder.add(panel, times(builder, loop.index, LINE * lines))
            here, column = times(builder, loop.index, LINE), times(builder, loop.index, columns)
            number = times(builder, loop.index, WORD)
            first = vectors(builder.add(starts, here), _INTS)
            made = [[_Sums(builder, start, chain) for start in first] for _ in xs]
            for k in range(lines):
                codes = vectors(after(builder, line, LINE * k), _INTS)
                for row, of_row in zip(xs, made, strict=True):
                    word = read(builder, after(builder, builder.add(row, column), WORD * k), I32)
                    for each, code in zip(of_row, codes, strict=True):
                        each.add(spread(builder, word, _INTS), code)
                if _AVX2 and not _WIDE:
                    _keep_order(builder, [each for of_row in made for each in of_row])
            of_w = vectors(builder.add(scales, here), _FLOATS)
            for address, of_row, registers in zip(of_x, made, held, strict=True):
                step = _float_everywhere(builder, builder.add(address, number))
                for each, scale, register in zip(of_row, of_w, registers, strict=True):
                    product = builder.fmul(each.as_floats(), step)
                    builder.store(multiply_add(builder, product, scale, builder.load(register)), register)
            if corrected:
                of_m = vectors(builder.add(mins, here), _FLOATS)
                for address, registers in zip(of_sums, held, strict=True):
                    sum_ = _float_everywhere(builder, builder.add(address, number))
                    for least, register in zip(of_m, registers, strict=True):
                        builder.store(multiply_add(builder, sum_, least, builder.load(register)), register)
        _put(builder, row_addresses(builder, y, y_step, BYTE_ROWS), held, narrow)

    return tile


def _keep_order(builder: Any, made: list[_Sums]) -> None:
    """Have what was added so far computed here, by an empty piece of assembly that takes and gives it.

    LLVM would compute the sums of one register after the other, and keep in memory the words of all rows
    that the next ones need, too: 2.1 times as long for symmetric nibbles on a Zen 3.
    """
    sums = [each.latest for each in made]
    kinds = [value.type for value in sums]
    places = ",".join(["=x"] * len(sums) + [str(i) for i in range(len(sums))])
    code = ir.InlineAsm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", places, side_effect=True)
    kept = builder.call(code, sums)
    for i, each in enumerate(made):
        each.latest = builder.extract_value(kept, i)


def _float_everywhere(builder: Any, address: Any) -> Any:
    return spread(builder, read(builder, address, ir.FloatType()), _FLOATS)


def _put(builder: Any, starts: list[Any], held: list[list[Any]], narrow: Any) -> None:
    """Write outputs as float32, or rounded to bfloat16."""
    is_narrow = builder.icmp_unsigned("!=", narrow, ir.Constant(narrow.type, 0))
    with builder.if_else(is_narrow) as (to_bf16, to_float):
        with to_bf16:
            for start, registers in zip(starts, held, strict=True):
                for v, register in enumerate(registers):
                    halves = rounded_to_bf16(builder, builder.load(register))
                    write(builder, after(builder, start, _STEP // 2 * v), halves)
        with to_float:
            for start, registers in zip(starts, held, strict=True):
                for v, register in enumerate(registers):
                    write(builder, after(builder, start, _STEP * v), builder.load(register))


@lru_cache
def byte_tile(columns: int, corrected: bool, chain: int) -> Any:
    """Code, called by its `address`, that multiplies `BYTE_ROWS` rows of input by `TILE_ROWS` of a panel.

    Integer sums over each group of `columns` are exact; times both scales, they are added in float32 to the
    bias. Arguments, for `call_tile`: of the panel, its address, `starts` (-128 times the sums of codes,
    int32), `scales` and `mins` (float32; read where `corrected`): lines of 64 numbers, one for each group;
    the bias of its rows. Of the input, bytes that are codes plus 128, and what a row of them takes; `steps`,
    the scales of groups, `sums`, theirs, and what a row of these takes; how many groups. Of the output, its
    address, what a row takes, and whether numbers are rounded to bfloat16.
    """
    tile = _tile(columns, corrected, chain)

    def kernel(  # type: ignore[no-untyped-def]
        panel, starts, scales, mins, bias, x, x_step, steps, sums, step_step, groups, y, y_step, narrow
    ):  # fmt: skip
        tile(panel, starts, scales, mins, bias, x, x_step, steps, sums, step_step, groups, y, y_step, narrow)

    name = f"byte_tile_{columns}_{int(corrected)}_{chain}"
    kernel.__name__ = kernel.__qualname__ = name  # the name under which its code is cached
    return entry(kernel, _SIGNATURE)


@instructions(types.void, *[types.intp] * 15)
def call_tile(
    builder: Any, tile: Any, panel: Any, starts: Any, scales: Any, mins: Any, bias: Any, x: Any, x_step: Any,
    steps: Any, sums: Any, step_step: Any, groups: Any, y: Any, y_step: Any, narrow: Any,
) -> None:  # fmt: skip
    """Call the code at an address that `byte_tile` gave."""
    args = (panel, starts, scales, mins, bias, x, x_step, steps, sums, step_step, groups, y, y_step, narrow)
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.inttoptr(tile, kind.as_pointer()), args)


@instructions(types.void, *[types.intp] * 3)
def sums_to_take(builder: Any, panel: Any, lines: Any, out: Any) -> Any:
    """Write `starts` of a group of `lines` words: -128 times the sums of its codes, for each row."""
    signs = constant(-0x7F7F7F80, INTS)  # four bytes of 128
    for at in range(0, LINE, VECTOR):
        register = cgutils.alloca_once_value(builder, constant(0))  # type: ignore[no-untyped-call]
        builder.store(constant(0), register)
        with cgutils.for_range(builder, lines) as loop:
            line = builder.add(panel, times(builder, loop.index, LINE))
            codes = read(builder, after(builder, line, at), INTS)
            builder.store(quad_sums(builder, builder.load(register), signs, codes), register)
        write(builder, after(builder, out, at), builder.sub(constant(0), builder.load(register)))
