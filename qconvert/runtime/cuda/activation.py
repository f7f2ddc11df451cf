"""Holds what flows between the kernels of a decode step: rows, their group sums, and partial sums.

A matmul reads `Rows` and leaves `Parts`; every other kernel reads `Parts` and leaves `Rows`. So a
sum that was split for speed is finished, always in the same order, by the kernel that needs it.
Legend: M rows (sequences), K columns, G groups of columns, S parts of a sum, N out features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The input of a matmul: `x_MK` bfloat16, and the float32 sums of its groups of columns.

    `sums_GM` sums what `x_MK` holds, after rounding, in groups of `group` columns, a power of two of
    at most 128; groups beyond K are zero. Both are None and 0 for a weight that needs no sums.
    """

    x_MK: Tensor
    sums_GM: Tensor | None
    group: int


def empty_rows(rows: int, width: int, group: int, device: torch.device, groups: int = 0) -> Rows:
    """Room for rows whose next weight has groups of `group` columns (0: it needs no sums).

    `groups` counts the groups of a weight whose columns are padded.
    """
    x_MK = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    if not group:
        return Rows(x_MK, None, 0)
    return Rows(x_MK, torch.zeros(groups or -(-width // group), rows, device=device), group)


@dataclass(frozen=True, slots=True)
class Parts:
    """The output of a matmul: the float32 sum over S of `parts_SMN`, plus `bias_N` where there is one."""

    parts_SMN: Tensor
    bias_N: Tensor | None = None


@triton.jit
def rounded(x, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """x to the nearest bfloat16, as float32; by its bits where the interpreter would truncate."""
    if UPCAST:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def total(parts, bias, at, mask, stride, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, bias_at):  # type: ignore[no-untyped-def]
    """The sum over the parts at offsets `at`, in ascending order, plus the bias at `bias_at`."""
    x = tl.load(parts + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(parts + split * stride + at, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    x, y, sums, row, rows, width, first, stop,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Columns [first, stop) of a row, the beginning of x [BLOCK], rounded; and the sums of their groups."""
    column = first + tl.arange(0, BLOCK)
    x = rounded(x, UPCAST)
    tl.store(y + row * width + column, x.to(tl.bfloat16), mask=column < stop)
    if GROUP:
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        group_sums = tl.sum(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
        tl.store(sums + group * rows + row, group_sums, mask=group * GROUP < stop)
