"""Builds the layers of a decoder from its weights: which mixer, which block, what beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qconvert.runtime.attention import Temperature
from qconvert.runtime.beside import CarryingLayer, LayerInput, LayerInputs
from qconvert.runtime.delta_net import DeltaNet
from qconvert.runtime.dense_and_sparse import DenseAndSparse
from qconvert.runtime.latent_attention import LatentAttention
from qconvert.runtime.layer import (
    Attention,
    Block,
    Gate,
    Layer,
    Mixer,
    Mlp,
    SparseMlp,
    clamped_swiglu,
    gelu_glu,
    swiglu,
)
from qconvert.runtime.linear import Linear
from qconvert.runtime.norm import Norm
from qconvert.runtime.placed_weights import PlacedWeights
from qconvert.runtime.shared_keys import SharingAttention

_GATES: dict[str, Gate] = {
    "silu": swiglu,
    "gelu": gelu_glu,
    "gelu_tanh": partial(gelu_glu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerBuilder(PlacedWeights):
    """Makes layers of a model's weights, as its config says."""

    def layer(self, i: int) -> Layer:
        """The layer of this number."""
        config, block = self.config, self.block(i)
        weightless, whole = config.graph.weightless_norms, isinstance(block, DenseAndSparse)
        parts: dict[str, Any] = {
            "attention_norm": self.norm("attn.norm", i, weightless=weightless),
            "attention": self.attention(i),
            "mlp_norm": None if whole else self.norm("mlp.norm", i, weightless=weightless),
            "mlp": block,
            "attention_post_norm": self.norm("attn.post_norm", i),
            "mlp_post_norm": self.norm("mlp.post_norm", i),
            "parallel": config.graph.parallel,
        }
        if not config.graph.values_have_norm:
            return Layer(**parts)
        scale = self.parameter("layer_scale", i) if config.has("layer_scale", i) else None
        return CarryingLayer(**parts, hidden=config.hidden, own_input=self.layer_input(i), scale_1=scale)

    def attention(self, i: int) -> Mixer:
        """The attention of a layer, or what stands in its place."""
        if self.config.has("delta.o", i):
            return self.delta_net(i)
        if self.config.graph.values_have_norm:
            return self.sharing_attention(i)
        return self.plain_attention(i) if self.config.latent is None else self.latent_attention(i)

    def sharing_attention(self, i: int) -> SharingAttention:
        c, rope = self.config, self.rope(i)
        roles = [role for role in ("attn.q", "attn.k", "attn.v") if c.has(role, i)]
        q_norm = self.norm("attn.q_norm", i)
        assert q_norm is not None and rope is not None and c.score_scale is not None
        return SharingAttention(
            layer=i,
            source=c.sources[i],
            heads=c.heads,
            kv_heads=c.own_heads[i][0],
            window=c.windows[i],
            rope=rope,
            scale=c.score_scale,
            reading=self.stacked("attn.qkv", i, roles),
            widths=tuple(c.shapes[role, i, "weight"][0] for role in roles),
            q_norm=q_norm,
            k_norm=self.norm("attn.k_norm", i),
            v_norm=Norm(None, c.norm_eps),
            o=self.linear("attn.o", i),
            columns=c.shared_columns(i),
        )

    def layer_input(self, i: int) -> LayerInput | None:
        """How a layer takes in what it reads of the tokens, where it does."""
        norm, width = self.norm("per_layer.norm", i), self.config.layer_input
        if norm is None:
            return None
        gate, out = (self.linear(role, i) for role in ("per_layer.gate", "per_layer.out"))
        return LayerInput(slice(i * width, (i + 1) * width), gate, out, norm)

    def layer_inputs(self) -> LayerInputs | None:
        """What makes the inputs of all layers, where they have some."""
        table, projection = (self.table(role) for role in ("per_layer.table", "per_layer.model"))
        norm = self.norm("per_layer.model_norm", None)
        if table is None or projection is None or norm is None:
            return None
        return LayerInputs(table, Linear(projection), norm)

    def block(self, i: int) -> Block:
        """The MLP of a layer, its experts, or both."""
        if not self.config.has("mlp.router", i):
            return self.mlp("mlp", i)
        if not self.config.has("mlp.norm_2", i):
            return self.sparse_mlp(i)
        roles = "mlp.norm", "mlp.post_norm_1", "mlp.norm_2", "mlp.post_norm_2"
        dense, dense_post, sparse, sparse_post = (self.norm(role, i) for role in roles)
        assert dense and dense_post and sparse and sparse_post
        scale_D = self.parameter("mlp.router_scale", i, torch.float32) * self.config.hidden**-0.5
        return DenseAndSparse(
            dense=self.mlp("mlp", i),
            dense_norm=dense,
            dense_post_norm=dense_post,
            sparse=self.sparse_mlp(i),
            sparse_norm=sparse,
            sparse_post_norm=sparse_post,
            router_norm=Norm(scale_D, self.config.norm_eps),
        )

    def delta_net(self, i: int) -> DeltaNet:
        sizes, joined = self.config.delta, self.config.has("delta.qkvz", i)
        roles = ("delta.qkvz", "delta.ba") if joined else ("delta.qkv", "delta.z", "delta.b", "delta.a")
        tap, norm = self.tap(roles, i), self.norm("delta.norm", i, offset=0.0)
        assert sizes is not None and norm is not None
        return DeltaNet(
            layer=i,
            sizes=sizes,
            reading=tuple(self.tapped(role, i, tap if role == roles[0] else None) for role in roles),
            conv_C1K=self.parameter("delta.conv", i),
            decay_H=self.parameter("delta.A_log", i, torch.float32),
            step_bias_H=self.parameter("delta.dt_bias", i, torch.float32),
            norm=norm,
            o=self.linear("delta.o", i),
        )

    def latent_attention(self, i: int) -> LatentAttention:
        c = self.config
        assert c.latent is not None and c.score_scale is not None
        first = "attn.q_a" if c.has("attn.q_a", i) else "attn.q"
        tap, kv_norm = self.tap((first, "attn.kv_a"), i), self.norm("attn.kv_a_norm", i)
        assert kv_norm is not None
        q = (self.tapped(first, i, tap),)
        return LatentAttention(
            layer=i,
            heads=c.heads,
            sizes=c.latent,
            q=(*q, self.linear("attn.q_b", i)) if first == "attn.q_a" else q,
            q_norm=self.norm("attn.q_a_norm", i),
            kv_a=self.tapped("attn.kv_a", i, None),
            kv_norm=kv_norm,
            kv_b=self.linear("attn.kv_b", i),
            o=self.linear("attn.o", i),
            interleaved=c.rope.interleaved,
            scale=c.score_scale,
        )

    def plain_attention(self, i: int) -> Attention:
        c, rope = self.config, self.rope(i)
        tuned = c.temperature is not None and rope is None
        return Attention(
            layer=i,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            window=c.windows[i],
            qkv=self.stacked("attn.qkv", i, ("attn.q", "attn.k", "attn.v")),
            q_norm=self.norm("attn.q_norm", i),
            k_norm=self.norm("attn.k_norm", i),
            o=self.linear("attn.o", i),
            rope=rope,
            interleaved=c.rope.interleaved,
            scale=c.score_scale,
            cap=c.score_cap,
            limit=c.qkv_limit,
            sinks_H=self.parameter("attn.sinks", i) if c.has("attn.sinks", i) else None,
            gated=c.shapes["attn.q", i, "weight"][0] == 2 * c.heads * c.head_dim,
            chunked=c.chunked,
            rotated_norm=Norm(None, c.norm_eps) if c.norm_after_rope and rope is not None else None,
            temperature=Temperature(*c.temperature) if tuned and c.temperature else None,
        )

    def rope(self, i: int) -> int | None:
        """Which rotation a layer has: the first, that of layers with a window, or none."""
        if not self.config.rotated[i]:
            return None
        return 0 if self.config.local_rope is None or self.config.windows[i] is None else 1

    def rotated_dim(self, rope: int) -> int:
        """The dimension of the heads that a rotation is for."""
        layers = (i for i in range(self.config.layers) if self.rope(i) == rope)
        found = next(layers, None)
        return self.config.head_dim if found is None else self.config.own_heads[found][1]

    def mlp(self, prefix: str, i: int) -> Mlp:
        clamped = self.config.activation == "clamped"
        return Mlp(
            gate_up=self.stacked(f"{prefix}.gate_up", i, (f"{prefix}.gate", f"{prefix}.up")),
            down=self.linear(f"{prefix}.down", i),
            activation=clamped_swiglu(*self.config.clamp) if clamped else _GATES[self.config.activation],
        )

    def sparse_mlp(self, i: int) -> SparseMlp:
        experts = self.config.experts
        assert experts is not None
        count = self.config.shapes["mlp.router", i, "weight"][0]
        correction, scale = "mlp.router_correction", "mlp.expert_scale"
        names = "mlp.shared.gate", "mlp.shared_gate", correction, scale
        shared, gated, corrected, scaled = (self.config.has(role, i) for role in names)
        return SparseMlp(
            router=self.linear("mlp.router", i),
            experts=tuple(self.mlp(f"mlp.experts.{n}", i) for n in range(count)),
            chosen_by=experts,
            shared=self.mlp("mlp.shared", i) if shared else None,
            shared_gate=self.linear("mlp.shared_gate", i) if gated else None,
            correction_X=self.parameter(correction, i, torch.float32) if corrected else None,
            scale_X=self.parameter(scale, i, torch.float32) if scaled else None,
        )
