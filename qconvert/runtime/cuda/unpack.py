"""Unpacks words into numbers on the device; all of it is moving bits, and exact.

A bfloat16 of 0x43.. is 128 plus its low 7 bits: OR-ing a code into 0x4300 makes the number without a
conversion (the trick of Marlin and its descendants, there for float16). Sixteen bits of a word at a
time, because its halves hold two neighbours (see `packing.py`). The reshapes and permutations state the
order of columns that a word has by its place, and compile to nothing.
Legend: N rows of a tile, K its 128 columns, J groups of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODE_ASM = tl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;")
LOW_ASM = tl.constexpr("lop3.b32 $0, $1, 0x007F007F, 0x43004300, 0xEA;")
SIGN_ASM = tl.constexpr("lop3.b32 $0, $1, 0x00800080, 0xC300C300, 0xEA;")


@triton.jit
def halves(pairs: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Words of two bfloat16, [N, 64], as bfloat16 [N, 128]."""
    even = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(even, odd), (N, 128))


@triton.jit
def and_or(
    words: tl.tensor, MASK: tl.constexpr, ONES: tl.constexpr, ASM: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tensor:
    """`(words & MASK) | ONES`, in one instruction, which is `ASM`.

    ptxas 12.8 (triton 3.6, 3.7) makes two of it rather than keep one of the constants in a register:
    2.6 instead of 2.1 instructions per int4 weight. Written as `lop3` (whose table 0xEA is that formula)
    it stays what it is. The interpreter has no assembly: `PLAIN`.
    """
    if PLAIN:
        return (words & MASK) | ONES
    return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def nibbles(words: tl.tensor, N: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Words of 4-bit codes, int32 [N, 16], as bfloat16 `128 + code` [N, 128]."""
    a0 = and_or(words, 0x000F000F, 0x43004300, CODE_ASM, PLAIN)
    a1 = and_or(words >> 4, 0x000F000F, 0x43004300, CODE_ASM, PLAIN)
    a2 = and_or(words >> 8, 0x000F000F, 0x43004300, CODE_ASM, PLAIN)
    a3 = and_or(words >> 12, 0x000F000F, 0x43004300, CODE_ASM, PLAIN)
    by_place = tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), (N, 4, 4, 4))  # row, block, t, a
    return halves(tl.reshape(tl.permute(by_place, (0, 1, 3, 2)), (N, 64)), N)


@triton.jit
def low_bits(words: tl.tensor, N: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """Words of signed bytes, int32 [N, 32], as bfloat16 [N, 128]: 128 plus their low 7 bits."""
    a0 = and_or(words, 0x007F007F, 0x43004300, LOW_ASM, PLAIN)
    a1 = and_or(words >> 8, 0x007F007F, 0x43004300, LOW_ASM, PLAIN)
    return bytes_in_order(a0, a1, N)


@triton.jit
def sign_bits(words: tl.tensor, N: tl.constexpr, PLAIN: tl.constexpr) -> tl.tensor:
    """The rest of them: -128, or -256 for a negative byte, so that the two sum to the signed number.

    The bfloat16 of 0xC300 is -128, and its bit 7 the lowest of the exponent.
    """
    a0 = and_or(words, 0x00800080, -0x3CFF3D00, SIGN_ASM, PLAIN)  # 0xC300C300
    a1 = and_or(words >> 8, 0x00800080, -0x3CFF3D00, SIGN_ASM, PLAIN)
    return bytes_in_order(a0, a1, N)


@triton.jit
def bytes_in_order(a0: tl.tensor, a1: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Even and odd bytes of the halves of words, each [N, 32], as bfloat16 [N, 128]."""
    by_place = tl.reshape(tl.join(a0, a1), (N, 8, 4, 2))  # row, block, t, a
    return halves(tl.reshape(tl.permute(by_place, (0, 1, 3, 2)), (N, 64)), N)


@triton.jit
def scales_of(raw: tl.tensor, N: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Scales as float32 [N, J]: from words of two of 16 bits [N / 2, J], or from float32 [N / 2, J, 2]."""
    if KIND == "f32":
        pairs = raw
    elif KIND == "bf16":
        even = (raw << 16).to(tl.float32, bitcast=True)
        odd = (raw & -0x10000).to(tl.float32, bitcast=True)
        pairs = tl.join(even, odd)
    else:
        even = (raw & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        odd = (raw >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        pairs = tl.join(even, odd).to(tl.float32)
    return tl.reshape(tl.permute(tl.reshape(pairs, (N // 16, 8, J, 2)), (0, 3, 1, 2)), (N, J))


@triton.jit
def zeros_of(
    words: tl.tensor, half: tl.tensor, N: tl.constexpr, J: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """What is taken off the codes, float32 [N, J], from words of four zeros [32, J].

    That is 128 + zero for codes of 4 bits, and zero - 128 for bytes. Of a tile's rows, the N from 64
    times `half` on.
    """
    if N == 64:
        words = words >> (16 * half)
    z0, z1 = zero(words << 16, BITS), zero(words << 8, BITS)
    if N == 64:
        rows = tl.reshape(tl.join(z0, z1), (1, 4, 8, J, 1, 2))
    else:
        z2, z3 = zero(words, BITS), zero(words >> 8, BITS)
        rows = tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (1, 4, 8, J, 2, 2))
    return tl.reshape(tl.permute(rows, (0, 4, 1, 5, 2, 3)), (N, J))


@triton.jit
def zero(at_16: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The byte from bit 16 on as `zeros_of` wants it: an integer OR-ed into the float32 of a power of two."""
    if BITS == 4:
        return ((at_16 & 0x00FF0000) | 0x43000000).to(tl.float32, bitcast=True)  # 2**7 + zero below 2**8
    return (((at_16 >> 8) & 0xFF00) | 0x47000000).to(tl.float32, bitcast=True) - 32896.0  # 2**15 + zero
