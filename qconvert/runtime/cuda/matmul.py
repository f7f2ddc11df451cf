"""Multiplies a few rows of x by packed weights, `x W^T`, with Triton kernels.

For few rows the weight is read once and computed with little, so a kernel is as fast as memory only if
it spends next to no instructions on a weight; on an H200, 4.0 on an int4 and 7.9 on an int8 weight
would use up all there are. Therefore
- the weight is the *left* operand of the tensor core, which may stay in registers, and x the right one;
- codes go there as exact integers `128 + code`; offset and scale follow in float32 after the product,
  `scale * (sum_k (128 + code) x - (128 + zero) sum_k x)`, with the sums of x given by the caller that made x;
- a column of the right operand is a row of x *within one group of a tile*, zero elsewhere: column
  `m J + j` holds row m in group j of J. One product of 128 columns so keeps J groups apart;
- columns are split over programs, whose float32 results the next kernel adds up: no atomics, so that the
  same input gives the same bits.

Legend: M rows of x, N out features, K in features, G groups, S splits, C columns of the right operand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qconvert.runtime.cuda import tuning
from qconvert.runtime.cuda.tiles import TILE, TiledGrid, sums_for
from qconvert.runtime.cuda.triton_language import INTERPRET
from qconvert.runtime.cuda.unpack import low_bits, nibbles, scales_of, sign_bits, zeros_of
from qconvert.runtime.storage import DenseWeight

FewRow = TiledGrid | DenseWeight
"""Weights that the kernels multiply few rows by."""
_SCALES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@triton.jit
def product(a: tl.tensor, x: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """`acc + a x` in float32; the interpreter cannot multiply bfloat16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, x, acc)


