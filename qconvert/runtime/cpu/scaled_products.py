"""Multiplies many rows of bfloat16 input by codes as they are, and scales the sums of every group.

Whole codes of up to 8 bits, zeros taken away, and 8-bit floats are bfloat16 numbers, so that products are
exact: twice as fast as products of what the codes are worth, in float32.
Legend: N rows of the input, I in features, O out features, G groups of columns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, splat
from qconvert.runtime.cpu.group_scales import scales_at, zeros_at
from qconvert.runtime.cpu.packed_weights import GroupNumbers, PackedGrid
from qconvert.runtime.cpu.row_decoding import KINDS, codes_at
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import BLOCK, routine, store_bf16, store_f32
from qconvert.runtime.cpu.tile_dots import PANEL
from qconvert.runtime.cpu.tile_products import fills_tiles, lay_panel, multiply_panel


def multiplies_scaled(x_NI: Tensor, weight: PackedGrid) -> bool:
    """Whether `multiply_scaled` computes this product: codes without a table and without mins."""
    known = weight.recipe.kind != "table4" and weight.mins is None
    return known and weight.width % _group(weight) == 0 and fills_tiles(x_NI, weight.shape[0])


def multiply_scaled(x_NI: Tensor, weight: PackedGrid) -> Tensor:
    """`x W^T` of bfloat16 inputs and what the codes are worth, summed and given in float32: [N, O].

    Check `multiplies_scaled` first.
    """
    x_NI = x_NI.contiguous()
    y_NO = torch.empty(len(x_NI), weight.shape[0])
    kind, group = KINDS.index(weight.recipe.kind), _group(weight)
    _multiply(weight.record(), kind, group, x_NI.data_ptr(), len(x_NI), y_NO.data_ptr())
    return y_NO


def codes_and_scales(weight: PackedGrid) -> tuple[PackedGrid, Tensor] | None:
    """A weight whose rows have one scale each as its codes, a weight of scales of 1, and the scales, [O].

    None for smaller groups. Check `multiplies_scaled` first, too.
    """
    recipe, scales = weight.recipe, weight.scales
    if _group(weight) < weight.width or scales.super_OS is not None:
        return None
    scale_O = scales.stored_OG[:, 0].float() / recipe.divisor * recipe.factor
    ones_O1 = torch.ones(len(scale_O) + LANES)[: len(scale_O), None]  # kernels may read what lies behind
    plain = replace(recipe, divisor=1.0, factor=1.0)
    return replace(weight, scales=GroupNumbers(ones_O1), recipe=plain), scale_O


def _group(weight: PackedGrid) -> int:
    """Columns that share a scale, in a row of this width."""
    return min(weight.recipe.group, weight.width)


@routine
def _multiply_share(linears, kind, group, x, tokens, y, rank, size):  # type: ignore[no-untyped-def]
    """A thread's panels of the product."""
    linear = linears[0]
    rows, width = linear.rows, linear.width
    groups, panels = width // group, (rows + PANEL - 1) // PANEL
    plain, panel = np.empty((PANEL, width), np.uint16), np.empty(PANEL * width, np.uint16)
    own, scales = np.empty((2, groups + LANES), np.float32), np.empty((groups, PANEL), np.float32)
    for p in range(panels * rank // size, panels * (rank + 1) // size):
        first = min(PANEL * p, rows - PANEL)
        for row in range(PANEL):
            _take_row(linear, kind, first + row, group, own, plain[row].ctypes.data)
            for g in range(groups):
                scales[g, row] = own[0, g]
        lay_panel(plain.ctypes.data, 2 * width, width // 2, panel.ctypes.data)
        out = y + 4 * first
        laid, of_w = panel.ctypes.data, scales.ctypes.data
        multiply_panel(laid, width, groups, of_w, x, 2 * width, tokens, out, 4 * rows)


_multiply = SharedKernel(_multiply_share)


@routine
def _take_row(linear, kind, row, group, own, out):  # type: ignore[no-untyped-def]
    """Write the codes of a row, less their zeros, as bfloat16; its scales and zeros to `own`."""
    blocks, groups = (linear.width + BLOCK - 1) // BLOCK, linear.width // group
    for g in range(0, groups, LANES):
        i = row * groups + g
        store_f32(own[0].ctypes.data + 4 * g, scales_at(linear, i) * splat(linear.factor))
        store_f32(own[1].ctypes.data + 4 * g, zeros_at(linear, i))
    for g in range(groups):
        zero = splat(own[1, g])
        for column in range(g * group, (g + 1) * group, LANES):
            store_bf16(out + 2 * column, codes_at(linear, kind, row * blocks * BLOCK + column) - zero)
