"""Declares Gemma, whose norms scale by 1 + weight, and Cohere's Command-R."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Check, Facts, GGUFModel, Written, implying, positive, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata

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
    """Checks the query scale: the head size, and another value in a model of `largest` layers."""

    def scale(layers: int, head: int, hidden: int, heads: int) -> int:
        return hidden // heads if layers == largest else head

    def implied(file: Metadata) -> Json:
        hidden, heads = file.size("embedding_length"), file.size("attention.head_count")
        return {"query_pre_attn_scalar": scale(file.layers, file.head_size, hidden, heads)}

    @implying(implied)
    def check(facts: Facts) -> str | None:
        head = k.head_size(facts.settings)
        expected = scale(facts.layers, head, facts.size("hidden_size"), facts.size("num_attention_heads"))
        stated = facts.optional("query_pre_attn_scalar") or head
        if stated == expected:
            return None
        return (
            f"query_pre_attn_scalar is {stated}, but llama.cpp's {facts.model.arch} computes with {expected} "
            f"in a model of {facts.layers} layers"
        )

    return check


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Gemma's class computes this whatever an older config has under hidden_act.
_GELU = c.computes("hidden_activation", "gelu_pytorch_tanh")
_CAUSAL = c.computes("use_bidirectional_attention", False, None)

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
    checks=(_GELU, _CAUSAL, c.computes("attention_bias", False)),
)
GEMMA2 = replace(
    GEMMA,
    arch="gemma2",
    late=(*(k.optional_number(key, key) for key in _CAPS), k.sliding_window),
    defaults={
        **GEMMA.defaults,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    checks=(*GEMMA.checks, _queries_scaled(46), c.every_nth_layer_is_full(2)),
)


def _read_two_bases(file: Metadata) -> Json:
    return {**k.read_rope(file), "rope_local_base_freq": file.number("rope.freq_base_swa", 10000.0)}


@read_by(_read_two_bases)
def two_bases(facts: Facts) -> Iterator[KV]:
    """Writes the base of the rotary embedding, and that of layers with a window."""
    yield from k.rope_kinds("default", "linear")(facts)
    rope = facts.settings.get("rope_parameters")
    sliding = rope.get("sliding_attention") if isinstance(rope, dict) else None
    stated = positive(sliding, "rope_theta") if isinstance(sliding, dict) else None
    yield facts.f32("rope.freq_base_swa", stated or facts.number("rope_local_base_freq"))


GEMMA3 = replace(
    GEMMA2,
    arch="gemma3",
    keys=(*k.decoder(rope=two_bases)[:-1], k.stated_head_sizes),
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
        c.every_nth_layer_is_full(6),
        c.computes("attn_logit_softcapping", None),
    ),
)

# Attention goes both ways, through a window that the file has as the published config says it (transformers
# 5 halves it as it reads it).
EMBEDDING_GEMMA = replace(
    GEMMA3,
    arch="gemma-embedding",
    checks=(
        _GELU,
        c.computes("use_bidirectional_attention", True),
        c.computes("attention_bias", False),
        _queries_scaled(-1),
        c.every_nth_layer_is_full(6),
        c.computes("attn_logit_softcapping", None),
    ),
)


def _which_way(config: Json) -> GGUFModel:
    return EMBEDDING_GEMMA if config.get("use_bidirectional_attention") else GEMMA3


GEMMA3_TEXT = replace(GEMMA3, variant=_which_way, variants=(EMBEDDING_GEMMA,))

_logit_scale = k.number("logit_scale", "logit_scale")


@implying(lambda file: {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors})
def _norms_of_heads(facts: Facts) -> str | None:
    """Refuses q and k norms that the loader does not expect: it goes by the number of layers (Command-R+)."""
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
    checks=(SILU, c.square_attention, c.computes("attention_bias", False), _norms_of_heads),
)
COMMAND_R7B = replace(
    COMMAND_R,
    arch="cohere2",
    late=(_logit_scale, k.sliding_window, k.vocab_size, k.rope_dimensions(), k.scaling_none),
    defaults={**_COHERE, "sliding_window": 4096},
    checks=(
        SILU,
        c.square_attention,
        c.computes("attention_bias", False),
        c.computes("use_qk_norm", False),
        c.every_nth_layer_is_full(4),
    ),
)

MODELS = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,  # the type of the language model alone; a file is read back as this one
    "gemma3": GEMMA3,
    "cohere": COMMAND_R,
    "cohere2": COMMAND_R7B,
}
