"""Reads the settings of a model that a decoder needs: its architecture, and the settings of its computing.

Names, shapes, biases, norms and experts come from `qconvert.models.Architecture`; what a family computes
with them from `qconvert.runtime.graphs`. Whatever the decoder cannot compute exactly is refused here, so
that the model holds no special cases. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qconvert.core.config_json import divide, flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.models.architecture import Architecture, ParameterKey
from qconvert.models.families.gemma4 import kind_of, shares_keys
from qconvert.models.family_of import model_type_of
from qconvert.models.rope import LongScaling, Rope, local_rope_settings, read_rope, score_temperature
from qconvert.runtime.graphs import GRAPHS, Graph

_ELSEWHERE = "llama.cpp may run it (`qconvert to-gguf`)"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a sparse layer's experts, `per_token` run for a token; their weights sum to 1 if `normalise`.

    They are chosen by a softmax over all, or by sigmoids; where they stand in `groups`, of `kept_groups` of
    these alone. Weights are multiplied by `scale`, and multiply what an expert gives, or with
    `weighs_inputs` what it reads.
    """

    per_token: int
    normalise: bool
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Of latent attention: plain, rotated and value dimensions of a head, and the width of what is kept."""

    plain: int
    rotated: int
    value: int
    rank: int


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Of a gated delta net: heads of keys and of values, their dimensions, the kernel of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """The width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder: its parameters, heads, rotary embeddings, attention windows, experts.

    `shapes` has every parameter of the unfused model. `windows[i]` is the number of positions, its own
    included, that a token attends to in layer i; None stands for all of them. Windows that are `chunked` do
    not slide: they begin at multiples of their length. `rotated[i]` says whether layer i rotates queries and
    keys; those that do normalise them then, with `norm_after_rope`, and those that do not multiply queries
    by a `temperature` (floor_scale, attn_scale). `norm_offset` is added to the weights of norms.
    `local_rope` is the rotary embedding of layers with a window where it is another one. `score_scale` (None:
    1 / sqrt(head_dim)) and `score_cap` apply to attention scores, `qkv_limit` clamps queries, keys and
    values, `logit_scale` multiplies and `logit_cap` bounds the logits. `activation` is `silu`, `gelu`,
    `gelu_tanh` or `clamped`, whose `clamp` is (alpha, limit). With `latent` sizes, attention is DeepSeek's,
    and `head_dim` what of a head is rotated; with `delta` sizes, layers without attention are gated delta
    nets. `own_heads[i]` are the key-value heads of layer i and their dimension (`kv_heads` and `head_dim`
    those of the first), `sources[i]` the layer whose keys and values it reads, its own but in Gemma 4, and
    `layer_input` the width of what a layer reads of the tokens themselves, else 0.
    """

    model_type: str
    graph: Graph
    shapes: Mapping[ParameterKey, tuple[int, ...]]
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    local_rope: Rope | None
    norm_eps: float
    norm_offset: float
    windows: tuple[int | None, ...]
    chunked: bool
    rotated: tuple[bool, ...]
    norm_after_rope: bool
    temperature: tuple[float, float] | None
    tied: bool
    experts: Experts | None
    max_positions: int
    activation: str
    clamp: tuple[float, float]
    score_scale: float | None
    score_cap: float | None
    qkv_limit: float | None
    logit_scale: float
    logit_cap: float | None
    latent: LatentSizes | None = None
    delta: DeltaSizes | None = None
    own_heads: tuple[tuple[int, int], ...] = ()
    sources: tuple[int, ...] = ()
    layer_input: int = 0

    @property
    def stream(self) -> int:
        """The columns that go from layer to layer: hidden states, and what lies beside them."""
        return self.hidden + self.layers * self.layer_input + sum(self._shared_widths.values())

    def shared_columns(self, i: int) -> slice | None:
        """Where beside the hidden states the keys and values lie that a layer shares; None if it does not."""
        first = self.layers * self.layer_input
        for source, width in self._shared_widths.items():
            if source == self.sources[i]:
                return slice(first, first + width)
            first += width
        return None

    @property
    def _shared_widths(self) -> dict[int, int]:
        """The keys and values of one token of the layers that others share them with."""
        shared = sorted({source for i, source in enumerate(self.sources) if source != i})
        return {i: 2 * math.prod(self.own_heads[i]) for i in shared}

    @property
    def cached(self) -> tuple[tuple[int, int, int], ...]:
        """What of a token is kept in every layer: parts, heads, and numbers of each."""
        return tuple(self._cached(i) for i in range(self.layers))

    def _cached(self, i: int) -> tuple[int, int, int]:
        if not self.has("attn.o", i) or self.sources[i] != i:
            return 0, 0, 0
        if self.latent is not None:
            return 1, 1, self.latent.rank + self.latent.rotated
        return 2, *self.own_heads[i]

    @property
    def head_widths(self) -> tuple[int, int]:
        """The widths of all queries and of all keys, of values too where these are narrower."""
        if self.latent is not None:
            width = self.heads * (self.latent.plain + max(self.latent.rotated, self.latent.value))
            return width, width
        queries = self.heads * max(head_dim for _, head_dim in self.own_heads)
        keys = max(map(math.prod, self.own_heads))
        if self.delta is None:
            return queries, keys
        return max(2 * queries, self.delta.values), max(keys, 2 * self.delta.keys)

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def mlp_width(self) -> int:
        """The inner width of the dense block of the first layer that has one."""
        return next(shape[0] for (role, _, _), shape in self.shapes.items() if role == "mlp.gate")

    @property
    def qk_norm(self) -> bool:
        return self.has("attn.q_norm", 0)

    @property
    def biased(self) -> frozenset[str]:
        """The roles with a bias; `attn.qkv` where its members have one."""
        roles = {role for role, _, param in self.shapes if param == "bias"}
        return frozenset(roles | {"attn.qkv"} if "attn.q" in roles else roles)

    def has(self, role: str, layer: int | None, param: str = "weight") -> bool:
        return (role, layer, param) in self.shapes

    @staticmethod
    def from_hf(config: Json) -> DecoderConfig:
        """Read a Hugging Face config.json; raises what `of` and `Architecture.of` raise."""
        return DecoderConfig.of(Architecture.of(config))

    @staticmethod
    def of(architecture: Architecture) -> DecoderConfig:
        """What an architecture says of its decoder.

        Raises UnsupportedModel for a family, an activation or a rotary embedding that is not computed
        here, CorruptCheckpoint for numbers that make no model.
        """
        graph, settings = _graph(architecture)
        dims = architecture.dimensions[0]
        heads = positive_int(settings, "num_attention_heads")
        kv_heads, head_dim = dims["kv_heads"], dims["head_dim"]
        interleaved = graph.interleaved_rope and settings.get("rope_interleave") is not False
        rope = read_rope(settings, interleaved=interleaved)
        latent = _latent(settings) if graph.latent else None
        own = tuple(range(architecture.layers))
        windows = _windows(settings, architecture.layers, graph)
        if rope.share != 1 and not graph.partial_rope:
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor is {rope.share}",
                f"{_ELSEWHERE}; here whole heads rotate",
            )
        if heads % kv_heads or rope.rotated(head_dim) % 2 or not rope.rotated(head_dim):
            raise CorruptCheckpoint(
                f"config.json: {heads} heads over {kv_heads} key-value heads of {head_dim} dimensions",
                "correct it: heads must be a multiple of num_key_value_heads, and head_dim even",
            )
        if isinstance(rope.scaling, LongScaling):
            _check_divisors(rope.scaling, rope.rotated(head_dim) // 2)
        local = local_rope_settings(settings)
        scalar = _optional(settings, "query_pre_attn_scalar")
        score_scale = None if scalar is None else scalar**-0.5
        score_scale = graph.score_scale or score_scale
        if latent is not None:
            score_scale = (latent.plain + latent.rotated) ** -0.5 * score_temperature(settings)
        return DecoderConfig(
            model_type=str(model_type_of(architecture.config)),
            graph=graph,
            shapes=architecture.shapes,
            vocab=dims["vocab"],
            hidden=dims["hidden"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            local_rope=None if local is None else read_rope(local, interleaved=interleaved),
            norm_eps=graph.fixed_eps or _optional(settings, graph.norm_eps) or 1e-6,
            norm_offset=architecture.family.norm_offset,
            windows=windows,
            chunked=graph.chunked,
            rotated=tuple(graph.rotates(settings, i, each is not None) for i, each in enumerate(windows)),
            norm_after_rope=graph.norm_after_rope and flag(settings, "use_qk_norm", default=True),
            temperature=_temperature(settings),
            tied=architecture.tied,
            experts=_experts(architecture, settings, graph),
            max_positions=optional_int(settings, "max_position_embeddings") or 2048,
            activation=_activation(settings, graph),
            clamp=(
                _optional(settings, "swiglu_alpha") or 1.702,
                _optional(settings, "swiglu_limit") or 7.0,
            ),
            score_scale=score_scale,
            score_cap=_optional(settings, "attn_logit_softcapping"),
            qkv_limit=_optional(settings, "clip_qkv"),
            logit_scale=_optional(settings, "logit_scale") or 1.0,
            logit_cap=_optional(settings, "final_logit_softcapping"),
            latent=latent,
            delta=_delta(settings) if any(role == "delta.o" for role, _, _ in architecture.shapes) else None,
            own_heads=tuple((each["kv_heads"], each["head_dim"]) for each in architecture.dimensions),
            sources=_sources(settings, architecture.layers) if graph.values_have_norm else own,
            layer_input=dims.get("per_layer", 0),
        )


def _graph(architecture: Architecture) -> tuple[Graph, Json]:
    """What the family computes, and the settings completed with its class's defaults."""
    types = (architecture.config.get("model_type"), *architecture.family.model_types)
    graph = next((GRAPHS[each] for each in types if isinstance(each, str) and each in GRAPHS), None)
    if graph is None:
        raise UnsupportedModel(
            f"config.json: model_type {types[0]!r} is not run here",
            f"{_ELSEWHERE}; here {', '.join(GRAPHS)} run",
        )
    if architecture.settings.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModel(
            "config.json: use_bidirectional_attention is set",
            "that makes it an encoder; decoders are run here",
        )
    if architecture.table("lm_head") is None and not architecture.tied:
        raise UnsupportedModel(
            f"config.json: {', '.join(architecture.config.get('architectures') or [])} has no head over the "
            "vocabulary, so that no next token is predicted",
            "it can be quantized anyway; measure it by its own task",
        )
    defaults = graph.defaults
    if architecture.settings.get("rope_scaling"):  # the older key of what `rope_parameters` holds
        defaults = {key: value for key, value in defaults.items() if key != "rope_parameters"}
    return graph, {**defaults, **architecture.settings}