@triton.jit
def spread(part_NJ: tl.tensor, N: tl.constexpr, C: tl.constexpr, J: tl.constexpr) -> tl.tensor:
    """What every row has by group, as what every element has: [N, J] to [N, C]."""
    return tl.reshape(tl.broadcast_to(tl.reshape(part_NJ, (N, 1, J)), (N, C // J, J)), (N, C))


@triton.jit
def multiply_tiles(  # noqa: PLR0912, PLR0915
    x_ptr: tl.tensor, sums_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor,
    out_ptr: tl.tensor, rows: tl.tensor, outs: tl.tensor, width: tl.tensor, tiles: tl.tensor,
    x_row: tl.tensor, out_split: tl.tensor, out_row: tl.tensor,
    BITS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """N rows of a tile by all rows of x over one split of the columns, to out [S, M, N].

    Strides are arguments of their own: only so does the compiler see that they divide by 16, and copy 16
    bytes at a time. `EVEN`: the width is a multiple of 128. `CHANNEL`: one scale per row.
    """
    PARTS: tl.constexpr = 128 // N
    WORDS: tl.constexpr = 4 * BITS
    SUMS: tl.constexpr = ZEROS or BITS == 4
    UNIT: tl.constexpr = 2 if SCALE == "f32" else 1
    part = tl.program_id(0) % PARTS
    split, splits = tl.program_id(1), tl.num_programs(1)
    first, last = split * tiles // splits, (split + 1) * tiles // splits
    tile = tl.program_id(0) // PARTS * tiles + first
    n, c, k, word = tl.arange(0, N), tl.arange(0, C), tl.arange(0, 128), tl.arange(0, WORDS)
    pair, four, j = tl.arange(0, N // 2), tl.arange(0, 32), tl.arange(0, J)

    in_tile = (word // 4 * 512 + word % 4)[None, :] + (part * N + n)[:, None] * 4
    words_ptr += tile.to(tl.int64) * (128 * WORDS) + in_tile
    x_ptr += first * 128 + (c // J)[None, :] * x_row + k[:, None]
    mine = (k // (128 // J))[:, None] == (c % J)[None, :]
    mine = mine & (c // J < rows)[None, :]
    group = first * J + c % J
    sums_ptr += group * rows + tl.minimum(c // J, rows - 1)
    at = tl.program_id(0) // PARTS if CHANNEL else tile
    scales_ptr += (at * (64 * J) + (part * (N // 2) + pair)[:, None] * J + j[None, :]) * UNIT
    zeros_ptr += at * (32 * J) + four[:, None] * J + j[None, :]
    if SCALE == "f32":
        scales_ptr = scales_ptr[:, :, None] + tl.arange(0, 2)[None, None, :]
    if CHANNEL:
        scales = scales_of(tl.load(scales_ptr), N, J, SCALE)
        if ZEROS:
            offsets = zeros_of(tl.load(zeros_ptr), part, N, J, BITS)

    acc = tl.zeros((N, C), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        words = tl.load(words_ptr)
        x = tl.load(x_ptr, mask=mine if EVEN else mine & (k < width - step * 128)[:, None], other=0.0)
        dot = tl.zeros((N, C), tl.float32)
        if BITS == 4:
            dot = product(nibbles(words, N, UPCAST), x, dot, UPCAST)
        else:
            dot = product(low_bits(words, N, UPCAST), x, dot, UPCAST)
            dot = product(sign_bits(words, N, UPCAST), x, dot, UPCAST)
        if SUMS:
            if EVEN:
                sums = tl.load(sums_ptr)[None, :]
            else:
                sums = tl.load(sums_ptr, mask=group * (128 // J) < width, other=0.0)[None, :]
            if ZEROS:
                if not CHANNEL:
                    offsets = zeros_of(tl.load(zeros_ptr), part, N, J, BITS)
                dot -= spread(offsets, N, C, J) * sums
            else:
                dot -= 136.0 * sums
        if CHANNEL:
            acc += dot
        else:
            acc += spread(scales_of(tl.load(scales_ptr), N, J, SCALE), N, C, J) * dot
        words_ptr += 128 * WORDS
        x_ptr += 128
        sums_ptr += J * rows
        group += J
        scales_ptr += 64 * J * UNIT
        zeros_ptr += 32 * J
    if CHANNEL:
        acc *= spread(scales, N, C, J)
    if J > 1:
        acc = tl.sum(tl.reshape(acc, (N, C // J, J)), axis=2)
    m = tl.arange(0, C // J)[None, :]
    at_n = (tl.program_id(0) * N + n)[:, None]
    tl.store(out_ptr + split * out_split + m * out_row + at_n, acc, mask=(m < rows) & (at_n < outs))


@triton.jit
def multiply_rows(
    x_ptr: tl.tensor, w_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, outs: tl.tensor,
    width: tl.tensor, tiles: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, out_split: tl.tensor,
    out_row: tl.tensor,
    N: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """The same for a bfloat16 weight [N, K] as it is, 64 columns at a time."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    first, last = 2 * (split * tiles // splits), 2 * ((split + 1) * tiles // splits)
    n, m, k = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, C), tl.arange(0, 64)
    w_ptr += tl.minimum(n, outs - 1).to(tl.int64)[:, None] * w_row + (first * 64 + k)[None, :]
    x_ptr += m[None, :] * x_row + (first * 64 + k)[:, None]
    mine = (m < rows)[None, :] & (k >= 0)[:, None]
    acc = tl.zeros((N, C), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if EVEN:
            w, x = tl.load(w_ptr), tl.load(x_ptr, mask=mine, other=0.0)
        else:
            inside = k < width - step * 64
            w = tl.load(w_ptr, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr, mask=mine & inside[:, None], other=0.0)
        acc = product(w, x, acc, UPCAST)
        w_ptr += 64
        x_ptr += 64
    m, n = m[None, :], n[:, None]
    tl.store(out_ptr + split * out_split + m * out_row + n, acc, mask=(m < rows) & (n < outs))


def multiply_partials(
    x_MK: Tensor, sums_GM: Tensor | None, weight: FewRow, splits: int, out_SMN: Tensor | None = None
) -> Tensor:
    """`x W^T` as `splits` float32 summands [S, M, N], each over a part of the columns.

    The product is their sum in ascending order of S. For a quantized weight a summand is, over its groups g,
    `scale_g (sum_{k in g} q_k x_k - zero_g sums_g)`, in which scales are as stored and nothing is rounded
    to less than float32. x is bfloat16, its columns contiguous, of at most `most_rows(weight)` rows;
    `sums_GM` is `group_sums(x, weight.sum_group)`, None where that is. Nothing is allocated when `out_SMN`
    is given (contiguous, float32).
    """
    rows, width = x_MK.shape
    outs = weight.shape[0]
    assert width == weight.shape[1] and rows <= most_rows(weight) and x_MK.stride(1) == 1
    if out_SMN is None:
        out_SMN = torch.empty(splits, rows, outs, dtype=torch.float32, device=x_MK.device)
    assert out_SMN.is_contiguous() and out_SMN.shape == (splits, rows, outs)
    tiles = -(-width // TILE)
    chosen = tuning.config(weight.kind, rows * groups_of(weight))
    grid = (-(-outs // chosen.rows), splits)
    common: dict[str, Any] = {
        "N": chosen.rows,
        "C": chosen.columns,
        "EVEN": width % TILE == 0,
        "STAGES": chosen.stages,
        "UPCAST": INTERPRET,
        "num_warps": chosen.warps,
        "enable_fp_fusion": True,
    }
    sizes = (rows, outs, width, tiles, x_MK.stride(0))
    if isinstance(weight, DenseWeight):
        w_row = weight.w_OI.stride(0)
        multiply_rows[grid](
            x_MK, weight.w_OI, out_SMN, *sizes, w_row, out_SMN.stride(0), out_SMN.stride(1), **common
        )
        return out_SMN
    stored, how = kernel_arguments(weight)
    sums = x_MK if sums_GM is None else sums_GM
    strides = out_SMN.stride(0), out_SMN.stride(1)
    multiply_tiles[grid](x_MK, sums, *stored, out_SMN, *sizes, *strides, **how, **common)
    return out_SMN


def kernel_arguments(weight: TiledGrid) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Words, scales and zeros as kernels read them, and the constants that say how they are stored."""
    scales = weight.scales if weight.scales.dtype == torch.float32 else weight.scales.view(torch.int32)
    zeros = weight.words if weight.zeros is None else weight.zeros.view(torch.int32)
    constants = {
        "BITS": weight.bits,
        "SCALE": _SCALES[weight.scales.dtype],
        "ZEROS": weight.zeros is not None,
        "CHANNEL": weight.group is None,
        "J": groups_of(weight),
    }
    return (weight.words, scales, zeros), constants


def groups_of(weight: FewRow) -> int:
    """J, the groups of a tile: columns of the tensor core that a row of x takes."""
    return 1 if isinstance(weight, DenseWeight) else TILE // (weight.group or TILE)


def most_rows(weight: FewRow) -> int:
    """The most rows of x that `multiply_partials` takes with this weight: 64, 32 or 16 by its groups."""
    return tuning.WIDEST // groups_of(weight)


def multiply(x: Tensor, weight: TiledGrid, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b` of few rows, [..., N] in bfloat16; of more than `most_rows`, so many at a time."""
    x_MK = x.reshape(-1, x.shape[-1])
    splits = tuning.splits(weight.kind, weight.shape)
    y_MN = x.new_empty(len(x_MK), weight.shape[0])
    for start in range(0, len(x_MK), most_rows(weight)):
        x_RK = x_MK[start : start + most_rows(weight)]
        total_RN = multiply_partials(x_RK, sums_for(x_RK, weight), weight, splits).sum(0)
        if bias_O is not None:
            total_RN += bias_O
        y_MN[start : start + len(x_RK)] = total_RN
    return y_MN.view(*x.shape[:-1], -1)
