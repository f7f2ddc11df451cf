"""Carries more than hidden states from layer to layer: Gemma 4's inputs of each layer, and shared keys.

Behind the D columns of hidden states lie the inputs of all layers, which are made of tokens alone, and the
keys and values that later layers read of an earlier one. So a layer computes from what it is given, wherever
that lies in the meantime: in memory, in a file, or on the way back of a gradient. Source: transformers'
`modeling_gemma4`. Legend: B batch, T tokens, D hidden, S all columns, L layers, P columns of a layer's input,
K key-value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.cache import Cache
from qconvert.runtime.layer import Layer, normalised
from qconvert.runtime.layer_step import LayerStep
from qconvert.runtime.linear import Linear, Table
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import Rotation
from qconvert.runtime.shared_keys import SharingAttention


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of all layers: rows of a table by token, and a projection of the embedding."""

    table: Table
    projection: Linear
    norm: Norm

    def __call__(self, tokens_BT: Tensor, x_BTD: Tensor) -> Tensor:
        """Those of tokens and their embeddings, those of one layer after the other: [B, T, L P]."""
        width, parts = self.norm.width, (*tokens_BT.shape, -1)
        assert width is not None
        read = self.table.rows(tokens_BT.flatten()).view(parts)
        own = self.projection(x_BTD) * x_BTD.shape[-1] ** -0.5
        normal = self.norm(own.view(*parts, width)).flatten(-2)
        return (normal + read * torch.tensor(width**0.5, dtype=read.dtype)) * 2**-0.5


@dataclass(frozen=True, slots=True)
class LayerInput:
    """How a layer takes its own input in: `norm(out(gelu(gate(x)) * input))` is added to x."""

    columns: slice
    gate: Linear
    out: Linear
    norm: Norm

    def __call__(self, x_BTD: Tensor, beside_BTX: Tensor) -> Tensor:
        gate_BTP = F.gelu(self.gate(x_BTD), approximate="tanh")
        return x_BTD + self.norm(self.out(gate_BTP * beside_BTX[..., self.columns]))


@dataclass(frozen=True, slots=True)
class CarryingLayer(Layer):
    """A layer of a model that carries columns beside its `hidden` states.

    It takes and gives all columns, [B, T, S]; what it gives is multiplied by `scale` at the end.
    """

    hidden: int = 0
    own_input: LayerInput | None = None
    scale_1: Tensor | None = None

    def steps(self, rotations: Sequence[Rotation], cache: Cache | None = None) -> tuple[LayerStep, ...]:
        """What the layer does, in order: attention, MLP, and its input where it has one."""

        def attend(x_BTS: Tensor) -> Tensor:
            x_BTD, beside_BTX = self._apart(x_BTS)
            mixer = self.attention
            assert isinstance(mixer, SharingAttention)
            read_BTD = normalised(self.attention_norm, x_BTD)
            mixed_BTI, beside_BTX = mixer.beside(read_BTD, beside_BTX, rotations, cache)
            x_BTD = x_BTD + normalised(self.attention_post_norm, mixer.o(mixed_BTI))
            return torch.cat((x_BTD, beside_BTX), dim=-1)

        mlp, last = self._mlp_step(), self.own_input

        def feed(x_BTS: Tensor) -> Tensor:
            x_BTD, beside_BTX = self._apart(x_BTS)
            y_BTD = mlp(x_BTD)
            return torch.cat((y_BTD if last is not None else self._scaled(y_BTD), beside_BTX), dim=-1)

        def take_in(x_BTS: Tensor) -> Tensor:
            x_BTD, beside_BTX = self._apart(x_BTS)
            assert last is not None
            return torch.cat((self._scaled(last(x_BTD, beside_BTX)), beside_BTX), dim=-1)

        return (attend, feed) if last is None else (attend, feed, take_in)

    def _apart(self, x_BTS: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTS[..., : self.hidden], x_BTS[..., self.hidden :]

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.scale_1 is None else x_BTD * self.scale_1

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        own = [] if self.own_input is None else [self.own_input.gate, self.own_input.out]
        return [*self.attention.linears, *self.mlp.linears, *own]
