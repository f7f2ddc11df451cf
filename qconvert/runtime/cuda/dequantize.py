"""Dequantizes packed weights to bf16, for products with many rows: the weight is read once, a plain
matrix product of the library does the rest.

Legend: R rows of the weight asked for, K in features, N out features, J groups of a tile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from qconvert.runtime.cuda.matmul import kernel_arguments
from qconvert.runtime.cuda.tiles import TILE, TiledGrid
from qconvert.runtime.cuda.triton_language import INTERPRET
from qconvert.runtime.cuda.unpack import low_bits, nibbles, scales_of, sign_bits, zeros_of

SCRATCH_BYTES = 256 << 20
"""The bfloat16 block that dequantizing for a product may hold: a whole weight of an 8B model."""
_WARPS = 8


@triton.jit
def by_column(part_NJ: tl.tensor, N: tl.constexpr, J: tl.constexpr) -> tl.tensor:
    """What every row has by group, as what every column has: [N, J] to [N, 128]."""
    return tl.reshape(tl.broadcast_to(tl.reshape(part_NJ, (N, J, 1)), (N, J, 128 // J)), (N, 128))


@triton.jit
def dequantize_tile(
    words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    width: tl.tensor, first: tl.tensor, tiles: tl.tensor, out_row: tl.tensor,
    BITS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr, CHANNEL: tl.constexpr, J: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    """One tile, to out [rows, K]: `scale * (code - zero)` in float32, rounded once to the type of out."""
    N: tl.constexpr = 128
    WORDS: tl.constexpr = 4 * BITS
    UNIT: tl.constexpr = 2 if SCALE == "f32" else 1
    down, across = tl.program_id(0), tl.program_id(1)
    tile = (first + down) * tiles + across
    at = first + down if CHANNEL else tile
    n, k, word, j = tl.arange(0, N), tl.arange(0, 128), tl.arange(0, WORDS), tl.arange(0, J)
    in_tile = (word // 4 * 512 + word % 4)[None, :] + n[:, None] * 4
    words = tl.load(words_ptr + tile.to(tl.int64) * (128 * WORDS) + in_tile)
    if BITS == 4:
        numbers = nibbles(words, N, UPCAST).to(tl.float32)
    else:
        numbers = low_bits(words, N, UPCAST).to(tl.float32) + sign_bits(words, N, UPCAST).to(tl.float32)
    if ZEROS:
        zeros = tl.load(zeros_ptr + at * (32 * J) + tl.arange(0, 32)[:, None] * J + j[None, :])
        numbers -= by_column(zeros_of(zeros, 0, N, J, BITS), N, J)
    elif BITS == 4:
        numbers -= 136.0
    scales_ptr += (at * (64 * J) + tl.arange(0, 64)[:, None] * J + j[None, :]) * UNIT
    if SCALE == "f32":
        scales_ptr = scales_ptr[:, :, None] + tl.arange(0, 2)[None, None, :]
    numbers *= by_column(scales_of(tl.load(scales_ptr), N, J, SCALE), N, J)
    row, column = down * 128 + n[:, None], across * 128 + k[None, :]
    inside = (row < rows) & (column < width)
    place = row.to(tl.int64) * out_row + column
    tl.store(out_ptr + place, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize(
    weight: TiledGrid, start: int = 0, stop: int | None = None, out_RK: Tensor | None = None
) -> Tensor:
    """Rows [start, stop) of the weight, [R, K] in its compute dtype: what `weight.rows` gives.

    `start` is the first row of a tile. Written to `out_RK` when given, in its dtype.
    """
    stop = weight.shape[0] if stop is None else stop
    assert start % TILE == 0
    if out_RK is None:
        shape = (stop - start, weight.shape[1])
        out_RK = torch.empty(shape, dtype=weight.dtype, device=weight.words.device)
    rows, width = out_RK.shape
    tiles = weight.words.shape[1]
    stored, how = kernel_arguments(weight)
    dequantize_tile[-(-rows // TILE), tiles](
        *stored, out_RK, rows, width, start // TILE, tiles, out_RK.stride(0),
        **how, UPCAST=INTERPRET, num_warps=_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out_RK


def multiply_many(x: Tensor, weight: TiledGrid, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b` of any number of rows, [..., N] in bfloat16, a bounded block of W after the other."""
    outs, width = weight.shape
    block = max(1, SCRATCH_BYTES // (2 * width * TILE)) * TILE
    if outs <= block:
        return F.linear(x, dequantize(weight), bias_O)
    y = x.new_empty(*x.shape[:-1], outs)
    scratch_RK = torch.empty(block, width, dtype=weight.dtype, device=x.device)
    for start in range(0, outs, block):
        stop = min(start + block, outs)
        w_RK = dequantize(weight, start, stop, scratch_RK[: stop - start])
        bias = None if bias_O is None else bias_O[start:stop]
        y[..., start:stop] = F.linear(x, w_RK, bias)
    return y
