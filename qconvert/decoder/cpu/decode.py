"""Rows of packed grids as numbers, and products with few rows of input: what `linear.py` calls.

Legend: O out features (rows), I in features, N rows of the input, R rows asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.decoder.cpu.dots import scale_at
from qconvert.decoder.cpu.records import INT4
from qconvert.decoder.cpu.step import multiply
from qconvert.decoder.cpu.team import Team
from qconvert.decoder.cpu.weights import Multipliable, PackedGrid, describe
from qconvert.decoder.cpu.words import (
    BLOCK,
    byte_at,
    byte_floats,
    nibble_floats,
    paired,
    put_brains,
    put_floats,
    routine,
    words,
)
from qconvert.quant.lanes import LANES, kernel, splat


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
    _decode(describe(weight), rows_R.numpy(), out_RI.data_ptr(), brain)
    return out_RI


@kernel
def _decode(linears, rows, out, brain):  # type: ignore[no-untyped-def]
    linear = linears[0]
    width, group = linear.width, linear.group
    blocks, groups = (width + BLOCK - 1) // BLOCK, width // group
    for r in range(len(rows)):
        row = rows[r]
        for g in range(groups):
            i = row * groups + g
            zero = byte_at(linear.zeros + i) if linear.zeros else np.float32(linear.zero)
            scale = splat(scale_at(linear.scales, linear.brain_scales, i))
            for column in range(g * group, (g + 1) * group, 2 * LANES):
                low, high = _part(linear, row * blocks, column)
                at = r * width + column
                _put(out, at, (low - zero) * scale, brain)
                _put(out, at + LANES, (high - zero) * scale, brain)


@routine
def _part(linear, first, column):  # type: ignore[no-untyped-def]
    """The codes of 32 columns, in two lanes; `first` is the row's first block."""
    at = first * BLOCK + column
    if linear.kind == INT4:
        word, place = words(linear.codes + at // BLOCK * BLOCK // 2), column % BLOCK // (2 * LANES)
        even, odd = nibble_floats(word, place, 0), nibble_floats(word, place, 1)
        return paired(even, odd, 0), paired(even, odd, 1)
    return byte_floats(linear.codes + at), byte_floats(linear.codes + at + LANES)


@routine
def _put(out, at, value, brain):  # type: ignore[no-untyped-def]
    if brain:
        put_brains(out + 2 * at, value)
    else:
        put_floats(out + 4 * at, value)
