"""Gemma, whose norms scale by one more than their weights, and Cohere's Command-R."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.architecture.gguf import keys as k
from qconvert.architecture.gguf.model import Check, Facts, GGUFModel, Written, positive
from qconvert.architecture.gguf.models.llama import SILU
from qconvert.gguf_types import KV

NORMS = (
    "attn.norm",
    "attn.q_norm",
    "attn.k_norm",
    "attn.post_norm",
    "mlp.norm",
    "mlp.post_norm",
    "final_norm",
)
PLUS_ONE = dict.fromkeys(NORMS, Written(change="plus_one"))


def _queries_scaled(largest: int) -> Check:
    """The graph scales queries by the size of a head; those of a model of `largest` layers by another."""

    def check(facts: Facts) -> str | None:
        head = k.head_size(facts.settings)
        by_hidden = facts.size("hidden_size") // facts.size("num_attention_heads")
        expected = by_hidden if facts.layers == largest else head
        stated = facts.optional("query_pre_attn_scalar") or head
        if stated == expected:
            return None
        return (
            f"query_pre_attn_scalar is {stated}, but llama.cpp's {facts.model.arch} computes with {expected} "
            f"in a model of {facts.layers} layers"
        )

    return check


def _window(facts: Facts) -> Iterator[KV]:
    yield facts.u32("attention.sliding_window", facts.size("sliding_window"))


def _caps(facts: Facts) -> Iterator[KV]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if facts.settings.get(key) is not None:
            yield facts.f32(key, facts.number(key))


# Gemma's class computes this whatever an older config says under hidden_act.
_GELU = k.computes("hidden_activation", "gelu_pytorch_tanh")
_CAUSAL = k.computes("use_bidirectional_attention", False, None)

GEMMA = GGUFModel(
    "gemma",
    keys=(
        k.context_length,
        k.embedding_length,
        k.block_count,
        k.feed_forward_length,
        k.head_count,
        k.head_count_kv,
        k.rms_epsilon,
        k.stated_head_sizes,
        k.unscaled_rope_unless_default,
    ),
    defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
    roles=PLUS_ONE,
    head="tied",
    checks=(_GELU, _CAUSAL, k.computes("attention_bias", False)),
)
GEMMA2 = replace(
    GEMMA,
    arch="gemma2",
    late=(_caps, _window),
    defaults={
        **GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    checks=(*GEMMA.checks, _queries_scaled(46), k.every_nth_layer_is_full(2)),
)


def _two_bases(facts: Facts) -> Iterator[KV]:
    """The rotary bases of the layers with full attention and of those with a window."""
    yield from k.rope_kinds("default", "linear")(facts)
    rope = facts.settings.get("rope_parameters")
    sliding = rope.get("sliding_attention") if isinstance(rope, dict) else None
    stated = positive(sliding, "rope_theta") if isinstance(sliding, dict) else None
    yield facts.f32("rope.freq_base_swa", stated or facts.number("rope_local_base_freq"))


GEMMA3 = replace(
    GEMMA2,
    arch="gemma3",
    keys=(*k.decoder(rope=_two_bases)[:-1], k.stated_head_sizes),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    head="optional",
    checks=(
        *GEMMA.checks,
        _queries_scaled(62),
        k.every_nth_layer_is_full(6),
        k.computes("attn_logit_softcapping", None),
    ),
)


def _logit_scale(facts: Facts) -> Iterator[KV]:
    yield facts.f32("logit_scale", facts.number("logit_scale"))


def _norms_of_heads(facts: Facts) -> str | None:
    """The loader expects them by the number of layers: those of Command-R+."""
    stated = facts.flag("use_qk_norm")
    if stated == (facts.layers >= 64):
        return None
    return (
        f"use_qk_norm is {str(stated).lower()} in a model of {facts.layers} layers, but llama.cpp's "
        "command-r has these norms from 64 layers on, and only there"
    )


_COHERE = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
COMMAND_R = GGUFModel(
    "command-r",
    keys=k.decoder(rope=k.rope_kinds("default"), norm=k.norm_epsilon("layer_norm_eps")),
    late=(_logit_scale, k.scaling_none),
    defaults={**_COHERE, "rope_theta": 500_000.0},
    head="tied",
    checks=(SILU, k.square_attention, k.computes("attention_bias", False), _norms_of_heads),
)
COMMAND_R7B = replace(
    COMMAND_R,
    arch="cohere2",
    late=(_logit_scale, _window, k.vocab_size, k.rope_dimensions(), k.scaling_none),
    defaults={**_COHERE, "sliding_window": 4096},
    checks=(
        SILU,
        k.square_attention,
        k.computes("attention_bias", False),
        k.computes("use_qk_norm", False),
        k.every_nth_layer_is_full(4),
    ),
)

MODELS = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "cohere": COMMAND_R,
    "cohere2": COMMAND_R7B,
}
