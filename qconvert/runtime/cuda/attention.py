"""Attends with one new token per sequence over a static cache, its keys split among programs.

Few key-value heads cannot fill a device with one program each, so the positions before the token
are cut into a fixed number of stretches whose bounds follow from the position, which the kernel
reads on the device: one captured launch serves every position. `attend` leaves a softmax of every
stretch, `combine` makes one of them. The token itself belongs to the first stretch, from registers.
Legend: M sequences, H heads, K key-value heads, Q heads that share one of them, E head dimension,
P stretches, T positions, S parts of a sum, F = (H + 2 K) E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qconvert.runtime.cuda.activation import Parts, Rows, rounded, store_rows, total
from qconvert.runtime.cuda.triton_language import INTERPRET

BLOCK_POSITIONS = 64
"""Positions that a program reads at a time; a stretch is a multiple of them."""
_COLUMNS = 128
"""Columns that a program of `combine` makes whole heads of; every group of sums divides them."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer; `window` is the number of positions, its own included, that a token sees."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    @property
    def shared(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query and key heads, weights [E]."""

    q_E: Tensor
    k_E: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where the token goes: its position on the device, and the rotation of every position.

    `position_1` int64; `cos_TE` and `sin_TE` float32 as `rope.cos_sin` gives them.
    """

    position_1: Tensor
    cos_TE: Tensor
    sin_TE: Tensor


@dataclass(frozen=True, slots=True)
class Softmaxes:
    """An unfinished softmax per stretch and head, float32: scores are in powers of two.

    `max_MHP` the largest score, minus infinity for a stretch without positions; `sum_MHP` the sum of
    `2^(score - max)`; `value_MHPE` the values weighted so. Where the maximum is minus infinity, the
    other two mean nothing.
    """

    max_MHP: Tensor
    sum_MHP: Tensor
    value_MHPE: Tensor


def empty_softmaxes(rows: int, shape: HeadShape, stretches: int, device: torch.device) -> Softmaxes:
    """Room for the softmaxes of `stretches` stretches."""
    counts = (rows, shape.heads, stretches)
    return Softmaxes(
        torch.empty(counts, device=device),
        torch.empty(counts, device=device),
        torch.empty(*counts, shape.head_dim, device=device),
    )


def stretches_for(shape: HeadShape, rows: int, processors: int) -> int:
    """A power of two of stretches, up to 64, that gives every multiprocessor about one program."""
    wanted = max(1, processors // (rows * shape.kv_heads))
    return min(64, 1 << (wanted.bit_length() - 1))


def attend(
    qkv: Parts, norms: HeadNorms | None, shape: HeadShape, place: Place, cache_2MKTE: Tensor, out: Softmaxes
) -> None:
    """Heads from `qkv`, normalised and rotated; key and value into the cache; a softmax per stretch.

    Query, key and value are rounded to bfloat16 once, after their rotation; `score = q . k / sqrt(E)
    log2(e)`. Writes the cache at the position. One launch, a program per stretch, key-value head and
    sequence.
    """
    rows, _, stretches = out.max_MHP.shape
    parts, bias = qkv.parts_SMN, qkv.bias_N
    keys = cache_2MKTE[0]
    _attend[(stretches, shape.kv_heads, rows)](
        parts, parts if bias is None else bias, parts if norms is None else norms.q_E,
        parts if norms is None else norms.k_E, place.position_1, place.cos_TE, place.sin_TE, keys,
        cache_2MKTE[1], out.max_MHP, out.sum_MHP, out.value_MHPE, parts.stride(0), parts.stride(1),
        keys.stride(0), keys.stride(1), 1e-6 if norms is None else norms.eps,
        _LOG2_E / math.sqrt(shape.head_dim),
        SPLITS=len(parts), HAS_BIAS=bias is not None, HAS_NORMS=norms is not None, HEADS=shape.heads,
        SHARED=shape.shared, KV_HEADS=shape.kv_heads, WIDTH=shape.head_dim, WINDOW=shape.window or 0,
        STRETCHES=stretches, BLOCK_Q=max(16, triton.next_power_of_2(shape.shared)),
        BLOCK_E=max(16, triton.next_power_of_2(shape.head_dim)), BLOCK_T=BLOCK_POSITIONS, UPCAST=INTERPRET,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotated_head(  # type: ignore[no-untyped-def]
    parts, bias, norm, head_column, row_at, mask, cos, sin, stride, eps,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Heads [R, BLOCK_E] that begin at the columns `head_column` [R, 1], normalised and rotated."""
    e = tl.arange(0, BLOCK_E)[None, :]
    opposite = tl.where(e < WIDTH // 2, e + WIDTH // 2, e - WIDTH // 2)
    at, far = head_column + e, head_column + opposite
    x = total(parts, bias, row_at + at, mask, stride, SPLITS, HAS_BIAS, at)
    y = total(parts, bias, row_at + far, mask, stride, SPLITS, HAS_BIAS, far)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x *= scale * tl.load(norm + e, mask=e < WIDTH, other=0.0).to(tl.float32)
        y *= scale * tl.load(norm + opposite, mask=e < WIDTH, other=0.0).to(tl.float32)
    return rounded(x * cos + y * sin, UPCAST)


@triton.jit
def _product(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The matrix product of bfloat16 values, summed in float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    parts, bias, q_norm, k_norm, position_at, cos_at, sin_at, keys, values, max_out, sum_out, value_out,
    split_stride, row_stride, cache_row_stride, cache_head_stride, eps, scale,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr,
    SHARED: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    STRETCHES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    stretch, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_at).to(tl.int32)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    length = tl.cdiv(tl.cdiv(position - first, BLOCK_T), STRETCHES) * BLOCK_T
    start = tl.minimum(first + stretch * length, position)
    stop = tl.minimum(start + length, position)
    q = tl.arange(0, BLOCK_Q)
    out_at = (row * HEADS + kv_head * SHARED + q) * STRETCHES + stretch
    if (stretch > 0) & (start >= stop):
        tl.store(max_out + out_at, tl.full((BLOCK_Q,), float("-inf"), tl.float32), mask=q < SHARED)
        return

    e = tl.arange(0, BLOCK_E)
    in_head = (e < WIDTH)[None, :]
    cos = tl.load(cos_at + position * WIDTH + e, mask=e < WIDTH, other=0.0)[None, :]
    sin = tl.load(sin_at + position * WIDTH + e, mask=e < WIDTH, other=0.0)[None, :]
    row_at = row * row_stride
    q_column = (kv_head * SHARED + q[:, None]) * WIDTH
    q_mask = in_head & (q < SHARED)[:, None]
    q_QE = _rotated_head(parts, bias, q_norm, q_column, row_at, q_mask, cos, sin, split_stride, eps,
                        SPLITS, HAS_BIAS, HAS_NORMS, WIDTH, BLOCK_E, UPCAST)  # fmt: skip

    # The token's own key and value: the first stretch stores them, and starts its softmax with them.
    own = (e < tl.where(stretch == 0, WIDTH, 0))[None, :]
    k_column = (HEADS + kv_head + tl.zeros((1, 1), tl.int32)) * WIDTH
    k_1E = _rotated_head(parts, bias, k_norm, k_column, row_at, own, cos, sin, split_stride, eps,
                        SPLITS, HAS_BIAS, HAS_NORMS, WIDTH, BLOCK_E, UPCAST)  # fmt: skip
    v_column = k_column + KV_HEADS * WIDTH + e[None, :]
    v_1E = rounded(
        total(parts, bias, row_at + v_column, own, split_stride, SPLITS, HAS_BIAS, v_column), UPCAST
    )
    cache_at = row.to(tl.int64) * cache_row_stride + kv_head.to(tl.int64) * cache_head_stride
    keys += cache_at
    values += cache_at
    tl.store(keys + position * WIDTH + e[None, :], k_1E.to(tl.bfloat16), mask=own)
    tl.store(values + position * WIDTH + e[None, :], v_1E.to(tl.bfloat16), mask=own)

    max_Q = tl.where(stretch == 0, tl.sum(q_QE * k_1E, 1) * scale, float("-inf"))
    sum_Q = tl.where(stretch == 0, 1.0, 0.0) + tl.zeros((BLOCK_Q,), tl.float32)
    value_QE = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32) + v_1E
    t = tl.arange(0, BLOCK_T)
    for block in range(start, stop, BLOCK_T):
        at_TE = (block + t)[:, None] * WIDTH + e[None, :]
        seen = (block + t < stop)[:, None] & in_head
        k_TE = tl.load(keys + at_TE, mask=seen, other=0.0)
        v_TE = tl.load(values + at_TE, mask=seen, other=0.0)
        score_QT = _product(q_QE, tl.trans(k_TE), UPCAST) * scale
        score_QT = tl.where((block + t < stop)[None, :], score_QT, float("-inf"))
        new_Q = tl.maximum(max_Q, tl.max(score_QT, 1))
        weight_QT = tl.exp2(score_QT - new_Q[:, None])
        fade_Q = tl.exp2(max_Q - new_Q)
        sum_Q = sum_Q * fade_Q + tl.sum(weight_QT, 1)
        value_QE = value_QE * fade_Q[:, None] + _product(weight_QT, v_TE, UPCAST)
        max_Q = new_Q
    tl.store(max_out + out_at, max_Q, mask=q < SHARED)
    tl.store(sum_out + out_at, sum_Q, mask=q < SHARED)
    tl.store(value_out + out_at[:, None] * WIDTH + e[None, :], value_QE, mask=q_mask)


def combine(softmaxes: Softmaxes, out: Rows) -> None:
    """`out = sum_p 2^(max_p - max) value_p / sum_p 2^(max_p - max) sum_p`, heads side by side, rounded.

    One launch, a program per row and block of whole heads and groups.
    """
    stretches, head_dim = softmaxes.value_MHPE.shape[2:]
    rows, width = out.x_MK.shape
    span = math.lcm(head_dim, _COLUMNS)
    block = triton.next_power_of_2(span)
    _combine[(triton.cdiv(width, span), rows)](
        softmaxes.max_MHP, softmaxes.sum_MHP, softmaxes.value_MHPE, out.x_MK,
        out.x_MK if out.sums_GM is None else out.sums_GM, rows, width,
        WIDTH=head_dim, STRETCHES=stretches, SPAN=span, GROUP=out.group, BLOCK=block, UPCAST=INTERPRET,
        num_warps=min(16, max(4, block * stretches // 1024)),
    )  # fmt: skip


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    maxima, sums, values, y, group_sums, rows, width,
    WIDTH: tl.constexpr, STRETCHES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    first = tl.program_id(0) * SPAN
    stop = tl.minimum(first + SPAN, width)
    column = first + tl.arange(0, BLOCK)
    inside = column < stop
    head_at = (row * (width // WIDTH) + column // WIDTH) * STRETCHES
    at = head_at[None, :] + tl.arange(0, STRETCHES)[:, None]
    # The first stretch holds the token itself, so a maximum is finite; that of padding must be too.
    largest = tl.load(maxima + at, mask=inside[None, :], other=0.0)
    there = inside[None, :] & (largest > float("-inf"))
    weight = tl.exp2(largest - tl.max(largest, 0)[None, :])
    whole = tl.sum(weight * tl.load(sums + at, mask=there, other=0.0), 0)
    held = tl.load(values + at * WIDTH + (column % WIDTH)[None, :], mask=there, other=0.0)
    value = tl.sum(weight * held, 0)
    x = value / tl.where(inside, whole, 1.0)
    store_rows(x, y, group_sums, row, rows, width, first, stop, GROUP, BLOCK, UPCAST)
