"""Builds a decoder: fetches every weight by role, checks its shape, puts it on the device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import overload

import torch
from torch import Tensor

from qconvert.core.values import Value
from qconvert.errors import CorruptCheckpoint
from qconvert.runtime.attention import Temperature
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu.decode_step import cpu_step
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.delta_net import DeltaNet
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
from qconvert.runtime.latent_attention import LatentAttention
from qconvert.runtime.layer import (
    Attention,
    Gate,
    Layer,
    Mixer,
    Mlp,
    SparseMlp,
    clamped_swiglu,
    gelu_glu,
    swiglu,
)
from qconvert.runtime.linear import Linear, Table, Weight
from qconvert.runtime.model import Decoder, Step
from qconvert.runtime.norm import Norm
from qconvert.runtime.observers import InputKey, Observers, Tap
from qconvert.runtime.rope import frequencies
from qconvert.runtime.storage import StreamedWeight
from qconvert.runtime.weight_source import Inputs, StreamedWeights, Weights, exact_inputs


class Streaming(Enum):
    """Which weights are read whenever they are needed, and not held."""

    NOTHING = "nothing"
    TABLES = "tables"
    EVERYTHING = "everything"


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    layout: Layout = Layout.REFERENCE,
    head_bits: int | None = None,
    on_demand: bool = False,
    inputs: Inputs = exact_inputs,
    streaming: Streaming = Streaming.NOTHING,
) -> Decoder:
    """A decoder with the given weights, computing in `dtype` (float32 or bfloat16) on `device`.

    No dtype stands for the device's fastest. Quantized weights stay packed, each in one `layout`;
    `head_bits` rounds the head to 8 or 4 bits (beside the embedding, where the two are tied). Layers that
    are loaded `on_demand` are read whenever they are asked for, and not kept; what `streaming` names is never
    held, but read by blocks of rows when it is multiplied by (`weights` are `StreamedWeights`).
    `inputs` says what linears round their inputs to. Raises CorruptCheckpoint for a weight that is missing or
    has another shape than the config implies, and BadRecipe for a device that is not here.
    """
    device = find_device(device)
    loader = _Loader(config, weights, device, dtype or preferred_dtype(device), layout, inputs, streaming)
    embed = loader.table("embed")
    if embed is None:
        raise _missing("embed", None, "weight")
    stored = loader.table("lm_head")
    if stored is None and not config.tied:
        raise _missing("lm_head", None, "weight")
    head = embed if stored is None else stored
    if head_bits is not None:
        head = place_table(rounded_head(head, head_bits), device, torch.float32, layout)
    local = config.local_rope
    norm = loader.norm("final_norm", None, scale=config.logit_scale)
    assert norm is not None
    decoder = Decoder(
        config=config,
        dtype=loader.dtype,
        layout=layout,
        embed=embed,
        layers=LayersOnDemand(loader) if on_demand else tuple(loader.layer(i) for i in range(config.layers)),
        norm=norm,
        head=head,
        frequencies_F=frequencies(config.rope, config.head_dim).to(device),
        local_frequencies_F=None if local is None else frequencies(local, config.head_dim).to(device),
        embed_scale=config.hidden**0.5 if config.graph.scaled_embedding else 1.0,
        observers=loader.observers,
        head_inputs=inputs("lm_head", None),
    )
    return replace(decoder, step=_step(decoder)) if layout is Layout.AUTO and not on_demand else decoder


class LayersOnDemand(Sequence[Layer]):
    """The layers of a model, each read from the checkpoint whenever it is asked for."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.config.layers

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        numbers = range(len(self))[index]
        with torch.inference_mode(False):  # weights are packed in other threads, which are in no such mode
            if isinstance(numbers, range):
                return [self._loader.layer(i) for i in numbers]
            return self._loader.layer(numbers)


def _step(decoder: Decoder) -> Step | None:
    """A faster way to decode a single sequence, where there is one for the device and the model."""
    if available(decoder.device):
        from qconvert.runtime.cuda.decode_step import CudaStep, obstacle

        if obstacle(decoder, 1) is None:
            return CudaStep(decoder)
    return cpu_step(decoder)


