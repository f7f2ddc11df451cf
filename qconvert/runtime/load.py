"""Building a decoder: every weight fetched by role, checked against the config, put on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qconvert.core.values import Value
from qconvert.errors import CorruptCheckpoint
from qconvert.runtime.config import DecoderConfig, Experts
from qconvert.runtime.cpu.decode_step import cpu_step
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.device_layout import (
    Layout,
    find_device,
    place_table,
    place_vector,
    place_weight,
    preferred_dtype,
    stack,
)
from qconvert.runtime.head import rounded_head
from qconvert.runtime.linear import Linear, Weight
from qconvert.runtime.model import Attention, Decoder, Layer, Mlp, Norm, SparseMlp, Step
from qconvert.runtime.rope import frequencies
from qconvert.runtime.weight_source import Weights


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    layout: Layout = Layout.REFERENCE,
    head_bits: int | None = None,
) -> Decoder:
    """A decoder with the given weights, computing in `dtype` (float32 or bfloat16) on `device`.

    No dtype stands for the device's fastest. Quantized weights stay packed, each in one `layout`;
    `head_bits` rounds the head to 8 or 4 bits (beside the embedding, where the two are tied). Raises
    CorruptCheckpoint for a weight that is missing or has another shape than the config implies, and
    BadRecipe for a device that is not here.
    """
    device = find_device(device)
    loader = _Loader(config, weights, device, dtype or preferred_dtype(device), layout)
    table = (config.vocab, config.hidden)
    embed = place_table(loader.value("embed", None, *table), device, loader.dtype, layout)
    stored = loader.find("lm_head", None, *table)
    if stored is None and not config.tied:
        raise _missing("lm_head", None, "weight")
    head = embed if stored is None else place_table(stored, device, loader.dtype, layout)
    if head_bits is not None:
        head = place_table(rounded_head(head, head_bits), device, torch.float32, layout)
    decoder = Decoder(
        config=config,
        dtype=loader.dtype,
        layout=layout,
        embed=embed,
        layers=tuple(loader.layer(i) for i in range(config.layers)),
        norm=loader.norm("final_norm", None, config.hidden),
        head=head,
        frequencies_F=frequencies(config.rope, config.head_dim).to(device),
    )
    return replace(decoder, step=_step(decoder)) if layout is Layout.AUTO else decoder


def _step(decoder: Decoder) -> Step | None:
    """A faster way to decode a single sequence, where there is one for the device and the model."""
    if available(decoder.device):
        from qconvert.runtime.cuda.decode_step import CudaStep, obstacle

        if obstacle(decoder, 1) is None:
            return CudaStep(decoder)
    return cpu_step(decoder)


@dataclass(frozen=True, slots=True)
class _Loader:
    config: DecoderConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    layout: Layout

    def layer(self, i: int) -> Layer:
        experts = self.config.experts
        return Layer(
            attention_norm=self.norm("attn.norm", i, self.config.hidden),
            attention=self.attention(i),
            mlp_norm=self.norm("mlp.norm", i, self.config.hidden),
            mlp=self.mlp("mlp", i, self.config.mlp_width)
            if experts is None or i not in experts.layers
            else self.sparse_mlp(i, experts),
        )

    def attention(self, i: int) -> Attention:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Attention(
            layer=i,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            window=c.windows[i],
            qkv=self.stacked("attn.qkv", i, {"attn.q": q, "attn.k": kv, "attn.v": kv}),
            q_norm=self.norm("attn.q_norm", i, c.head_dim) if c.qk_norm else None,
            k_norm=self.norm("attn.k_norm", i, c.head_dim) if c.qk_norm else None,
            o=self.linear("attn.o", i, c.hidden, q),
        )

    def mlp(self, prefix: str, i: int, width: int) -> Mlp:
        parts = {f"{prefix}.gate": width, f"{prefix}.up": width}
        return Mlp(
            gate_up=self.stacked(f"{prefix}.gate_up", i, parts),
            down=self.linear(f"{prefix}.down", i, self.config.hidden, width),
        )

    def sparse_mlp(self, i: int, experts: Experts) -> SparseMlp:
        hidden, shared = self.config.hidden, experts.shared_width
        return SparseMlp(
            router=self.linear("mlp.router", i, experts.count, hidden),
            experts=tuple(self.mlp(f"mlp.experts.{n}", i, experts.width) for n in range(experts.count)),
            per_token=experts.per_token,
            normalise=experts.normalise,
            shared=None if shared is None else self.mlp("mlp.shared", i, shared),
            shared_gate=None if shared is None else self.linear("mlp.shared_gate", i, 1, hidden),
        )

    def stacked(self, fused: str, i: int, parts: dict[str, int]) -> tuple[Linear, ...]:
        """The fused projection when the model has it, or when the layout is for speed; else its parts."""
        rows, hidden = sum(parts.values()), self.config.hidden
        value = self.find(fused, i, rows, hidden)
        if value is not None:
            return (Linear(self.place(value), self.bias(fused, i, rows)),)
        values = [self.value(role, i, out, hidden) for role, out in parts.items()]
        biases = [self.bias(role, i, out) for role, out in parts.items()]
        whole = stack(values) if self.layout is Layout.AUTO else None
        present = [bias for bias in biases if bias is not None]
        if whole is None or len(present) not in (0, len(biases)):
            pairs = zip(values, biases, strict=True)
            return tuple(Linear(self.place(value), bias) for value, bias in pairs)
        return (Linear(self.place(whole), torch.cat(present) if present else None),)

    def linear(self, role: str, i: int, out: int, width: int) -> Linear:
        return Linear(self.place(self.value(role, i, out, width)), self.bias(role, i, out))

    def place(self, value: Value) -> Weight:
        return place_weight(value, self.device, self.dtype, self.layout)

    def value(self, role: str, i: int | None, out: int, width: int) -> Value:
        value = self.find(role, i, out, width)
        if value is None:
            raise _missing(role, i, "weight")
        return value

    def find(self, role: str, i: int | None, out: int, width: int) -> Value | None:
        value = self.weights.get(role, i)
        if value is not None:
            _check_shape(role, i, (value.rows, value.width), (out, width))
        return value

    def bias(self, role: str, i: int, out: int) -> Tensor | None:
        value = self.weights.get(role, i, "bias")
        if value is None and role in self.config.biased:
            raise _missing(role, i, "bias")
        return None if value is None else self.vector(role, i, value, out)

    def norm(self, role: str, i: int | None, width: int) -> Norm:
        value = self.weights.get(role, i)
        if value is None:
            raise _missing(role, i, "weight")
        return Norm(self.vector(role, i, value, width), self.config.norm_eps)

    def vector(self, role: str, i: int | None, value: Value, width: int) -> Tensor:
        vector = place_vector(value, self.device, self.dtype)
        _check_shape(role, i, tuple(vector.shape), (width,))
        return vector


def _place(role: str, layer: int | None) -> str:
    return role if layer is None else f"layer {layer}: {role}"


def _missing(role: str, layer: int | None, kind: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{_place(role, layer)}: the checkpoint has no {kind}", "check that all of its shards are there"
    )


def _check_shape(role: str, layer: int | None, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CorruptCheckpoint(
            f"{_place(role, layer)}: shape {list(found)}, but config.json implies {list(wanted)}",
            "take the weights and the config.json of one model",
        )
