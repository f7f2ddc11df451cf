"""Computes causal attention of many bfloat16 queries: scores and sums in float32, weights in bfloat16.

Keys and values are laid out as panels (`tile_dots.py`) once. Some queries at a time meet all keys they may
see; their weights `e^(score - highest)` are rounded to bfloat16 and meet the values, and what comes out is
divided by their sum and rounded once. Legend: B batch, T tokens, H heads, K key-value heads, E head dim,
S positions seen, P those and what fills the last panel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd import processor
from qconvert.quant.simd.lanes import LANES, splat
from qconvert.runtime.cpu.exponential import MISSING, exp, highest_of
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import floats, put_float, routine, store_bf16, total
from qconvert.runtime.cpu.tile_dots import FLOAT_ROWS, PANEL
from qconvert.runtime.cpu.tile_products import lay_panel, multiply_panel

_QUERIES = 4 * FLOAT_ROWS
"""Queries that are computed together; their scores stay in the second-level cache."""
_LEAST = 64
"""Queries from which on laying out keys and values pays."""
_F = np.float32


def attends_rows(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> bool:
    """Whether `attend_rows` computes this: not with AMX, nor where float32 products are faster, as torch's
    attention is then. Elsewhere it is 3.4 times as fast as torch's at 256 tokens and 4.4 times at 2,048, for
    14 heads of 64 (one core of an AMD EPYC, Zen 5).
    """
    parts = (q_BHTE, k_BKSE, v_BKSE)
    known = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1 for x in parts)
    whole = all(x.shape[-1] % PANEL == 0 for x in parts) and q_BHTE.shape[2] >= _LEAST
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in parts)
    pairs = processor.multiplies_bf16() and not processor.widens_bf16() and not processor.multiplies_tiles()
    return pairs and known and whole and not learns


def attend_rows(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last T positions over all S of them, [B, H, T, E]. Check `attends_rows` first.

    Scores are multiplied by `scale` (None: 1 / sqrt(E)).
    """
    batch, heads, tokens, width = q_BHTE.shape
    kv_heads, seen, out_width = k_BKSE.shape[1], k_BKSE.shape[2], v_BKSE.shape[3]
    padded = (seen + PANEL - 1) // PANEL * PANEL
    k_BKPE, v_BKEP = (
        k_BKSE.new_zeros(batch, kv_heads, *sizes) for sizes in ((padded, width), (out_width, padded))
    )
    k_BKPE[:, :, :seen] = k_BKSE
    v_BKEP[..., :seen] = v_BKSE.transpose(-1, -2)
    y_BTHE = q_BHTE.new_empty(batch, tokens, heads, out_width)
    laid = [torch.empty_like(x) for x in (k_BKPE, v_BKEP)]
    scales = np.full(PANEL, width**-0.5 if scale is None else scale, np.float32)
    places = [x.data_ptr() for x in (k_BKPE, v_BKEP, *laid)]
    _lay(*places, batch * kv_heads, padded, width, out_width)
    for b in range(batch):
        q_HTE, places = q_BHTE[b], [x[b].data_ptr() for x in (*laid, y_BTHE)]
        strides = 2 * q_HTE.stride(0), 2 * q_HTE.stride(1)
        sizes = heads, heads // kv_heads, tokens, seen, padded, width, out_width
        _attend(q_HTE.data_ptr(), *strides, *places, *sizes, scales)
    return y_BTHE.transpose(1, 2)


@routine
def _lay_share(k, v, k_laid, v_laid, heads, padded, width, out_width, rank, size):  # type: ignore[no-untyped-def]
    """Lay out a thread's heads: 64 keys by columns, and 64 columns of values by positions."""
    for head in range(heads * rank // size, heads * (rank + 1) // size):
        at = 2 * head * padded * width
        for i in range(0, padded, PANEL):
            lay_panel(k + at + 2 * i * width, 2 * width, width // 2, k_laid + at + 2 * i * width)
        at = 2 * head * padded * out_width
        for i in range(0, out_width, PANEL):
            lay_panel(v + at + 2 * i * padded, 2 * padded, padded // 2, v_laid + at + 2 * i * padded)


_lay = SharedKernel(_lay_share)


@routine
def _attend_share(  # type: ignore[no-untyped-def]
    q, q_head, q_step, k, v, y, heads, shared, tokens, seen, padded, width, out_width, scales, rank, size
):  # fmt: skip
    """A thread's queries of one sequence; all but counts are byte addresses and sizes."""
    score, weight = np.empty((_QUERIES, padded), np.float32), np.empty((_QUERIES, padded), np.uint16)
    made, sums = np.empty((_QUERIES, PANEL), np.float32), np.empty(_QUERIES, np.float32)
    ones, blocks = np.ones(PANEL, np.float32), (tokens + _QUERIES - 1) // _QUERIES
    for task in range(rank, heads * blocks, size):
        head, first = task // blocks, min(task % blocks * _QUERIES, tokens - _QUERIES)
        of_q = q + q_head * head + q_step * first
        sees = seen - tokens + first  # positions before the first query
        end = (sees + _QUERIES + PANEL - 1) // PANEL * PANEL
        for i in range(0, end, PANEL):
            panel = k + 2 * (head // shared * padded + i) * width
            out = score.ctypes.data + 4 * i
            multiply_panel(panel, width, 1, scales.ctypes.data, of_q, q_step, _QUERIES, out, 4 * padded)
        for row in range(_QUERIES):
            sums[row] = _weigh(score[row].ctypes.data, sees + row + 1, end, weight[row].ctypes.data)
        for e in range(0, out_width, PANEL):
            panel = v + 2 * (head // shared * out_width + e) * padded
            multiply_panel(
                panel,
                end,
                1,
                ones.ctypes.data,
                weight.ctypes.data,
                2 * padded,
                _QUERIES,
                made.ctypes.data,
                4 * PANEL,
            )
            for row in range(_QUERIES):
                share = splat(_F(1) / sums[row])
                to = y + 2 * (((first + row) * heads + head) * out_width + e)
                for i in range(0, PANEL, LANES):
                    store_bf16(to + 2 * i, floats(made[row].ctypes.data + 4 * i) * share)


_attend = SharedKernel(_attend_share)


@routine
def _weigh(score, count, end, out):  # type: ignore[no-untyped-def]
    """Write `e^(score - highest)` of `count` scores as bfloat16, and zeros up to `end`; returns their sum."""
    last = (count + LANES - 1) // LANES * LANES
    for i in range(count, last):
        put_float(score + 4 * i, MISSING)
    top, sum_ = splat(highest_of(score, last, MISSING)), splat(_F(0))
    for i in range(0, last, LANES):
        weight = exp(floats(score + 4 * i) - top)
        sum_ = sum_ + weight
        store_bf16(out + 2 * i, weight)
    for i in range(last, end, LANES):
        store_bf16(out + 2 * i, splat(_F(0)))
    return total(sum_)
