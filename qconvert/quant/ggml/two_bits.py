"""Encodes rows as Q1_0 and Q2_0: codes of one bit, or of two, with one scale per 128 or 64 elements.

v = d or -d, with d the mean magnitude (Q1_0); v = d * code, code -1 to 2, with d the largest magnitude (Q2_0:
2 is never needed). Sixteen blocks are encoded at a time. Source: quantize_row_q1_0_ref and
quantize_row_q2_0_ref in ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from qconvert.quant.ggml.scalars import put_half
from qconvert.quant.ggml.search import peaks
from qconvert.quant.ggml.tiles import consecutive, gather, scatter, tile
from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    clamp,
    kernel,
    load,
    rounded_away,
    routine,
    splat,
    store,
    where,
)

_ZERO, _ONE, _TWO, _THREE, _FOUR = (np.float32(number) for number in (0, 1, 2, 3, 4))
_BLOCK_Q1, _BLOCK_Q2 = 128, 64
_INT_RANGE = np.float32(2.0**31)


@kernel
def encode_q1_0(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q1_0 blocks of the flat array of whole rows to the flat `out`."""
    starts = np.empty(LANES, np.intp)
    x, d, codes = tile(_BLOCK_Q1), tile(1), tile(LANES)
    count = rows.size // _BLOCK_Q1
    for block in range(0, count, LANES):
        consecutive(starts, block, count, _BLOCK_Q1)
        gather(rows, starts, _BLOCK_Q1, x)
        total = splat(_ZERO)
        for at in range(0, _BLOCK_Q1 * LANES, LANES):
            total = total + absolute(load(x, at))
        store(d, 0, total / np.float32(_BLOCK_Q1))
        for byte in range(LANES):
            bits = splat(_ZERO)
            for bit in range(7, -1, -1):
                negative = load(x, (byte * 8 + bit) * LANES) < _ZERO
                bits = bits * _TWO + where(negative, splat(_ZERO), splat(_ONE))
            store(codes, byte * LANES, bits)
        _put(starts, _BLOCK_Q1, d, codes, x, out)


@kernel
def encode_q2_0(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes Q2_0 blocks of the flat array of whole rows to the flat `out`."""
    starts = np.empty(LANES, np.intp)
    x, d, codes = tile(_BLOCK_Q2), tile(1), tile(LANES)
    count = rows.size // _BLOCK_Q2
    for block in range(0, count, LANES):
        consecutive(starts, block, count, _BLOCK_Q2)
        gather(rows, starts, _BLOCK_Q2, x)
        size, _ = peaks(x, _BLOCK_Q2)
        store(d, 0, size)
        spread = where(size > _ZERO, _ONE / size, splat(_ZERO))
        for byte in range(LANES):
            fields = splat(_ZERO)
            for field in range(3, -1, -1):
                scaled = rounded_away(spread * load(x, (byte * 4 + field) * LANES))
                # What no int holds, from an infinite 1 / size, becomes the smallest one in C.
                whole = where(absolute(scaled) < _INT_RANGE, scaled, splat(-_ONE))
                fields = fields * _FOUR + clamp(whole + _ONE, _ZERO, _THREE)
            store(codes, byte * LANES, fields)
        _put(starts, _BLOCK_Q2, d, codes, x, out)


@routine
def _put(
    starts: np.ndarray, size: int, d: np.ndarray, codes: np.ndarray, work: np.ndarray, out: np.ndarray
) -> None:
    """Writes blocks of `size` elements: d, then sixteen bytes."""
    scatter(codes, LANES, work)
    for k in range(LANES):
        at = starts[k] // size * 18
        put_half(out, at, d[k])
        store(out, at + 2, load(work, k * LANES))
