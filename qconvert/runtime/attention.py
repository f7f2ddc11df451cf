"""Computes causal attention in plain torch: windows, chunks, soft caps and sinks.

Many bfloat16 queries that see everything are left to `cpu/attention_rows.py` where that is faster.
Legend: B batch, T tokens, H heads, K key-value heads, E head dim, S positions seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.quant.simd import processor
from qconvert.runtime.cpu.attention_rows import attend_rows, attends_rows

_MANY_QUERIES = 64
"""Queries from which on keys and values are widened in less time than they are multiplied in."""


def by_head(x_BTX: Tensor, heads: int) -> Tensor:
    """Columns divided among heads: [B, T, heads, X / heads]."""
    return x_BTX.reshape(*x_BTX.shape[:-1], heads, -1)


@dataclass(frozen=True, slots=True)
class Temperature:
    """What Llama 4 multiplies queries by that are not rotated, so that long texts stay in focus.

    `1 + scale ln(1 + floor((position + 1) / floor))` (arXiv 2501.19399; transformers' `modeling_llama4`).
    """

    floor: float
    scale: float

    def __call__(self, q_BTHE: Tensor, start: int) -> Tensor:
        """Queries of the positions from `start` on, times that."""
        stop = start + q_BTHE.shape[1]
        count_T = torch.arange(start + 1, stop + 1, dtype=torch.float32, device=q_BTHE.device)
        factor_T = torch.log1p(torch.floor(count_T / self.floor)) * self.scale + 1
        return (q_BTHE * factor_T[:, None, None]).to(q_BTHE.dtype)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Causal attention of the last T positions over all S of them, at most `window` back: [B, H, T, E].

    Windows that are `chunked` begin at multiples of their length (Llama 4) instead of sliding. Values may
    have another width than queries and keys; then so has what comes out.

    Scores are multiplied by `scale` (None: 1 / sqrt(E)); with a `cap` they become `cap tanh(score / cap)`
    (Gemma 2), and a head's sink is one more score, of a position without a value (gpt-oss). A single query
    that sees everything needs no mask; the heads that share its keys then are as many queries of one head,
    which spares reading the keys once for each (14 heads over 2 on a CPU: 4 times as fast at 40 keys, 14
    times at 2000).
    """
    new, seen = q_BHTE.shape[2], k_BKSE.shape[2]
    slides = window is not None and window < seen
    special = cap is not None or sinks_H is not None
    if not slides and not special and attends_rows(q_BHTE, k_BKSE, v_BKSE):
        return attend_rows(q_BHTE, k_BKSE, v_BKSE, scale)
    mask_TS = None
    # `is_causal` aligns the first query with the first key, not the last with the last.
    if slides or 1 < new < seen or special:
        position = torch.arange(seen, device=q_BHTE.device)
        age_TS = position[seen - new :, None] - position
        reach_T1: Tensor | int = window if window is not None else seen
        if window is not None and chunked:
            reach_T1 = position[seen - new :, None] % window + 1
        mask_TS = (age_TS >= 0) & (age_TS < reach_T1)
    if mask_TS is not None and special:
        rows = [
            _attend_one(q_HTE, k_KSE, v_KSE, mask_TS, scale, cap, sinks_H)
            for q_HTE, k_KSE, v_KSE in zip(q_BHTE, k_BKSE, v_BKSE, strict=True)
        ]
        return torch.stack(rows)
    if new == 1:
        q_BKGE = q_BHTE.reshape(len(q_BHTE), k_BKSE.shape[1], -1, q_BHTE.shape[3])
        y_BKGE = F.scaled_dot_product_attention(q_BKGE, k_BKSE, v_BKSE, attn_mask=mask_TS, scale=scale)
        return y_BKGE.reshape(*q_BHTE.shape[:3], -1)
    causal = mask_TS is None
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, attn_mask=mask_TS, is_causal=causal, scale=scale, enable_gqa=True
    )


def attend_widened(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *rules: Any) -> Tensor:
    """`attend`; of many bfloat16 queries in float32, rounded once, where a processor is faster at that.

    1.4 times as fast as in bfloat16 at 256 tokens, 1.6 times at 2048, of 14 heads of 64 (one core of an
    Emerald Rapids).
    """
    narrow = q_BHTE.dtype == torch.bfloat16 and q_BHTE.device.type == "cpu"
    if not narrow or q_BHTE.shape[2] < _MANY_QUERIES or not processor.widens_bf16():
        return attend(q_BHTE, k_BKSE, v_BKSE, *rules)
    return attend(q_BHTE.float(), k_BKSE.float(), v_BKSE.float(), *rules).to(q_BHTE.dtype)


def _attend_one(
    q_HTE: Tensor,
    k_KSE: Tensor,
    v_KSE: Tensor,
    mask_TS: Tensor,
    scale: float | None,
    cap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """One sequence, its scores written out in float32 [K, heads of a key, T, S]: [H, T, E]."""
    heads, new, width = q_HTE.shape
    q_KGTE = q_HTE.reshape(len(k_KSE), -1, new, width)
    scores = (q_KGTE @ k_KSE[:, None].transpose(-1, -2)).float() * (width**-0.5 if scale is None else scale)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask_TS, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(len(k_KSE), -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k_KSE.shape[1]].to(v_KSE.dtype)
    return (weights @ v_KSE[:, None]).reshape(heads, new, width)
