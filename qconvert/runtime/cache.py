"""Keeps what layers need of the tokens seen so far.

Legend: L layers, B batch, K key-value heads, T new tokens, E head dim, X latent width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens seen so far, of up to `room`: `kv`, filled up to `length`.

    Of each of the `layers` [2, B, K, room, E]; of latent attention [1, B, 1, room, X], what both are made
    of. `kv` is their memory, [L, ...] where all layers are alike. What other layers hand from token to token
    they put into `states` by their number.
    """

    kv: Tensor
    layers: Sequence[Tensor]
    room: int
    length: int = 0
    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @staticmethod
    def empty(
        kept: Sequence[tuple[int, int, int]], batch: int, room: int, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """A cache for layers that keep (parts, heads, width) of a token each."""
        shapes = [(parts, batch, heads, room, width) for parts, heads, width in kept]
        sizes = [math.prod(shape) for shape in shapes]
        kv = torch.zeros(sum(sizes), dtype=dtype, device=device)
        layers = [part.view(shape) for part, shape in zip(torch.split(kv, sizes), shapes, strict=True)]
        return Cache(kv.view(len(kept), *shapes[0]) if len(set(kept)) == 1 else kv, layers, room)

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns all it has. The caller advances `length`."""
        stop = self.length + k_BKTE.shape[2]
        keys, values = self.layers[layer][:, :, :, :stop].unbind()
        keys[:, :, self.length :] = k_BKTE
        values[:, :, self.length :] = v_BKTE
        return keys, values

    def of(self, layer: int, new: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer that has stored those of `new` tokens already."""
        keys, values = self.layers[layer][:, :, :, : self.length + new].unbind()
        return keys, values

    def extend_latent(self, layer: int, kept_BTX: Tensor) -> Tensor:
        """The same of what keys and values are made of."""
        kept = self.layers[layer][0, :, 0, : self.length + kept_BTX.shape[1]]
        kept[:, self.length :] = kept_BTX
        return kept