def _check_divisors(scaling: LongScaling, pairs: int) -> None:
    found = {len(scaling.short), len(scaling.long)}
    if found != {pairs}:
        raise CorruptCheckpoint(
            f"config.json: short_factor and long_factor have {found}, not {pairs} divisors"
        )


def _optional(settings: Json, key: str) -> float | None:
    """The positive number that float32 holds under a key; None for an absent or null one."""
    value = settings.get(key)
    number = None if value is None else positive_number(value)
    if value is not None and number is None:
        raise CorruptCheckpoint(
            f"config.json: {key} is {shown(repr(value))}", f"correct it: {key} must be a positive number"
        )
    return number


def _activation(settings: Json, graph: Graph) -> str:
    if graph.clamped_swiglu:
        return "clamped"
    stated = settings.get(graph.activation) or ("gelu_pytorch_tanh" if graph.gelu_is_tanh else "silu")
    name = _ACTIVATIONS.get(stated) if isinstance(stated, str) else None
    if name is None:
        raise UnsupportedModel(
            f"config.json: {graph.activation} is {shown(repr(stated))}",
            f"{_ELSEWHERE}; here {', '.join(_ACTIVATIONS)} are computed",
        )
    return "gelu_tanh" if name == "gelu" and graph.gelu_is_tanh else name


