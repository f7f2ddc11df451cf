"""What a checkpoint's `config.json` says about its decoder, with the defaults of its family filled in.

Covers llama, mistral, qwen2, qwen3, qwen2_moe and qwen3_moe as transformers writes them, before and
after version 5 (which moved `rope_theta` and `rope_scaling` into `rope_parameters`). Defaults are
those of the transformers configuration classes. Whatever the decoder cannot compute exactly is
refused here, so that the model holds no special cases. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown

MAX_LAYERS = 4096
"""More layers than any model has: a larger number is a broken file, refused before it costs memory."""

_ELSEWHERE = "llama.cpp may run it (`qconvert to-gguf`)"
_QKV = frozenset({"attn.q", "attn.k", "attn.v", "attn.qkv"})
_QKVO = _QKV | {"attn.o"}
_MLP = frozenset({"mlp.gate", "mlp.up", "mlp.gate_up", "mlp.down"})
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a ramp lies between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over dimensions; `attention_factor` multiplies cos and sin."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the whole head, in the rotate-half layout."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse MLP of `layers`: of `count` experts, `per_token` run for a token.

    `normalise` scales their `per_token` probabilities to a sum of 1; `shared_width` is the width of
    the expert that always runs, None where the family has none.
    """

    count: int
    per_token: int
    width: int
    shared_width: int | None
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder: widths, heads, rotary embedding, attention windows, experts.

    `windows[i]` is the number of positions, its own included, that a token attends to in layer i;
    None stands for all of them. `biased` holds the roles that cannot do without a bias.
    """

    model_type: str
    vocab: int
    hidden: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    norm_eps: float
    windows: tuple[int | None, ...]
    biased: frozenset[str]
    qk_norm: bool
    tied: bool
    experts: Experts | None
    max_positions: int

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.windows)

    @staticmethod
    def from_hf(config: Json) -> DecoderConfig:
        """Read a Hugging Face `config.json`.

        Raises UnsupportedModel for a family, an activation or a rotary embedding that is not
        implemented, CorruptCheckpoint for numbers that make no model.
        """
        family = _family(config)
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        head_dim = _count(config, "head_dim", family.head_dim or hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CorruptCheckpoint(
                f"config.json: {heads} heads over {kv_heads} key-value heads of {head_dim} dimensions",
                "correct it: heads must be a multiple of num_key_value_heads, and head_dim even",
            )
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModel(
                f"config.json: hidden_act is {config['hidden_act']!r}",
                f"{_ELSEWHERE}; here only silu is computed",
            )
        return DecoderConfig(
            model_type=config["model_type"],
            vocab=_count(config, "vocab_size"),
            hidden=hidden,
            mlp_width=_count(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=_rope(config),
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            windows=_windows(config, family),
            biased=family.biased(config),
            qk_norm=family.qk_norm,
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=_experts(config, family) if family.sparse else None,
            max_positions=_count(config, "max_position_embeddings", 2048),
        )


def _attention_biases(config: Json) -> frozenset[str]:
    return _QKVO if config.get("attention_bias") else _NONE


def _never(layer: int, edge: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` implies and its config does not say.

    `head_dim` stands in for an absent one (None: hidden over heads). `slides(layer, edge)` is the
    rule for sliding layers, `edge` being `max_window_layers`; `explicit_layers` whether
    `layer_types` overrides it; `window_flag` whether `sliding_window` counts only beside
    `use_sliding_window: true` (Qwen2.5 configs carry a window of 131072 beside `false`).
    """

    biased: Callable[[Json], frozenset[str]]
    slides: Callable[[int, int], bool] = _never
    window_flag: bool = True
    explicit_layers: bool = False
    head_dim: int | None = None
    qk_norm: bool = False
    sparse: bool = False
    shared_expert: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        biased=lambda c: (
            (_QKVO if c.get("attention_bias") else _NONE) | (_MLP if c.get("mlp_bias") else _NONE)
        )
    ),
    "mistral": _Family(biased=lambda c: _NONE, slides=lambda layer, edge: True, window_flag=False),
    "qwen2": _Family(biased=lambda c: _QKV, slides=lambda layer, edge: layer >= edge, explicit_layers=True),
    "qwen3": _Family(
        biased=_attention_biases,
        slides=lambda layer, edge: layer >= edge,
        explicit_layers=True,
        head_dim=128,
        qk_norm=True,
    ),
    "qwen2_moe": _Family(
        biased=lambda c: _QKV if c.get("qkv_bias", True) else _NONE,
        slides=lambda layer, edge: layer % 2 == 0 and layer < edge,
        explicit_layers=True,
        sparse=True,
        shared_expert=True,
    ),
    "qwen3_moe": _Family(
        biased=_attention_biases,
        slides=lambda layer, edge: True,
        qk_norm=True,
        sparse=True,
    ),
}


def _family(config: Json) -> _Family:
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} has no decoder here",
            f"{_ELSEWHERE}; here {', '.join(_FAMILIES)} run",
        )
    return family