_GATES: dict[str, Gate] = {
    "silu": swiglu,
    "gelu": gelu_glu,
    "gelu_tanh": partial(gelu_glu, approximate="tanh"),
}
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")


@dataclass(frozen=True, slots=True)
class _Loader:
    config: DecoderConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    layout: Layout
    inputs: Inputs
    streaming: Streaming = Streaming.NOTHING
    observers: Observers = field(default_factory=Observers)

    def layer(self, i: int) -> Layer:
        sparse = self.config.has("mlp.router", i)
        return Layer(
            attention_norm=self.norm("attn.norm", i, weightless=self.config.graph.weightless_norms),
            attention=self.attention(i),
            mlp_norm=self.norm("mlp.norm", i, weightless=self.config.graph.weightless_norms),
            mlp=self.sparse_mlp(i) if sparse else self.mlp("mlp", i),
            attention_post_norm=self.norm("attn.post_norm", i),
            mlp_post_norm=self.norm("mlp.post_norm", i),
            parallel=self.config.graph.parallel,
        )

    def attention(self, i: int) -> Mixer:
        """The attention of a layer, or what stands in its place."""
        if self.config.has("delta.o", i):
            return self.delta_net(i)
        return self.plain_attention(i) if self.config.latent is None else self.latent_attention(i)

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
        correction = "mlp.router_correction"
        names = "mlp.shared.gate", "mlp.shared_gate", correction
        shared, gated, corrected = (self.config.has(role, i) for role in names)
        return SparseMlp(
            router=self.linear("mlp.router", i),
            experts=tuple(self.mlp(f"mlp.experts.{n}", i) for n in range(count)),
            chosen_by=experts,
            shared=self.mlp("mlp.shared", i) if shared else None,
            shared_gate=self.linear("mlp.shared_gate", i) if gated else None,
            correction_X=self.parameter(correction, i, torch.float32) if corrected else None,
        )

    def stacked(self, fused: str, i: int, roles: Sequence[str]) -> tuple[Linear, ...]:
        """The fused projection when the model has it, or when the layout is for speed; else its parts."""
        tap = self.tap(roles, i)
        if self.streaming is Streaming.EVERYTHING:
            return self.stacked_streams(fused, i, roles, tap)
        value = self.find(fused, i, roles)
        if value is not None:
            return (Linear(self.place(value), self.bias(fused, i, roles), tap, self.inputs(fused, i)),)
        values = [self.value(role, i) for role in roles]
        biases = [self.bias(role, i) for role in roles]
        inputs = [self.inputs(role, i) for role in roles]
        whole = stack(values) if self.layout is Layout.AUTO and len(set(inputs)) == 1 else None
        present = [bias for bias in biases if bias is not None]
        if whole is None or len(present) not in (0, len(biases)):
            taps = (tap, *(None for _ in roles[1:]))
            parts = zip(map(self.place, values), biases, taps, inputs, strict=True)
            return tuple(Linear(*part) for part in parts)
        return (Linear(self.place(whole), torch.cat(present) if present else None, tap, inputs[0]),)

    def stacked_streams(self, fused: str, i: int, roles: Sequence[str], tap: Tap) -> tuple[Linear, ...]:
        """The fused projection when the model has it, else its parts; none of them held."""
        whole = self.stream(fused, i, roles)
        if whole is not None:
            return (Linear(whole, self.bias(fused, i, roles), tap, self.inputs(fused, i)),)
        return tuple(self.tapped(role, i, tap if role == roles[0] else None) for role in roles)

    def linear(self, role: str, i: int) -> Linear:
        return self.tapped(role, i, self.tap([role], i))

    def tapped(self, role: str, i: int, tap: Tap | None) -> Linear:
        return Linear(self.weight(role, i), self.bias(role, i), tap, self.inputs(role, i))

    def weight(self, role: str, i: int) -> Weight:
        if self.streaming is not Streaming.EVERYTHING:
            return self.place(self.value(role, i))
        streamed = self.stream(role, i)
        if streamed is None:
            raise _missing(role, i, "weight")
        return streamed

    def table(self, role: str) -> Table | None:
        """Embedding or head; None when the model has none of its own."""
        if self.streaming is not Streaming.NOTHING:
            return self.stream(role, None)
        value = self.find(role, None)
        return None if value is None else place_table(value, self.device, self.dtype, self.layout)

    def stream(self, role: str, i: int | None, members: Sequence[str] = ()) -> StreamedWeight | None:
        """A weight, or the fused one of all members, that is read whenever it is needed."""
        assert isinstance(self.weights, StreamedWeights)
        rows = self.weights.rows(role, i)
        if rows is None:
            return None
        self.check_shape(role, i, rows.shape, members)
        place = partial(place_table, device=self.device, dtype=self.dtype, layout=self.layout)
        return StreamedWeight(rows, self.device, self.dtype, place)

    def tap(self, roles: Sequence[str], i: int) -> Tap:
        expert = _EXPERT.search(roles[0])
        groups = tuple(_EXPERT.sub("", role) for role in roles)
        return Tap(InputKey(groups, i, int(expert[1]) if expert else None), self.observers.linears)

    def place(self, value: Value) -> Weight:
        return place_weight(value, self.device, self.dtype, self.layout)

    def value(self, role: str, i: int | None) -> Value:
        value = self.find(role, i)
        if value is None:
            raise _missing(role, i, "weight")
        return value

    def find(self, role: str, i: int | None, members: Sequence[str] = ()) -> Value | None:
        """A weight, or the fused one of all members, of the shape that the architecture has."""
        value = self.weights.get(role, i)
        if value is not None:
            self.check_shape(role, i, (value.rows, value.width), members)
        return value

    def check_shape(self, role: str, i: int | None, found: tuple[int, ...], members: Sequence[str]) -> None:
        """Raise CorruptCheckpoint unless a weight, or the fused one of all members, has its shape."""
        shapes = [self.config.shapes[each, i, "weight"] for each in members or (role,)]
        _check_shape(role, i, found, (sum(rows for rows, _ in shapes), shapes[0][1]))

    def bias(self, role: str, i: int, members: Sequence[str] = ()) -> Tensor | None:
        shapes = [self.config.shapes.get((each, i, "bias")) for each in members or (role,)]
        if None in shapes:
            return None
        value = self.weights.get(role, i, "bias")
        if value is None:
            raise _missing(role, i, "bias")
        return self.vector(role, i, value, (sum(shape[0] for shape in shapes if shape),))

    def norm(
        self,
        role: str,
        i: int | None,
        *,
        scale: float = 1.0,
        weightless: bool = False,
        offset: float | None = None,
    ) -> Norm | None:
        """A norm with its weight, plus the model's offset, times `scale`; None where there is none."""
        graph, weight = self.config.graph, None
        offset = self.config.norm_offset if offset is None else offset
        if self.config.has(role, i):
            changed = offset or scale != 1
            # What is added to or multiplied into a weight stays in float32: it would not fit bf16.
            weight = self.parameter(role, i, torch.float32 if changed else self.dtype)
            weight = (weight + offset) * scale if changed else weight
        elif not weightless and role != "final_norm":
            return None
        tap = Tap(InputKey((role,), i), self.observers.norms)
        return Norm(weight, self.config.norm_eps, graph.layer_norm, tap)

    def parameter(self, role: str, i: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """A weight that is no matrix, in the shape that the architecture has."""
        value = self.weights.get(role, i)
        if value is None:
            raise _missing(role, i, "weight")
        return self.vector(role, i, value, dtype=dtype)

    def vector(
        self,
        role: str,
        i: int | None,
        value: Value,
        wanted: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A parameter that is no matrix, in the shape that the architecture has."""
        wanted = wanted or self.config.shapes[role, i, "weight"]
        vector = place_vector(value, self.device, dtype or self.dtype)
        if vector.numel() != math.prod(wanted):
            _check_shape(role, i, tuple(vector.shape), wanted)
        return vector.view(wanted)


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
