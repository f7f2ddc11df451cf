"""Declares MiMo-V2: windows in most layers, with other heads and sinks, and values narrower than keys."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.config_json import optional_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number
from qconvert.models.families.common import entry
from qconvert.models.families.minimax import listed
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, positive, read_by
from qconvert.models.gguf.families.deepseek import expert_groups, gating, known_gating
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.families.nemotron import listed_counts
from qconvert.models.gguf.metadata import Metadata

_PATTERN, _KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"
_KINDS = ("full_attention", "sliding_attention")


def windowed(facts: Facts, layer: int) -> bool:
    """Returns whether a layer sees a window alone."""
    kind = entry(facts.settings, "layer_types", layer)
    if kind is not None:
        return kind == _KINDS[1]
    return listed(facts.settings, "hybrid_layer_pattern", layer, default=layer > 0 and (layer + 1) % 6 != 0)


def _read_heads(file: Metadata) -> Json:
    marks, heads = listed_counts(file, _PATTERN), listed_counts(file, _KV_HEADS)

    def of(mark: int) -> int:
        return next((count for count, each in zip(heads, marks, strict=True) if each == mark), heads[0])

    return {
        "layer_types": [_KINDS[min(mark, 1)] for mark in marks],
        "num_key_value_heads": of(0),
        "swa_num_key_value_heads": of(1),
    }


@read_by(_read_heads)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of keys in every layer."""
    size = facts.size("head_dim")
    yield facts.by_layer(_KV_HEADS, (dims["k_rows"] // size for dims in facts.dimensions))


def _sliding_base(settings: Json) -> float:
    rope = settings.get("rope_parameters")
    sliding = rope.get(_KINDS[1]) if isinstance(rope, dict) else None
    stated = sliding.get("rope_theta") if isinstance(sliding, dict) else settings.get("swa_rope_theta")
    return positive_number(stated) or 10000.0


def _read_bases(file: Metadata) -> Json:
    return {
        "rope_theta": file.number("rope.freq_base", 5e6),
        "swa_rope_theta": file.number("rope.freq_base_swa", 10000.0),
    }


@read_by(_read_bases)
def _bases(facts: Facts) -> Iterator[KV]:
    """Writes the bases of the rotary embeddings of layers with full attention and with a window."""
    yield facts.f32("rope.freq_base", positive(k.rope_of(facts), "rope_theta"))
    yield facts.f32("rope.freq_base_swa", _sliding_base(facts.settings))


def _epsilon(facts: Facts) -> float:
    key = next((key for key in ("rms_norm_eps", "layernorm_epsilon") if key in facts.settings), "")
    return facts.number(key) if key else 1e-5


@read_by(lambda file: {"layernorm_epsilon": file.number("attention.layer_norm_rms_epsilon")})
def _norms(facts: Facts) -> Iterator[KV]:
    yield facts.f32("attention.layer_norm_rms_epsilon", _epsilon(facts))


def _read_sizes(file: Metadata) -> Json:
    return {
        "head_dim": file.size("attention.key_length"),
        "v_head_dim": file.size("attention.value_length"),
        "swa_head_dim": file.size("attention.key_length"),
        "swa_v_head_dim": file.size("attention.value_length"),
    }


@read_by(_read_sizes)
def _sizes(facts: Facts) -> Iterator[KV]:
    """Writes the sizes of a head of keys, and of values."""
    yield facts.u32("attention.key_length", facts.size("head_dim"))
    yield facts.u32("attention.value_length", facts.size("v_head_dim"))


@read_by(lambda file: {"sliding_window": file.size("attention.sliding_window")})
def _window(facts: Facts) -> Iterator[KV]:
    """Writes the tokens of a window: those before the query, which some configs state, and the query."""
    before = optional_int(facts.settings, "sliding_window_size")
    yield facts.u32("attention.sliding_window", before + 1 if before else facts.size("sliding_window"))
    yield facts.by_layer(_PATTERN, (int(windowed(facts, layer)) for layer in range(facts.layers)))


def _read_blocks(file: Metadata) -> Json:
    sparse = (f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(file.layers))
    return {
        "moe_intermediate_size": file.size("expert_feed_forward_length"),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
    }


@read_by(_read_blocks)
def _experts(facts: Facts) -> Iterator[KV]:
    yield facts.u32("expert_feed_forward_length", facts.size("moe_intermediate_size"))


def _share(facts: Facts) -> float:
    stated = {**facts.settings, **k.rope_of(facts)}.get("partial_rotary_factor")
    return positive_number(stated) or 0.334


@read_by(k.rotated)
def _rotated(facts: Facts) -> Iterator[KV]:
    """Writes how much of a head is rotated."""
    yield facts.u32("rope.dimension_count", int(facts.size("head_dim") * _share(facts)))


def _read_scale(file: Metadata) -> Json:
    stated = file.has("attention.value_scale")
    return {"attention_value_scale": file.number("attention.value_scale") if stated else None}


@read_by(_read_scale)
def _value_scale(facts: Facts) -> Iterator[KV]:
    """Writes the factor of values: that of the class where the config has none, and none for null."""
    stated = facts.architecture.settings.get("attention_value_scale", 0.707)
    if stated is not None:
        yield facts.f32(
            "attention.value_scale", positive({"attention_value_scale": stated}, "attention_value_scale")
        )


def same_heads(facts: Facts) -> str | None:
    """Refuses heads of other sizes or numbers in layers with a window, which the file has one size for."""
    keys = ("num_attention_heads", "head_dim", "v_head_dim")
    odd = next((key for key in keys if facts.optional(f"swa_{key}") not in (None, facts.size(key))), None)
    if odd is None:
        return None
    return f"swa_{odd} is not {odd}; llama.cpp's mimo2 has one for all layers"


MIMO_V2 = GGUFModel(
    "mimo2",
    keys=(
        *k.SIZES,
        _kv_heads,
        _bases,
        _norms,
        k.size("expert_count", "n_routed_experts"),
        k.size("expert_used_count", "num_experts_per_tok"),
        expert_groups,
        gating("sigmoid"),
        _sizes,
    ),
    late=(
        _window,
        _experts,
        _rotated,
        _value_scale,
    ),
    defaults={
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 8,
        "head_dim": 192,
        "v_head_dim": 128,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    roles={"mlp.router_correction": Written("exp_probs_b", suffix=".bias")},
    head="required",
    checks=(
        SILU,
        known_gating,
        same_heads,
        c.normalises_experts(True),
        c.computes("scoring_func", "sigmoid"),
        c.computes("attention_bias", False),
        c.computes("routed_scaling_factor", None, 1.0),
        c.computes("n_shared_experts", None, 0),
    ),
)

MODELS = {"mimo_v2_flash": MIMO_V2}
