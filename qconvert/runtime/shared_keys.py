"""Computes Gemma 4's attention: values normalised too, keys as values, keys and values of an earlier layer.

Legend: B batch, T tokens, D hidden, X columns beside the hidden states, H heads, K key-value heads, E head
dim, S positions seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qconvert.runtime.attention import attend, by_head
from qconvert.runtime.cache import Cache
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import Rotation, rotate


@dataclass(frozen=True, slots=True)
class SharingAttention:
    """Attention of one layer, whose keys and values may be those of the layer `source`.

    `reading` are its projections of one input, apart or stacked, with `widths` rows: to queries, to keys if
    they are its own, and to values where these are not the keys before their norm. Keys and values that
    layers share lie in `columns` beside the hidden states (of a single text in the cache too, if there is
    one).
    """

    layer: int
    source: int
    heads: int
    kv_heads: int
    window: int | None
    rope: int
    scale: float
    reading: Sequence[Linear]
    widths: tuple[int, ...]
    q_norm: Norm
    k_norm: Norm | None
    v_norm: Norm
    o: Linear
    columns: slice | None = None

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.reading, self.o]

    def mixed(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        """What the output projection reads, of a layer that shares nothing: [B, T, H E]."""
        return self.beside(x_BTD, x_BTD[..., :0], rotations, cache)[0]

    def beside(
        self, x_BTD: Tensor, beside_BTX: Tensor, rotations: Sequence[Rotation], cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """What the output projection reads, [B, T, H E], and what lies beside the hidden states then."""
        rotation = rotations[self.rope]
        q, *own = self._read(x_BTD)
        q_BHTE = rotate(self.q_norm(by_head(q, self.heads)), *rotation).transpose(1, 2)
        if own:
            k_BTKE, v_BTKE = self._keys_and_values(own, rotation)
            if self.columns is not None:
                beside_BTX = self._left(beside_BTX, k_BTKE, v_BTKE)
            k_BKSE, v_BKSE = k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
            if cache is not None:
                k_BKSE, v_BKSE = cache.extend(self.layer, k_BKSE, v_BKSE)
        elif cache is not None:
            k_BKSE, v_BKSE = cache.of(self.source, x_BTD.shape[1])
        else:
            assert self.columns is not None
            halves = beside_BTX[..., self.columns].chunk(2, dim=-1)
            k_BKSE, v_BKSE = (by_head(half, self.kv_heads).transpose(1, 2) for half in halves)
        y_BHTE = attend(q_BHTE, k_BKSE, v_BKSE, self.window, self.scale)
        return y_BHTE.transpose(1, 2).flatten(-2), beside_BTX

    def _read(self, x_BTD: Tensor) -> Sequence[Tensor]:
        if len(self.reading) == 1:
            return torch.split_with_sizes(self.reading[0](x_BTD), self.widths, dim=-1)
        return [linear(x_BTD) for linear in self.reading]

    def _keys_and_values(self, own: Sequence[Tensor], rotation: Rotation) -> tuple[Tensor, Tensor]:
        assert self.k_norm is not None
        k_BTKE, v_BTKE = (by_head(part, self.kv_heads) for part in (own[0], own[-1]))
        return rotate(self.k_norm(k_BTKE), *rotation), self.v_norm(v_BTKE)

    def _left(self, beside_BTX: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        """The columns beside, with these keys and values in their place."""
        assert self.columns is not None
        before, after = beside_BTX[..., : self.columns.start], beside_BTX[..., self.columns.stop :]
        return torch.cat((before, k_BTKE.flatten(-2), v_BTKE.flatten(-2), after), dim=-1)
