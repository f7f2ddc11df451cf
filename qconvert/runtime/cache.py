"""Keeps what attention needs of the tokens seen so far.

Legend: L layers, B batch, K key-value heads, T new tokens, E head dim, X latent width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens seen so far: `kv` [L, 2, B, K, room, E], filled up to `length`.

    Of latent attention [L, 1, B, 1, room, X]: what both are made of.
    """

    kv: Tensor
    length: int = 0

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns all it has. The caller advances `length`."""
        stop = self.length + k_BKTE.shape[2]
        keys, values = self.kv[layer, 0, :, :, :stop], self.kv[layer, 1, :, :, :stop]
        keys[:, :, self.length :] = k_BKTE
        values[:, :, self.length :] = v_BKTE
        return keys, values

    def extend_latent(self, layer: int, kept_BTX: Tensor) -> Tensor:
        """The same of what keys and values are made of."""
        kept = self.kv[layer, 0, :, 0, : self.length + kept_BTX.shape[1]]
        kept[:, self.length :] = kept_BTX
        return kept
