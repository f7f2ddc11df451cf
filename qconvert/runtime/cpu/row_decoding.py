"""Decodes rows of packed weights to float32 or bfloat16, with the CPU kernels.

Legend: I in features, R rows asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, inlined, splat
from qconvert.runtime.cpu.coded_dots import (
    TABLE_BYTES,
    byte_floats,
    e4m3_floats,
    e5m2_floats,
    int6_floats,
    nibble_floats,
    put_named_bf16,
    put_named_f32,
    put_table_bf16,
    put_table_f32,
    rounded_to,
)
from qconvert.runtime.cpu.group_scales import mins_at, scales_at, zeros_at
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import (
    BLOCK,
    PART,
    address,
    counted,
    float_at,
    floats,
    routine,
    store_bf16,
    store_f32,
)

_INT4, _TABLE4, _INT6, _INT8, _E4M3, _E5M2 = range(6)
_LEAST_SHARED = 1 << 18
"""Numbers from which on decoding is shared by threads: a tenth of a millisecond."""
KINDS = ("int4", "table4", "int6", "int8", "e4m3", "e5m2")
"""Of codes, as kernels count them."""


def decode_rows(args: np.ndarray, kind: str, rows_R: Tensor, out_RI: Tensor) -> None:
    """Write rows of a packed weight to `out_RI`, float32 or bf16 [R, I], by its kernel arguments.

    In float32, then rounded once: the same numbers as those of the reference layout.
    """
    threads = None if out_RI.numel() >= _LEAST_SHARED else 1
    as_bf16 = out_RI.dtype == torch.bfloat16
    _decode(args, KINDS.index(kind), rows_R.numpy(), out_RI.data_ptr(), as_bf16, threads=threads)


@routine
def _decode_share(linears, kind, rows, out, as_bf16, rank, size):  # type: ignore[no-untyped-def]
    """A thread's rows. What a code of 4 bits is worth is computed once for its group, of others for each."""
    linear, count = linears[0], len(rows)
    number = 2 if as_bf16 else 4
    groups = (linear.width + linear.group - 1) // linear.group
    taken = np.empty(3 * LANES, np.float32)
    tables = np.empty((groups if kind in (_INT4, _TABLE4) else 1) * number * PART, np.uint8)
    for r in range(count * rank // size, count * (rank + 1) // size):
        row, to = rows[r], out + number * linear.width * r
        own, table = address(taken), address(tables)  # here: numba frees arrays that are not named again
        if kind in (_INT4, _TABLE4):
            _tabulate(linear, kind, row, own, table, as_bf16)
            _look_up(linear, row, table, to, as_bf16)
        elif kind == _INT6:
            _decode_int6(linear, row, own, to, as_bf16)
        elif kind == _INT8:
            _decode_int8(linear, row, own, to, as_bf16)
        elif kind == _E4M3:
            _decode_e4m3(linear, row, own, to, as_bf16)
        else:
            _decode_e5m2(linear, row, own, to, as_bf16)


def _row_decoder(codes_of: Any, factor: bool = False) -> Any:
    """The routine that decodes a row, by one that says what the codes of 16 columns stand for."""

    def decode_row(linear, row, own, out, as_bf16):  # type: ignore[no-untyped-def]
        width, group = linear.width, linear.group
        blocks, groups = (width + BLOCK - 1) // BLOCK, (width + group - 1) // group
        for g in range(groups):
            if g % LANES == 0:
                _take_groups(linear, row * groups + g, own)
            for column in range(g * group, min((g + 1) * group, width), LANES):
                codes = codes_of(linear, row * blocks * BLOCK + column)
                worth = _worth(linear, codes, own, g % LANES)
                if factor:
                    worth = worth * linear.factor
                if as_bf16:
                    store_bf16(out + 2 * column, worth)
                else:
                    store_f32(out + 4 * column, worth)

    decode_row.__name__ = decode_row.__qualname__ = f"decode_row_of{codes_of.__name__}"  # its code's name
    return routine(decode_row)


@routine
def _tabulate(linear, kind, row, own, tables, as_bf16):  # type: ignore[no-untyped-def]
    """Write what each of the 16 codes is worth in each group of a row, as `put_named` reads it."""
    groups = (linear.width + linear.group - 1) // linear.group
    codes = floats(linear.table + TABLE_BYTES) if kind == _TABLE4 else counted()
    for g in range(groups):
        if g % LANES == 0:
            _take_groups(linear, row * groups + g, own)
        worth = _worth(linear, codes, own, g % LANES)
        if as_bf16:
            put_table_bf16(tables + 2 * PART * g, worth)
        else:
            put_table_f32(tables + 4 * PART * g, worth)


@routine
def _look_up(linear, row, tables, out, as_bf16):  # type: ignore[no-untyped-def]
    """Write what the codes of a row are worth, by the tables of its groups."""
    width, step = linear.width, (2 if as_bf16 else 4) * PART
    codes = linear.codes + row * ((width + BLOCK - 1) // BLOCK) * (BLOCK // 2)
    table, stop = tables, linear.group
    for column in range(0, width, PART):
        if column >= stop:
            table, stop = table + step, stop + linear.group
        first = table
        if column + LANES >= stop:
            table, stop = table + step, stop + linear.group
        block, part = codes + column // BLOCK * (BLOCK // 2), column % BLOCK // PART
        if as_bf16:
            put_named_bf16(out + 2 * column, block, part, first, table)
        else:
            put_named_f32(out + 4 * column, block, part, first, table)


@inlined
def _take_groups(linear, i, own):  # type: ignore[no-untyped-def]
    """Read scales, zeros and mins of the groups from number `i` on, sixteen of each, to the address `own`."""
    store_f32(own, scales_at(linear, i))
    store_f32(own + 4 * LANES, zeros_at(linear, i))
    if linear.mins:
        store_f32(own + 8 * LANES, mins_at(linear, i))


@inlined
def _worth(linear, codes, own, g):  # type: ignore[no-untyped-def]
    """What sixteen codes stand for, times the scale of a group, with its zero and min."""
    worth = (codes - float_at(own + 4 * (LANES + g))) * float_at(own + 4 * g)
    if linear.mins:
        worth = _rounded(linear, _rounded(linear, worth) + float_at(own + 4 * (2 * LANES + g)))
    return worth


@inlined
def _rounded(linear, worth):  # type: ignore[no-untyped-def]
    if linear.rounded_bits:
        return rounded_to(worth, linear.rounded_bits, splat(linear.least))
    return worth


@inlined
def _int4_codes(linear, at):  # type: ignore[no-untyped-def]
    return nibble_floats(linear.codes + at // BLOCK * (BLOCK // 2), at % BLOCK // PART, at % PART)


@inlined
def _int6_codes(linear, at):  # type: ignore[no-untyped-def]
    return int6_floats(linear.codes + at // BLOCK * (BLOCK * 3 // 4), at % BLOCK // PART, at % PART)


@inlined
def _int8_codes(linear, at):  # type: ignore[no-untyped-def]
    return byte_floats(linear.codes + at)


@inlined
def _e4m3_codes(linear, at):  # type: ignore[no-untyped-def]
    return e4m3_floats(linear.codes + at) * linear.unit


@inlined
def _e5m2_codes(linear, at):  # type: ignore[no-untyped-def]
    return e5m2_floats(linear.codes + at)


@routine
def codes_at(linear, kind, at):  # type: ignore[no-untyped-def]
    """What the codes of 16 columns are, before zeros and scales; `at` counts columns of whole blocks."""
    if kind == _INT4:
        return _int4_codes(linear, at)
    if kind == _INT6:
        return _int6_codes(linear, at)
    if kind == _INT8:
        return _int8_codes(linear, at)
    return _e4m3_codes(linear, at) if kind == _E4M3 else _e5m2_codes(linear, at)


_decode_int6, _decode_int8 = _row_decoder(_int6_codes), _row_decoder(_int8_codes, factor=True)
_decode_e4m3, _decode_e5m2 = _row_decoder(_e4m3_codes), _row_decoder(_e5m2_codes)
_decode = SharedKernel(_decode_share)