def _count(config: Json, key: str, default: int | None = None) -> int:
    """A positive integer; the default stands in for an absent or null one."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CorruptCheckpoint(
            f"config.json: {key} is {shown(repr(value))}", f"correct it: {key} must be a positive integer"
        )
    return value


def _positive(config: Json, key: str, default: float | None = None) -> float:
    """A positive number that float32 holds; the default stands in for an absent or null one."""
    value = default if config.get(key) is None else config[key]
    number = positive_number(value)
    if number is None:
        raise CorruptCheckpoint(
            f"config.json: {key} is {shown(repr(value))}", f"correct it: {key} must be a positive number"
        )
    return number


def _layers(config: Json) -> int:
    layers = _count(config, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise CorruptCheckpoint(
            f"config.json: num_hidden_layers is {layers}", f"correct it: no model has more than {MAX_LAYERS}"
        )
    return layers


def _windows(config: Json, family: _Family) -> tuple[int | None, ...]:
    """The attention window of every layer."""
    layers = _layers(config)
    if config.get("sliding_window") is None or (family.window_flag and not config.get("use_sliding_window")):
        return (None,) * layers
    window = _count(config, "sliding_window")
    kinds = config.get("layer_types") if family.explicit_layers else None
    if kinds is None:
        edge = config.get("max_window_layers")
        edge = 28 if not isinstance(edge, int) else edge
        return tuple(window if family.slides(i, edge) else None for i in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or any(str(kind) not in known for kind in kinds):
        raise UnsupportedModel(
            f"config.json: layer_types is not a list of {layers} kinds",
            f"{_ELSEWHERE}; known kinds: {', '.join(known)}",
        )
    return tuple(known[kind] for kind in kinds)


def _experts(config: Json, family: _Family) -> Experts:
    layers, step = _layers(config), _count(config, "decoder_sparse_step", 1)
    count_key = "num_experts" if "num_experts" in config else "num_local_experts"
    count, per_token = _count(config, count_key), _count(config, "num_experts_per_tok")
    if per_token > count:
        raise CorruptCheckpoint(f"config.json: num_experts_per_tok is {per_token} of {count} experts")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CorruptCheckpoint(
            f"config.json: mlp_only_layers is {dense!r}", "correct it: it must be a list of layer numbers"
        )
    return Experts(
        count=count,
        per_token=per_token,
        width=_count(config, "moe_intermediate_size"),
        shared_width=_count(config, "shared_expert_intermediate_size") if family.shared_expert else None,
        normalise=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


# Rotary embedding: one reader per `rope_type`.


def _rope(config: Json) -> Rope:
    fields = _rope_fields(config)
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    if kind not in _SCALINGS or fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(
            f"config.json: rope_type {kind!r} with {fields}",
            f"{_ELSEWHERE}; here whole heads rotate, by {', '.join(_SCALINGS)}",
        )
    theta = _positive(fields, "rope_theta", 10_000.0)
    if theta <= 1:
        raise CorruptCheckpoint(
            f"config.json: rope_theta is {theta}", "correct it: rope_theta must be above 1"
        )
    return Rope(theta, _SCALINGS[kind](fields))


def _rope_fields(config: Json) -> Json:
    """`rope_parameters`, or the older `rope_scaling`, completed with what the config says beside it.

    Version 5 may nest the fields under a layer type; that is one set of fields only if all agree.
    """
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = list(block.values()) if isinstance(block, dict) else [None]
    if nested and all(isinstance(fields, dict) for fields in nested):
        block = nested[0] if all(fields == nested[0] for fields in nested) else None
    if not isinstance(block, dict):
        raise UnsupportedModel("config.json: rope_parameters differ by layer", _ELSEWHERE)
    length = config.get("original_max_position_embeddings") or block.get("original_max_position_embeddings")
    outside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    context = config.get("max_position_embeddings")
    return {
        **outside,
        **block,
        "max_position_embeddings": context,
        "original_max_position_embeddings": length or context,
    }


def _llama3(fields: Json) -> Llama3Scaling:
    low, high = _positive(fields, "low_freq_factor"), _positive(fields, "high_freq_factor")
    if low >= high:
        raise CorruptCheckpoint(f"config.json: low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(
        _positive(fields, "factor"), low, high, _count(fields, "original_max_position_embeddings")
    )


def _yarn(fields: Json) -> YarnScaling:
    original = _count(fields, "original_max_position_embeddings")
    stretched = _count(fields, "max_position_embeddings", original) / original
    factor = _positive(fields, "factor", stretched)
    return YarnScaling(
        factor=factor,
        attention_factor=_positive(fields, "attention_factor", _yarn_attention(fields, factor)),
        beta_fast=_positive(fields, "beta_fast", 32.0),
        beta_slow=_positive(fields, "beta_slow", 1.0),
        original_context=original,
        truncate=bool(fields.get("truncate", True)),
    )


def _yarn_attention(fields: Json, factor: float) -> float:
    """`0.1 m ln(factor) + 1`; for DeepSeek's two `mscale` fields, the quotient of two of them."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return temperature(_positive(fields, "mscale")) / temperature(_positive(fields, "mscale_all_dim"))
    return temperature(1.0)


_SCALINGS: Mapping[str, Callable[[Json], LinearScaling | Llama3Scaling | YarnScaling | None]] = {
    "default": lambda fields: None,
    "linear": lambda fields: LinearScaling(_positive(fields, "factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}
