"""Adds the output of a projection to the residual stream, and normalises the sum.

The stream is float32 from the embedding to the head. Legend: S parts of a sum, M rows, D hidden,
G groups.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qconvert.runtime.cuda.activation import Parts, Rows, store_rows, total
from qconvert.runtime.cuda.triton_language import INTERPRET


def add_norm(added: Parts | None, residual_MD: Tensor, weight_D: Tensor, eps: float, out: Rows) -> None:
    """`residual += added` in place; `out = residual / sqrt(mean(residual^2) + eps) * weight`.

    All in float32 but for `out`, which is rounded and carries its group sums. One launch, a program per row.
    """
    rows, width = residual_MD.shape
    block = max(triton.next_power_of_2(width), out.group)
    parts = residual_MD[None] if added is None else added.parts_SMN
    bias_D = None if added is None else added.bias_N
    _add_norm[(rows,)](
        parts, weight_D if bias_D is None else bias_D, residual_MD, weight_D, out.x_MK,
        out.x_MK if out.sums_GM is None else out.sums_GM, parts.stride(0), rows, width, eps,
        SPLITS=0 if added is None else len(parts), HAS_BIAS=bias_D is not None, GROUP=out.group, BLOCK=block,
        UPCAST=INTERPRET,
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    parts, bias, residual, weight, y, sums, split_stride, rows, width, eps,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    weight_D = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(residual + at, mask=inside, other=0.0)
    if SPLITS:
        x += total(parts, bias, at, inside, split_stride, SPLITS, HAS_BIAS, column)
        tl.store(residual + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    store_rows(x * scale * weight_D, y, sums, row, rows, width, 0, width, GROUP, BLOCK, UPCAST)
