"""Multiplies many rows of input, rounded to 8 bits, by weights of up to 8: sums of integers, exact by group.

Inputs are rounded as `core.activations.INT8_GROUPS` says (`input_rounding.py` is the reference), codes of
weights taken as they are: integers are multiplied four at a time, summed over the 32 columns (16 where the
weight has smaller groups) that share a scale, and scaled in float32. Legend: N rows of the input, I in
features, O out features, G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, clamp, peak, rounded_even, splat
from qconvert.runtime.cpu.byte_tiles import (
    BYTE_ROWS,
    TILE_ROWS,
    byte_tile,
    call_tile,
    chain_of,
    sums_to_take,
)
from qconvert.runtime.cpu.coded_dots import put_int6, put_lut, put_nibbles
from qconvert.runtime.cpu.group_scales import mins_at, scales_at
from qconvert.runtime.cpu.packed_weights import PackedGrid
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import (
    BLOCK,
    PART,
    byte_at,
    copy_bytes,
    floats,
    larger,
    load_bf16,
    put_bytes,
    put_float,
    routine,
    store_f32,
    total,
)
from qconvert.runtime.cpu.tile_dots import PANEL
from qconvert.runtime.cpu.tile_products import lay_panel

_KINDS = ("int4", "table4", "int6", "int8")
_INT4, _TABLE4, _INT6, _INT8 = range(4)
_HALF_RANGE = np.float32(127.5)
_LINE = 4 * PANEL
_F = np.float32


def multiplies_bytes(rows: int, weight: PackedGrid) -> bool:
    """Whether `multiply_bytes` computes this product: codes that fit 8 bits, and enough of both."""
    kind = weight.recipe.kind
    if kind not in _KINDS or rows < BYTE_ROWS or weight.shape[0] < PANEL:
        return False
    return kind != "table4" or _reach(weight) <= 127


def _reach(weight: PackedGrid) -> int:
    """No code, less its zero, is larger than this."""
    recipe = weight.recipe
    if recipe.kind == "int8":
        return 128
    if recipe.kind == "table4":
        assert weight.table is not None
        low_high = weight.table[: 4 * LANES].view(4, LANES)[::2].numpy()  # of sixteen int16
        return int(np.abs(low_high.T.copy().view("<i2")).max())
    least = most = recipe.zero
    if weight.zeros_OG is not None:
        least, most = (int(zero) for zero in weight.zeros_OG.aminmax())
    return max(most, (15 if recipe.kind == "int4" else 63) - least)


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Rows of input as they are multiplied: codes plus 128, uint8, and two float32 for each G: scales, and
    sums of what the codes are worth.
    """

    codes_NI: Tensor
    steps_NG: Tensor
    sums_NG: Tensor

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where they lie."""
        return self.codes_NI.data_ptr(), self.steps_NG.data_ptr(), self.sums_NG.data_ptr()


def multiply_bytes(x: Tensor, weight: PackedGrid, bias_O: Tensor | None) -> Tensor:
    """`round(x) W^T + b`, [..., O] in the dtype of x, with inputs rounded as `INT8_GROUPS` says.

    Check `multiplies_bytes` first.
    """
    rows = byte_rows(x.reshape(-1, x.shape[-1]), weight)
    y_NO = multiply_byte_rows(rows, weight, bias_O, narrow=x.dtype == torch.bfloat16)
    return y_NO.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def byte_rows(x_NI: Tensor, weight: PackedGrid) -> ByteRows:
    """Inputs rounded for products with this weight, or with some of its rows."""
    x_NI = x_NI.contiguous()
    if x_NI.dtype not in (torch.bfloat16, torch.float32):
        x_NI = x_NI.float()
    (tokens, width), columns, narrow = x_NI.shape, _columns(weight), x_NI.dtype == torch.bfloat16
    numbers = (torch.empty(tokens, width // columns) for _ in range(2))
    rows = ByteRows(torch.empty(tokens, width, dtype=torch.uint8), *numbers)
    _round(x_NI.data_ptr(), narrow, tokens, width, columns, *rows.addresses)
    return rows


def multiply_byte_rows(
    inputs: ByteRows, weight: PackedGrid, bias_O: Tensor | None = None, *, narrow: bool = False
) -> Tensor:
    """Products of rounded inputs, [N, O] in float32, or rounded to bfloat16 if `narrow`."""
    tokens, rows = len(inputs.codes_NI), weight.shape[0]
    y_NO = torch.empty(tokens, rows, dtype=torch.bfloat16 if narrow else torch.float32)
    bias_O = torch.zeros(rows) if bias_O is None else bias_O.float().contiguous()
    kind, columns, addresses = _KINDS.index(weight.recipe.kind), _columns(weight), inputs.addresses
    corrected = weight.mins is not None or (
        weight.recipe.kind == "int8" and (weight.zeros_OG is not None or weight.recipe.zero != 0)
    )
    tile = byte_tile(columns, corrected, chain_of(_reach(weight), columns)).address
    _multiply(
        weight.record(), kind, columns, tile, *addresses, tokens, bias_O.data_ptr(), y_NO.data_ptr(),
        narrow,
    )  # fmt: skip
    return y_NO


def _columns(weight: PackedGrid) -> int:
    """Columns whose products are summed before they are scaled."""
    return LANES if weight.recipe.group % PART else PART


@routine
def _round_share(x, narrow, tokens, width, columns, codes, steps, sums, rank, size):  # type: ignore[no-untyped-def]
    """A thread's rows of the input: codes plus 128, scales, and sums of what they are worth."""
    groups = width // columns
    for token in range(tokens * rank // size, tokens * (rank + 1) // size):
        for i in range(0, width, PART):
            low, high = _two(x, narrow, token * width + i)
            step = peak(larger(low, high)) / _HALF_RANGE
            inverse_of = splat(step) if step != _F(0) else splat(_F(1))
            low = rounded_even(clamp(low / inverse_of, _F(-128), _F(127)))
            high = rounded_even(clamp(high / inverse_of, _F(-128), _F(127)))
            put_bytes(codes + token * width + i, low + _F(128))
            put_bytes(codes + token * width + i + LANES, high + _F(128))
            at = 4 * (token * groups + i // columns)
            put_float(steps + at, step)
            if columns == PART:
                put_float(sums + at, step * total(low + high))
            else:
                put_float(steps + at + 4, step)
                put_float(sums + at, step * total(low))
                put_float(sums + at + 4, step * total(high))


_round = SharedKernel(_round_share)


@routine
def _two(x, narrow, at):  # type: ignore[no-untyped-def]
    if narrow:
        return load_bf16(x + 2 * at), load_bf16(x + 2 * (at + LANES))
    return floats(x + 4 * at), floats(x + 4 * (at + LANES))


@routine
def _multiply_share(  # type: ignore[no-untyped-def]
    linears, kind, columns, tile, codes, steps, sums, tokens, bias, y, narrow, rank, size
):
    """A thread's panels of the product."""
    linear = linears[0]
    rows, width, group = linear.rows, linear.width, linear.group
    padded, groups = (width + BLOCK - 1) // BLOCK * BLOCK, width // columns
    held = (width + group - 1) // group // LANES * LANES + LANES
    plain, panel = np.empty(PANEL * padded, np.uint8), np.empty(PANEL * padded, np.uint8)
    starts, scales = np.empty(groups * PANEL, np.int32), np.empty(groups * PANEL, np.float32)
    mins, own = np.zeros(groups * PANEL, np.float32), np.zeros((2, held), np.float32)
    panels = (rows + PANEL - 1) // PANEL
    for p in range(panels * rank // size, panels * (rank + 1) // size):
        first = min(PANEL * p, rows - PANEL)
        w, laid = plain.ctypes.data, panel.ctypes.data  # here: numba frees arrays that are not named again
        for row in range(PANEL):
            _take_codes(linear, kind, first + row, padded, w + padded * row)
            _take_scales(linear, kind, first + row, row, columns, own, scales, mins)
        lay_panel(w, padded, padded // 4, laid)
        for g in range(groups):
            sums_to_take(laid + PANEL * columns * g, columns // 4, starts.ctypes.data + _LINE * g)
        for i in range(0, tokens, BYTE_ROWS):
            token = min(i, tokens - BYTE_ROWS)
            of_x = codes + width * token
            of_step, of_sum = steps + 4 * groups * token, sums + 4 * groups * token
            size_y = 2 if narrow else 4
            for v in range(0, PANEL, TILE_ROWS):
                off = 4 * v
                out = y + size_y * (rows * token + first + v)
                call_tile(
                    tile, laid + off, starts.ctypes.data + off, scales.ctypes.data + off,
                    mins.ctypes.data + off, bias + 4 * first + off, of_x, width, of_step, of_sum,
                    4 * groups, groups, out, size_y * rows, narrow,
                )  # fmt: skip


_multiply = SharedKernel(_multiply_share)


@routine
def _take_codes(linear, kind, row, padded, out):  # type: ignore[no-untyped-def]
    """Write the codes of a row as signed bytes, from which zeros are taken where the difference fits."""
    groups = (linear.width + linear.group - 1) // linear.group
    if kind == _INT8:
        copy_bytes(linear.codes + row * padded, padded, out)
        return
    block_bytes = BLOCK * 3 // 4 if kind == _INT6 else BLOCK // 2
    one = two = linear.zero
    for i in range(0, padded, PART):
        block, part = (
            linear.codes + row * padded // BLOCK * block_bytes + i // BLOCK * block_bytes,
            i % BLOCK // PART,
        )
        if linear.zeros and i < linear.width:
            one = byte_at(linear.zeros + row * groups + i // linear.group)
            two = byte_at(linear.zeros + row * groups + (i + LANES) // linear.group)
        if kind == _INT4:
            put_nibbles(out + i, block, part, one, two)
        elif kind == _INT6:
            put_int6(out + i, block, part, one, two)
        else:
            put_lut(out + i, block, part, linear.table)


@routine
def _take_scales(linear, kind, row, place, columns, own, scales, mins):  # type: ignore[no-untyped-def]
    """Write the scales and mins of a row to its place in the lines of a panel."""
    width, group = linear.width, linear.group
    groups = (width + group - 1) // group
    for g in range(0, groups, LANES):
        i = row * groups + g
        store_f32(own[0].ctypes.data + 4 * g, scales_at(linear, i) * splat(linear.factor * linear.unit))
        if linear.mins:
            store_f32(own[1].ctypes.data + 4 * g, mins_at(linear, i))
    for c in range(width // columns):
        g = c * columns // group
        scales[c * PANEL + place] = own[0, g]
        least = own[1, g] if linear.mins else _F(0)
        if kind == _INT8:
            zero = byte_at(linear.zeros + row * groups + g) if linear.zeros else linear.zero
            least -= _F(zero) * own[0, g]
        mins[c * PANEL + place] = least