def _windows(settings: Json, layers: int, graph: Graph) -> tuple[int | None, ...]:
    """The attention window of every layer."""
    counts = bool(settings.get("use_sliding_window")) or not graph.window_flag
    window = optional_int(settings, graph.window) if counts else None
    kinds = settings.get("layer_types") if graph.explicit_layers else None
    if window is None or kinds is None:
        return tuple(window if graph.slides(settings, i) else None for i in range(layers))
    known = {"chunked_attention" if graph.chunked else "sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or any(str(kind) not in known for kind in kinds):
        raise UnsupportedModel(
            f"config.json: layer_types is not a list of {layers} kinds",
            f"{_ELSEWHERE}; known kinds: {', '.join(known)}",
        )
    return tuple(known[kind] for kind in kinds)


def _experts(architecture: Architecture, settings: Json, graph: Graph) -> Experts | None:
    count = max(dims.get("experts", 0) for dims in architecture.dimensions)
    if not count:
        return None
    per_token = positive_int(settings, graph.experts_per_token)
    if per_token > count:
        raise CorruptCheckpoint(f"config.json: num_experts_per_tok is {per_token} of {count} experts")
    normalise = graph.normalise_experts
    if normalise is None:
        normalise = bool(settings.get("norm_topk_prob"))
    if graph.routing == "softmax":
        return Experts(per_token, normalise)
    groups, kept = _groups(settings, graph, count)
    scale = _optional(settings, "routed_scaling_factor") or 1.0
    return Experts(per_token, normalise, graph.routing == "sigmoid", groups, kept, scale, graph.weighs_inputs)


def _groups(settings: Json, graph: Graph, experts: int) -> tuple[int, int]:
    """The groups that experts stand in, and how many of these are looked at for a token."""
    method = settings.get("topk_method")
    if graph.routing == "grouped softmax" and method in (None, "greedy"):
        return 1, 1
    known = "group_limited_greedy" if graph.routing == "grouped softmax" else "noaux_tc"
    if method not in (None, known):
        raise UnsupportedModel(f"config.json: topk_method is {shown(repr(method))}", _ELSEWHERE)
    groups, kept = (optional_int(settings, key) or 1 for key in ("n_group", "topk_group"))
    if experts % groups or kept > groups:
        raise CorruptCheckpoint(
            f"config.json: topk_group {kept} of n_group {groups} groups of {experts} experts",
            "correct it: n_group must divide n_routed_experts, and topk_group be at most n_group",
        )
    return groups, kept


def _temperature(settings: Json) -> tuple[float, float] | None:
    if not flag(settings, "attn_temperature_tuning"):
        return None
    floor, scale = (_optional(settings, key) for key in ("floor_scale", "attn_scale"))
    return None if floor is None or scale is None else (floor, scale)


def _delta(settings: Json) -> DeltaSizes:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = DeltaSizes(*(positive_int(settings, f"linear_{name}") for name in names))
    divide(sizes.value_heads, sizes.key_heads, "linear_num_value_heads", "linear_num_key_heads")
    return sizes


def _sources(settings: Json, layers: int) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: the last of its kind that has its own."""
    kinds = [kind_of(settings, i, 6) for i in range(layers)]
    own = [i for i in range(layers) if not shares_keys(settings, i)]
    last = {kinds[i]: i for i in own}
    if missing := set(kinds) - set(last):
        raise CorruptCheckpoint(
            f"config.json: no layer of {', '.join(missing)} has keys of its own, which others read",
            "correct it: num_kv_shared_layers is too large",
        )
    return tuple(last[kinds[i]] if shares_keys(settings, i) else i for i in range(layers))


def _latent(settings: Json) -> LatentSizes:
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    return LatentSizes(*(positive_int(settings, name) for name in names))
