"""Declares SmolLM3, Seed-OSS, OLMo 3, Granite, ERNIE 4.5, and Mistral's models of 2025."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.common import language_config
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, implying, positive, read_by
from qconvert.models.gguf.families.llama import (
    LLAMA,
    MISTRAL,
    OLMO2,
    SILU,
    every_fourth_layer_is_unrotated,
)
from qconvert.models.gguf.metadata import Metadata

SMOLLM3 = replace(
    LLAMA,
    arch="smollm3",
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 4},
    checks=(*LLAMA.checks, every_fourth_layer_is_unrotated, c.computes("attention_bias", False)),
)

SEED_OSS = GGUFModel(
    "seed_oss",
    keys=k.decoder(),
    defaults={"max_position_embeddings": 524_288, "rms_norm_eps": 1e-6},
    roles={"mlp.norm": Written("post_attention_norm")},
    checks=(SILU, c.computes("attention_out_bias", False), c.computes("mlp_bias", False)),
)


def _read_windows(file: Metadata) -> Json:
    slides = file.values("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"sliding_window": file.size("attention.sliding_window"), "layer_types": kinds}


@read_by(_read_windows)
def _windows(facts: Facts) -> Iterator[KV]:
    """Writes the sliding window, and which layers have it: all but every fourth, where nothing is said."""
    usual = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(facts.layers)]
    kinds = facts.settings.get("layer_types") or usual
    yield facts.u32("attention.sliding_window", facts.size("sliding_window"))
    yield facts.flags_by_layer(
        "attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds]
    )


# The graph of OLMo 2, which has windows where the file says so.
OLMO3 = replace(
    OLMO2,
    keys=(*k.decoder(), _windows),
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    },
)

GRANITE = replace(
    LLAMA,
    arch="granite",
    late=(
        k.vocab_size,
        k.rope_dimensions(),
        k.number("attention.scale", "attention_multiplier"),
        k.number("embedding_scale", "embedding_multiplier"),
        k.number("residual_scale", "residual_multiplier"),
        k.number("logit_scale", "logits_scaling"),
    ),
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    remarks=(),
)

# Neighbouring rows are rotated by the class, too.
ERNIE4_5 = GGUFModel(
    "ernie4_5",
    keys=(*k.decoder()[:-1], k.stated_head_sizes),
    defaults={
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "head_dim": 128,
    },
    checks=(SILU, c.computes("use_bias", False)),
)


def _read_temperatures(file: Metadata) -> Json:
    rope = k.read_rope(file)
    scaling = rope.get("rope_scaling", {})
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if file.has("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = file.number("attention.temperature_scale")
    return {"rope_parameters": {**scaling, "rope_theta": rope["rope_theta"]}}


@read_by(_read_temperatures)
def _temperatures(facts: Facts) -> Iterator[KV]:
    """Writes YaRN with its one temperature, and how fast that of attention grows with the position."""
    rope = k.rope_of(facts)
    yield from k.rope_entries(facts, rope)
    if rope.get("mscale_all_dim") is not None:
        yield facts.f32("rope.scaling.yarn_log_multiplier", positive(rope, "mscale_all_dim"))
    if rope.get("llama_4_scaling_beta") is not None:
        yield facts.f32("attention.temperature_scale", positive(rope, "llama_4_scaling_beta"))


@implying(lambda file: {})
def _one_temperature(facts: Facts) -> str | None:
    """Refuses two temperatures that differ: the graph takes them as equal."""
    rope = k.rope_of(facts)
    one, other = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 1.0)
    if rope["rope_type"] == "yarn" and one == other:
        return None
    return f"rope scaling is {rope['rope_type']} with mscale {one} and mscale_all_dim {other}"


MINISTRAL3 = replace(
    MISTRAL,
    arch="mistral3",
    keys=(*k.decoder(rope=_temperatures)[:-1], k.stated_head_sizes),
    defaults={"max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    constants=None,
    checks=(SILU, _one_temperature),
)


def _language_model(config: Json) -> GGUFModel:
    inner = (language_config(config) or {}).get("model_type")
    return MINISTRAL3 if inner == "ministral3" else MISTRAL


MODELS = {
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "ernie4_5": ERNIE4_5,
    "ministral3": MINISTRAL3,
    "mistral3": replace(MISTRAL, variant=_language_model, variants=(MINISTRAL3,)),
}
