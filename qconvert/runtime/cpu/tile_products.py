"""Multiplies many rows of input by weights, a panel of 64 rows of the weight at a time.

What a panel holds is laid out once, stays in the second-level cache, and meets all rows of the input. Threads
take panels of their own. Where rows are no whole number of tiles, or a weight of panels, the last ones
begin earlier and compute some outputs again. Legend: N rows of the input, I in features, O out features,
G groups of columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import routine
from qconvert.runtime.cpu.tile_dots import FLOAT_ROWS, PANEL, float_tile, lay_words

_LINE = 4 * PANEL
_LAID = 32
"""Columns of bfloat16 that `lay_words` takes."""


def fills_tiles(x_NI: Tensor, out: int) -> bool:
    """Whether the processor multiplies bfloat16 numbers, the input is of them, and products fill tiles."""
    fits = len(x_NI) >= FLOAT_ROWS and out >= PANEL and x_NI.shape[1] % _LAID == 0
    narrow = x_NI.dtype == torch.bfloat16 and x_NI.device.type == "cpu"
    return fits and narrow and processor.multiplies_bf16()


def multiplies_bf16(x_NI: Tensor, w_OI: Tensor) -> bool:
    """Whether `multiply_bf16` computes this product."""
    narrow = w_OI.dtype == torch.bfloat16 and w_OI.device.type == "cpu" and w_OI.stride(1) == 1
    return narrow and fills_tiles(x_NI, w_OI.shape[0])


def multiply_bf16(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """`x W^T` of bfloat16 numbers, summed and given in float32: [N, O].

    Twice as fast as widening both, whose products are the same. Check `multiplies_bf16` first.
    """
    x_NI = x_NI.contiguous()
    rows, width = w_OI.shape
    y_NO = torch.empty(len(x_NI), rows)
    panels = torch.empty(torch.get_num_threads(), width // 2, PANEL)
    _multiply_bf16(
        w_OI.data_ptr(), 2 * w_OI.stride(0), rows, x_NI.data_ptr(), len(x_NI), width,
        y_NO.data_ptr(), panels.data_ptr(),
    )  # fmt: skip
    return y_NO


@routine
def _multiply_bf16_share(w, w_step, rows, x, tokens, width, y, panel, rank, size):  # type: ignore[no-untyped-def]
    """A thread's panels of a product; all but counts are byte addresses and sizes."""
    panel += 2 * width * PANEL * rank
    panels, ones = (rows + PANEL - 1) // PANEL, np.ones(PANEL, np.float32)
    for p in range(panels * rank // size, panels * (rank + 1) // size):
        first = min(PANEL * p, rows - PANEL)
        lay_panel(w + w_step * first, w_step, width // 2, panel)
        multiply_panel(panel, width, 1, ones.ctypes.data, x, 2 * width, tokens, y + 4 * first, 4 * rows)


_multiply_bf16 = SharedKernel(_multiply_bf16_share)


@routine
def multiply_panel(panel, width, groups, scales, x, x_step, tokens, y, y_step):  # type: ignore[no-untyped-def]
    """Products of all tokens with a panel of bfloat16 numbers, whose groups of columns have scales."""
    for i in range(0, tokens, FLOAT_ROWS):
        token = min(i, tokens - FLOAT_ROWS)
        row, out = x + x_step * token, y + y_step * token
        float_tile(panel, width // 2 // groups, groups, scales, row, x_step, out, y_step)


@routine
def lay_panel(w, w_step, words, panel):  # type: ignore[no-untyped-def]
    """Lay `words` words, a multiple of 16, of 64 rows into a panel."""
    for k in range(0, words, LANES):
        for row in range(0, PANEL, LANES):
            lay_words(w + w_step * row + 4 * k, w_step, panel + _LINE * k + 4 * row)
