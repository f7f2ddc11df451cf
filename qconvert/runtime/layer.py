"""Computes one layer of a decoder-only transformer in plain torch: norms, attention, MLP or experts.

The families of `graphs.py` have a bias, a head norm, a window or experts here, or have them not. Other
mixers of tokens than attention are in `latent_attention.py` and `delta_net.py`.
Legend: B batch, T tokens, D hidden, H heads, K key-value heads, E head dim, L layers, N = B T rows,
S experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.activations import INT8_GROUPS
from qconvert.runtime.attention import Temperature, attend_widened, by_head
from qconvert.runtime.cache import Cache
from qconvert.runtime.config import Experts
from qconvert.runtime.cpu.row_passes import passes_rows, rotate_rows, rotates_whole, swiglu_rows
from qconvert.runtime.layer_step import LayerStep, SplitStep
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import Rotation, apart, rotate
from qconvert.runtime.routing import route


def fan_out(x: Tensor, parts: Sequence[Linear], widths: Sequence[int]) -> Sequence[Tensor]:
    """Several projections of one input, whose weights are stored apart or stacked as one."""
    if len(parts) == 1:
        return torch.split_with_sizes(parts[0](x), widths, dim=-1)
    return [part(x) for part in parts]


class Mixer(Protocol):
    """What a layer mixes tokens by: attention, or what stands in its place."""

    @property
    def o(self) -> Linear:
        """The output projection."""
        ...

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        ...

    def mixed(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        """What the output projection reads, [B, T, I]."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of one layer.

    Queries and keys are clamped (`limit`), normalised and rotated, as far as the model does that; norms are
    over heads (Qwen3), or over all heads together (OLMo 2). `rope` is the number of the rotation, None for
    no rotation; what is rotated may be normalised once more (`rotated_norm`), and other queries have a
    `temperature`. `gated`: the query projection makes a gate for each head too, behind its query, whose
    sigmoid multiplies what the head gives (Qwen3-Next). `scale`, `cap`, `sinks_H` and `chunked` are
    `attend`'s.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    qkv: Sequence[Linear]
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    rope: int | None = 0
    interleaved: bool = False
    scale: float | None = None
    cap: float | None = None
    limit: float | None = None
    sinks_H: Tensor | None = None
    gated: bool = False
    chunked: bool = False
    rotated_norm: Norm | None = None
    temperature: Temperature | None = None

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.qkv, self.o]

    @property
    def widths(self) -> tuple[int, int, int]:
        """The rows of the projections to queries (and gates), keys and values."""
        keys = self.kv_heads * self.head_dim
        return self.heads * self.head_dim * (2 if self.gated else 1), keys, keys

    def mixed(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        """What the output projection reads: the values of all heads as they attend, [B, T, H E]."""
        q, k, v = fan_out(x_BTD, self.qkv, self.widths)
        many = passes_rows(x_BTD, self.head_dim)
        gate_BTI = None
        if self.gated:
            q, gate_BTI = (half.flatten(-2) for half in by_head(q, self.heads).chunk(2, dim=-1))
        if self.limit is not None:
            q, k, v = (part.clamp(-self.limit, self.limit) for part in (q, k, v))
        q, k, v = self._by_head(q, self.q_norm), self._by_head(k, self.k_norm), self._by_head(v, None)
        if self.rope is not None:
            cos_TR, sin_TR = rotations[self.rope]
            if self.interleaved:
                q, k = (apart(part, cos_TR.shape[-1]) for part in (q, k))
            turn = rotate_rows if many and rotates_whole(q, cos_TR) else rotate
            q, k = turn(q, cos_TR, sin_TR), turn(k, cos_TR, sin_TR)
        if self.rotated_norm is not None:
            q, k = self.rotated_norm(q), self.rotated_norm(k)
        if self.temperature is not None:
            q = self.temperature(q, 0 if cache is None else cache.length)
        k_BKTE, v_BKTE = k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k_BKTE, v_BKTE = cache.extend(self.layer, k_BKTE, v_BKTE)
        rules = self.window, self.scale, self.cap, self.sinks_H, self.chunked
        y_BHTE = attend_widened(q.transpose(1, 2), k_BKTE, v_BKTE, *rules)
        y_BTI = y_BHTE.transpose(1, 2).flatten(-2)
        return y_BTI if gate_BTI is None else y_BTI * torch.sigmoid(gate_BTI)

    def _by_head(self, x_BTR: Tensor, norm: Norm | None) -> Tensor:
        """[B, T, heads, E], normalised by head, or as a whole where the norm is as wide as all of them."""
        if norm is not None and norm.width == x_BTR.shape[-1]:
            x_BTR, norm = norm(x_BTR), None
        x_BTHE = x_BTR.view(*x_BTR.shape[:2], -1, self.head_dim)
        return x_BTHE if norm is None else norm(x_BTHE)


Gate = Callable[[Tensor, Tensor], Tensor]
"""What a gated block makes of the outputs of `gate` and `up`; may overwrite them."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate).mul_(up)


def gelu_glu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up`, gelu exact or by its approximation (Gemma's: "tanh")."""
    return F.gelu(gate, approximate=approximate).mul_(up)


def clamped_swiglu(alpha: float, limit: float) -> Gate:
    """gpt-oss' `gate sigmoid(alpha gate) (up + 1)`, gate at most `limit` and up within it."""

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return activate


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated block: `down(activation(gate(x), up(x)))`."""

    gate_up: Sequence[Linear]
    down: Linear
    activation: Gate = swiglu

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.gate_up, self.down]

    def gated(self, x: Tensor) -> Tensor:
        """What `down` reads: the activation of `gate` and `up`."""
        width = self.down.weight.shape[1]
        gate, up = fan_out(x, self.gate_up, (width, width))
        many = self.activation is swiglu and passes_rows(gate, width)
        return (swiglu_rows if many else self.activation)(gate, up)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """The few experts that the router picks for a token, and one that always runs, gated or not.

    `chosen_by` says how they are picked, with `correction_X` where the model has one; `scale_X` multiplies
    the weight of each.
    """

    router: Linear
    experts: Sequence[Mlp]
    chosen_by: Experts
    shared: Mlp | None
    shared_gate: Linear | None
    correction_X: Tensor | None = None
    scale_X: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x_ND = x.flatten(0, -2)
        return self.combined(x_ND, *self.route(x_ND)).view_as(x)

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        blocks = [*self.experts] if self.shared is None else [*self.experts, self.shared]
        routers = [self.router] if self.shared_gate is None else [self.router, self.shared_gate]
        return [*routers, *(linear for block in blocks for linear in block.linears)]

    def combined(self, x_ND: Tensor, weight_NS: Tensor, chosen_NS: Tensor) -> Tensor:
        """What the chosen experts give, times their weights, and the one that always runs, [N, D]."""
        y_ND = torch.zeros_like(x_ND)
        for expert in torch.bincount(chosen_NS.flatten()).nonzero().flatten().tolist():
            row, slot = torch.where(chosen_NS == expert)
            weight_N1 = weight_NS[row, slot, None]
            if self.chosen_by.weighs_inputs:
                y_ND.index_add_(0, row, self.experts[expert](x_ND[row] * weight_N1))
            else:
                y_ND.index_add_(0, row, self.experts[expert](x_ND[row]) * weight_N1)
        if self.shared is not None:
            shared_ND = self.shared(x_ND)
            if self.shared_gate is not None:
                shared_ND = torch.sigmoid(self.shared_gate(x_ND)) * shared_ND
            y_ND += shared_ND
        return y_ND

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each row, [N, S]."""
        weight_NS, chosen_NS = route(self.router(x_ND).float(), self.chosen_by, self.correction_X)
        if self.scale_X is not None:
            weight_NS = weight_NS * self.scale_X[chosen_NS]
        return weight_NS.to(x_ND.dtype), chosen_NS


class Block(Protocol):
    """What a layer computes of each token alone."""

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention and MLP, each between its norms (those it has) and added to the residual.

    `parallel` blocks both read what `attention_norm` gives.
    """

    attention_norm: Norm | None
    attention: Mixer
    mlp_norm: Norm | None
    mlp: Block
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False

    def __call__(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        for step in self.steps(rotations, cache):
            x_BTD = step(x_BTD)
        return x_BTD

    def steps(self, rotations: Sequence[Rotation], cache: Cache | None = None) -> tuple[LayerStep, ...]:
        """What the layer does, in order: attention, then MLP; both in one where they are parallel."""
        if self.parallel:
            return (lambda x_BTD: self._both(x_BTD, rotations, cache),)
        attend = SplitStep(
            self.attention.o,
            lambda x_BTD: self.attention.mixed(normalised(self.attention_norm, x_BTD), rotations, cache),
            lambda x_BTD, mixed_BTI: (
                x_BTD + normalised(self.attention_post_norm, self.attention.o(mixed_BTI))
            ),
        )
        return attend, self._mlp_step()

    def _mlp_step(self) -> LayerStep:
        mlp = self.mlp
        if not isinstance(mlp, Mlp):
            return lambda x_BTD: x_BTD + normalised(self.mlp_post_norm, mlp(normalised(self.mlp_norm, x_BTD)))
        return SplitStep(
            mlp.down,
            lambda x_BTD: mlp.gated(normalised(self.mlp_norm, x_BTD)),
            lambda x_BTD, gated_BTI: x_BTD + normalised(self.mlp_post_norm, mlp.down(gated_BTI)),
        )

    def _both(self, x_BTD: Tensor, rotations: Sequence[Rotation], cache: Cache | None) -> Tensor:
        read_BTD = normalised(self.attention_norm, x_BTD)
        mixed_BTD = self.attention.o(self.attention.mixed(read_BTD, rotations, cache))
        x_BTD = x_BTD + normalised(self.attention_post_norm, mixed_BTD)
        return x_BTD + normalised(self.mlp_post_norm, self.mlp(read_BTD))

    @property
    def plain_mlp(self) -> Mlp:
        """Its MLP, which it has where it `is_plain`."""
        assert isinstance(self.mlp, Mlp)
        return self.mlp

    @property
    def plain_attention(self) -> Attention:
        """Its attention, which it has where it `is_plain`."""
        assert isinstance(self.attention, Attention)
        return self.attention

    @property
    def linears(self) -> list[Linear]:
        """All its linears."""
        return [*self.attention.linears, *self.mlp.linears]

    @property
    def is_plain(self) -> bool:
        """Whether the compiled decode steps compute it: as Llama, Mistral, Qwen2 and Qwen3 do.

        Their attention has nothing but head norms, a rotation and a window; inputs of linears are exact.
        """
        a = self.attention
        if not isinstance(a, Attention):
            return False
        head_norms = [norm for norm in (a.q_norm, a.k_norm) if norm is not None]
        by_head = all(norm.is_plain and norm.width == a.head_dim for norm in head_norms)
        special = a.interleaved or a.gated or (a.chunked and a.window is not None)
        options = (a.scale, a.cap, a.limit, a.sinks_H, a.rotated_norm, a.temperature)
        special = special or any(each is not None for each in options)
        before = all(norm is not None and norm.is_plain for norm in (self.attention_norm, self.mlp_norm))
        after = self.attention_post_norm is not None or self.mlp_post_norm is not None
        dense = isinstance(self.mlp, Mlp) and self.mlp.activation is swiglu
        exact = all(linear.inputs in (None, INT8_GROUPS) for linear in self.linears)  # of few rows
        return before and not after and dense and by_head and a.rope == 0 and not special and exact


def normalised(norm: Norm | None, x: Tensor) -> Tensor:
    """What a norm gives; without one the same."""
    return x if norm is None else norm(x)
