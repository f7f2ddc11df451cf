"""A decoder-only transformer in plain torch: llama, mistral, qwen2, qwen3 and the two Qwen MoEs.

The specification that faster kernels are measured against: within rounding of transformers in
float32, on any device, from dense or packed weights, fused or not. Families live in `config.py`;
here a layer has a bias, a head norm, a window or experts, or it does not. `load.py` builds it.
Legend: B batch, T tokens, D hidden, H heads, K key-value heads, E head dim, L layers, V vocabulary,
N = B T rows, S experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.errors import QConvertError
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.head import multiply_float32
from qconvert.runtime.linear import Linear, Table
from qconvert.runtime.precision import exact_products
from qconvert.runtime.rope import cos_sin, rotate

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of the positions at hand, float32 [T, E] each."""


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / rms(x) * weight` over the last dimension: float32 inside, rounded once."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens seen so far: `kv` [L, 2, B, K, room, E], filled up to `length`."""

    kv: Tensor
    length: int = 0

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns all it has. The caller advances `length`."""
        stop = self.length + k_BKTE.shape[2]
        keys, values = self.kv[layer, 0, :, :, :stop], self.kv[layer, 1, :, :, :stop]
        keys[:, :, self.length :] = k_BKTE
        values[:, :, self.length :] = v_BKTE
        return keys, values


Step = Callable[[int, Cache], Tensor]
"""Reads one token of one sequence into the cache; gives the logits of what follows, float32 [V]."""


def fan_out(x: Tensor, parts: Sequence[Linear], widths: Sequence[int]) -> Sequence[Tensor]:
    """Several projections of one input, whose weights are stored apart or stacked as one."""
    if len(parts) == 1:
        return torch.split_with_sizes(parts[0](x), widths, dim=-1)
    return [part(x) for part in parts]


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last T positions over all of them, at most `window` back.

    Fewer queries than keys need a mask written out: `is_causal` aligns the two at the first
    position, not at the last. A single query that sees everything needs none; the heads that share
    its keys then are as many queries of one head, which spares reading the keys once for each (14
    heads over 2 on a CPU: 4 times as fast at 40 keys, 14 times at 2000).
    """
    new, seen = q_BHTE.shape[2], k_BKTE.shape[2]
    slides = window is not None and window < seen
    mask_TT = None
    if slides or 1 < new < seen:
        position = torch.arange(seen, device=q_BHTE.device)
        age_TT = position[seen - new :, None] - position
        mask_TT = (age_TT >= 0) & (age_TT < (window if window is not None else seen))
    if new == 1:
        q_BKGE = q_BHTE.reshape(len(q_BHTE), k_BKTE.shape[1], -1, q_BHTE.shape[3])
        y_BKGE = F.scaled_dot_product_attention(q_BKGE, k_BKTE, v_BKTE, attn_mask=mask_TT)
        return y_BKGE.view_as(q_BHTE)
    causal = mask_TT is None
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKTE, v_BKTE, attn_mask=mask_TT, is_causal=causal, enable_gqa=True
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of one layer; heads are normalised (Qwen3) before they are rotated."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    qkv: Sequence[Linear]
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear

    def __call__(self, x_BTD: Tensor, rotation: Rotation, cache: Cache | None) -> Tensor:
        q, k, v = fan_out(
            x_BTD, self.qkv, [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        )
        q, k, v = (part.view(*x_BTD.shape[:2], -1, self.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        k_BKTE, v_BKTE = k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k_BKTE, v_BKTE = cache.extend(self.layer, k_BKTE, v_BKTE)
        y_BHTE = attend(q.transpose(1, 2), k_BKTE, v_BKTE, self.window)
        return self.o(y_BHTE.transpose(1, 2).flatten(-2))


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    gate_up: Sequence[Linear]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        width = self.down.weight.shape[1]
        gate, up = fan_out(x, self.gate_up, (width, width))
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """The few experts that the router picks for a token, and one that always runs behind a gate."""

    router: Linear
    experts: Sequence[Mlp]
    per_token: int
    normalise: bool
    shared: Mlp | None
    shared_gate: Linear | None

    def __call__(self, x: Tensor) -> Tensor:
        x_ND = x.flatten(0, -2)
        weight_NS, chosen_NS = self.route(x_ND)
        y_ND = torch.zeros_like(x_ND)
        for expert in torch.bincount(chosen_NS.flatten()).nonzero().flatten().tolist():
            row, slot = torch.where(chosen_NS == expert)
            y_ND.index_add_(0, row, self.experts[expert](x_ND[row]) * weight_NS[row, slot, None])
        if self.shared is not None and self.shared_gate is not None:
            y_ND += torch.sigmoid(self.shared_gate(x_ND)) * self.shared(x_ND)
        return y_ND.view_as(x)

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each row, [N, S]: softmax over all, then the largest."""
        weight_NS, chosen_NS = self.router(x_ND).float().softmax(-1).topk(self.per_token)
        if self.normalise:
            weight_NS = weight_NS / weight_NS.sum(-1, keepdim=True)
        return weight_NS.to(x_ND.dtype), chosen_NS


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and MLP, each fed through its norm and added to the residual."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp | SparseMlp


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that turns tokens into hidden states, and hidden states into logits.

    `hidden` and `logits` are apart so that evaluations can run many chunks through a layer at once,
    yet never hold [tokens, vocabulary] in full. Token ids must be below `config.vocab`. `step` is a
    faster way to decode a single sequence, where there is one.
    """

    config: DecoderConfig
    dtype: torch.dtype
    layout: Layout
    embed: Table
    layers: Sequence[Layer]
    norm: Norm
    head: Table
    frequencies_F: Tensor
    step: Step | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where the results come back."""
        return self.frequencies_F.device

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D] in the compute dtype.

        Positions count from 0, or from the end of the cache, which then holds these tokens too.
        """
        batch, new = tokens_BT.shape
        start = 0 if cache is None else cache.length
        if cache is not None:
            self._check_room(cache, new)
        rotation = cos_sin(self.config.rope, self.frequencies_F, start, start + new)
        x_BTD = self.embed.rows(tokens_BT.flatten()).view(batch, new, -1)
        with exact_products():
            for layer in self.layers:
                x_BTD = x_BTD + layer.attention(layer.attention_norm(x_BTD), rotation, cache)
                x_BTD = x_BTD + layer.mlp(layer.mlp_norm(x_BTD))
        if cache is not None:
            cache.length += new
        return self.norm(x_BTD)

    @torch.inference_mode()
    def logits(self, h_XD: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits of vocabulary rows [start, stop) (default: all), float32 [..., stop - start]."""
        stop = self.config.vocab if stop is None else stop
        return multiply_float32(h_XD.flatten(0, -2), self.head, start, stop).view(*h_XD.shape[:-1], -1)

    def cache(self, batch: int, room: int) -> Cache:
        """An empty cache for `batch` sequences of up to `room` tokens.

        Raises QConvertError saying its size where the device has not that much memory.
        """
        config = self.config
        shape = (config.layers, 2, batch, config.kv_heads, room, config.head_dim)
        try:
            return Cache(torch.zeros(shape, dtype=self.dtype, device=self.device))
        except RuntimeError as error:  # also torch.OutOfMemoryError
            gigabytes = math.prod(shape) * self.dtype.itemsize / 1e9
            raise QConvertError(
                f"{room:,} tokens: their keys and values need {gigabytes:,.2f} GB, which are not free",
                "ask for fewer tokens, or give a shorter prompt",
            ) from error

    def _check_room(self, cache: Cache, new: int) -> None:
        room = cache.kv.shape[-2]
        if cache.length + new > room:
            raise QConvertError(
                f"prompt: {cache.length} + {new} tokens do not fit the cache of {room}",
                "ask for a longer cache or a shorter prompt",
            )

    def prefill(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Read a prompt, or the next part of one; logits after its last token, float32 [B, V]."""
        return self.logits(self.hidden(tokens_BT, cache)[:, -1])

    def decode(self, token_B: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each sequence; logits of what follows, float32 [B, V]."""
        if self.step is not None and len(token_B) == 1:
            self._check_room(cache, 1)
            return self.step(int(token_B), cache)[None]
        return self.prefill(token_B[:, None], cache)
