"""Rows of packed grids as numbers, and products with few rows of input: what `linear.py` calls.

Legend: O out features (rows), I in features, N rows of the input, R rows asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, kernel, splat
from qconvert.runtime.cpu.coded_dots import (
    byte_floats,
    e4m3_floats,
    e5m2_floats,
    named_floats,
    nibble_floats,
    rounded_to,
    six_floats,
)
from qconvert.runtime.cpu.group_scales import mins_at, scales_at, zeros_at
from qconvert.runtime.cpu.packed_weights import Multipliable, PackedGrid, describe
from qconvert.runtime.cpu.simd import BLOCK, PART, put_brains, put_floats, routine
from qconvert.runtime.cpu.step_kernel import multiply
from qconvert.runtime.cpu.thread_barrier import Team

_INT4, _TABLE4, _INT6, _INT8, _E4M3, _E5M2 = range(6)
_KINDS = ("int4", "table4", "int6", "int8", "e4m3", "e5m2")


def multiply_few(x_NI: Tensor, weight: Multipliable, bias_O: Tensor | None = None) -> Tensor:
    """`x W^T + bias`, float32 [N, O]: every row of x reads the weight once.

    Of a dense weight the width must be a multiple of 16.
    """
    x_NI = x_NI.float().contiguous()
    y_NO = torch.empty(len(x_NI), weight.shape[0])
    bias_O = None if bias_O is None else bias_O.float().contiguous()
    record, team = describe(weight, bias_O), Team(torch.get_num_threads())
    team.run(lambda rank: multiply(record, x_NI.data_ptr(), y_NO.data_ptr(), len(x_NI), rank, team.size))
    return y_NO


def decode_rows(weight: PackedGrid, index: slice | Tensor) -> Tensor:
    """Rows of the weight, [R, I] in its compute dtype.

    In float32, then rounded once: the same numbers as those of the reference layout.
    """
    rows_R = torch.arange(weight.shape[0])[index].contiguous()
    out_RI = torch.empty(len(rows_R), weight.width, dtype=weight.dtype)
    brain = weight.dtype == torch.bfloat16
    kind = _KINDS.index(weight.recipe.kind)
    _decode(describe(weight), kind, rows_R.numpy(), out_RI.data_ptr(), brain)
    return out_RI


@kernel
def _decode(linears, kind, rows, out, brain):  # type: ignore[no-untyped-def]
    linear = linears[0]
    width, group = linear.width, linear.group
    blocks, groups = (width + BLOCK - 1) // BLOCK, (width + group - 1) // group
    own = np.empty((3, LANES), np.float32)
    for r in range(len(rows)):
        row = rows[r]
        for g in range(groups):
            if g % LANES == 0:
                i = row * groups + g
                put_floats(own[0].ctypes.data, scales_at(linear, i))
                put_floats(own[1].ctypes.data, zeros_at(linear, i))
                if linear.mins:
                    put_floats(own[2].ctypes.data, mins_at(linear, i))
            scale, zero, least = own[0, g % LANES], own[1, g % LANES], own[2, g % LANES]
            for column in range(g * group, min((g + 1) * group, width), LANES):
                worth = (_codes(linear, kind, row * blocks * BLOCK + column) - zero) * scale
                if kind == _INT8:
                    worth = worth * linear.factor
                if linear.mins:
                    worth = _rounded(linear, _rounded(linear, worth) + least)
                _put(out, r * width + column, worth, brain)


@routine
def _rounded(linear, worth):  # type: ignore[no-untyped-def]
    if linear.rounded_bits:
        return rounded_to(worth, linear.rounded_bits, splat(linear.least))
    return worth


@routine
def _codes(linear, kind, at):  # type: ignore[no-untyped-def]
    """What the codes of 16 columns stand for, before zeros and scales; `at` counts columns of blocks."""
    if kind in (_INT4, _TABLE4):
        block, part = at // BLOCK * (BLOCK // 2), at % BLOCK // PART
        nibbles = nibble_floats(linear.codes + block, part, at % PART)
        return named_floats(linear.table, nibbles) if kind == _TABLE4 else nibbles
    if kind == _INT6:
        block, part = at // BLOCK * (BLOCK * 3 // 4), at % BLOCK // PART
        return six_floats(linear.codes + block, part, at % PART)
    if kind == _INT8:
        return byte_floats(linear.codes + at)
    if kind == _E4M3:
        return e4m3_floats(linear.codes + at) * linear.unit
    return e5m2_floats(linear.codes + at)


@routine
def _put(out, at, value, brain):  # type: ignore[no-untyped-def]
    if brain:
        put_brains(out + 2 * at, value)
    else:
        put_floats(out + 4 * at, value)
