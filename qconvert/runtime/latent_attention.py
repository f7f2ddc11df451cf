"""Computes multi-head latent attention: DeepSeek-V2 and V3, Kimi-K2 (arXiv 2405.04434, section 2.1).

Keys and values of all heads are made of one short vector per token, and only a part of each query and key is
rotated; that part of the keys is shared by all heads. As transformers' `modeling_deepseek_v3`, the cache
holds the short vectors. Legend: B batch, T tokens, S positions seen, D hidden, H heads, L latent width,
P plain, R rotated and V value dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qconvert.runtime.attention import attend, by_head
from qconvert.runtime.cache import Cache
from qconvert.runtime.config import LatentSizes
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import Rotation, apart, rotate


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention of one layer; `q` is one linear, or two with `q_norm` between."""

    layer: int
    heads: int
    sizes: LatentSizes
    q: Sequence[Linear]
    q_norm: Norm | None
    kv_a: Linear
    kv_norm: Norm
    kv_b: Linear
    o: Linear
    interleaved: bool
    scale: float

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.q, self.kv_a, self.kv_b, self.o]

    def mixed(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        """What the output projection reads: the values of all heads as they attend, [B, T, H V]."""
        sizes = self.sizes
        q_BTHE = self._queries(x_BTD)
        latent_BTL, k_BTR = torch.split_with_sizes(self.kv_a(x_BTD), [sizes.rank, sizes.rotated], dim=-1)
        q_BTHR = self._rotated(q_BTHE[..., sizes.plain :], rotations)
        k_BT1R = self._rotated(k_BTR[:, :, None], rotations)
        kept_BTX = torch.cat((self.kv_norm(latent_BTL), k_BT1R[:, :, 0]), dim=-1)
        if cache is not None:
            kept_BTX = cache.extend_latent(self.layer, kept_BTX)
        q_BTHE = torch.cat((q_BTHE[..., : sizes.plain], q_BTHR), dim=-1)
        k_BHSE, v_BHSV = self._keys_and_values(kept_BTX)
        y_BHTV = attend(q_BTHE.transpose(1, 2), k_BHSE, v_BHSV, None, self.scale)
        return y_BHTV.transpose(1, 2).flatten(-2)

    def _queries(self, x_BTD: Tensor) -> Tensor:
        """[B, T, H, P + R]."""
        q_BTX = self.q[0](x_BTD)
        if len(self.q) == 2:
            q_BTX = self.q[1](q_BTX if self.q_norm is None else self.q_norm(q_BTX))
        return by_head(q_BTX, self.heads)

    def _rotated(self, x_BTHR: Tensor, rotations: Sequence[Rotation]) -> Tensor:
        cos_TR, sin_TR = rotations[0]
        if self.interleaved:
            x_BTHR = apart(x_BTHR, cos_TR.shape[-1])
        return rotate(x_BTHR, cos_TR, sin_TR)

    def _keys_and_values(self, kept_BSX: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, S, P + R] and [B, H, S, V] of the short vectors and the rotated parts of keys."""
        sizes = self.sizes
        latent_BSL, k_BSR = torch.split_with_sizes(kept_BSX, [sizes.rank, sizes.rotated], dim=-1)
        both_BHSX = by_head(self.kv_b(latent_BSL), self.heads).transpose(1, 2)
        k_BHSP, v_BHSV = torch.split_with_sizes(both_BHSX, [sizes.plain, sizes.value], dim=-1)
        k_BHSR = k_BSR[:, None].expand(-1, self.heads, -1, -1)
        return torch.cat((k_BHSP, k_BHSR), dim=-1), v_BHSV
