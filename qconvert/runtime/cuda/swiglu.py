"""Computes the gate of an MLP. Legend: S parts of a sum, M rows, I width of the MLP, G groups."""

from __future__ import annotations

import triton
import triton.language as tl

from qconvert.runtime.cuda.activation import Parts, Rows, store_rows, total
from qconvert.runtime.cuda.triton_language import INTERPRET

_COLUMNS = 512
"""Columns of a program: enough programs to fill the device where the MLP is wide."""


def swiglu(gate_up: Parts, out: Rows) -> None:
    """`out = silu(gate) * up`, where the rows of gate and up lie side by side; float32, rounded once.

    One launch, a program per row and block of whole groups.
    """
    rows, width = out.x_MK.shape
    parts, bias = gate_up.parts_SMN, gate_up.bias_N
    _swiglu[(triton.cdiv(width, _COLUMNS), rows)](
        parts, parts if bias is None else bias, out.x_MK, out.x_MK if out.sums_GM is None else out.sums_GM,
        parts.stride(0), rows, width,
        SPLITS=len(parts), HAS_BIAS=bias is not None, GROUP=out.group, BLOCK=_COLUMNS, UPCAST=INTERPRET,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    parts, bias, y, sums, split_stride, rows, width,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = total(parts, bias, at, inside, split_stride, SPLITS, HAS_BIAS, column)
    up = total(parts, bias, at + width, inside, split_stride, SPLITS, HAS_BIAS, column + width)
    x = gate / (1 + tl.exp(-gate)) * up
    store_rows(x, y, sums, row, rows, width, first, width, GROUP, BLOCK, UPCAST)
