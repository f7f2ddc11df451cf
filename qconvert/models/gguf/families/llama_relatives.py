"""Declares SmolLM3, Seed-OSS, OLMo 3, ERNIE 4.5, Mistral's models of 2025, EXAONE 4, Hunyuan and Arcee."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.common import language_config
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    Facts,
    GGUFModel,
    NoGraph,
    Written,
    derived,
    implying,
    positive,
    read_by,
)
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


_WINDOWED = 64


def _slides(layers: int) -> list[str]:
    return ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(layers)]


@implying(
    lambda file: {
        "layer_types": _slides(file.layers) if file.layers == _WINDOWED else ["full_attention"] * file.layers
    }
)
def _known_windows(facts: Facts) -> str | None:
    """Refuses windows that the loader does not expect: it goes by the number of layers (EXAONE 4 32B)."""
    window = facts.optional("sliding_window")
    if (window is not None) != (facts.layers == _WINDOWED):
        return (
            f"sliding_window is {window or 'null'} in a model of {facts.layers} layers, but llama.cpp's "
            f"exaone4 has a window in models of {_WINDOWED} layers, and only there"
        )
    types = facts.settings.get("layer_types")
    pattern = facts.settings.get("sliding_window_pattern", 4)
    usual = types == _slides(facts.layers) if types else pattern in (4, "LLLG")
    if window is None or usual:
        return None
    return "layer_types is not the pattern of llama.cpp's exaone4: every 4th layer full"


@read_by(lambda file: {"sliding_window": file.optional("attention.sliding_window")})
def _exaone_windows(facts: Facts) -> Iterator[KV]:
    """Writes the window and the layers that have it, of the model that has one."""
    if facts.optional("sliding_window") is None:
        return
    yield facts.u32("attention.sliding_window", facts.size("sliding_window"))
    kinds = facts.settings.get("layer_types") or _slides(facts.layers)
    yield facts.flags_by_layer(
        "attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds]
    )


EXAONE4 = GGUFModel(
    "exaone4",
    keys=k.decoder(rope=k.llama_rope),
    late=(k.vocab_size, _exaone_windows),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    constants=k.rope_freqs,
    checks=(SILU, c.square_attention, _known_windows),
)

_DYNAMIC_CONTEXT = 256 * 1024


def _stretched(facts: Facts) -> float | None:
    """Returns the base of Hunyuan's rotary embedding, where a power of `alpha` stretches it."""
    rope = k.rope_of(facts)
    if rope["rope_type"] != "dynamic" or rope.get("alpha") is None:
        return None
    size = k.head_size(facts.settings)
    return positive(rope, "rope_theta") * float(positive(rope, "alpha") ** (size / (size - 2)))


@read_by(lambda file: {"max_position_embeddings": file.size("context_length")})
def hunyuan_context(facts: Facts) -> Iterator[KV]:
    """Writes the context; where the base is stretched, that for which it is, as the converter does."""
    stated = facts.size("max_position_embeddings")
    yield facts.u32("context_length", stated if _stretched(facts) is None else _DYNAMIC_CONTEXT)


@read_by(k.read_rope)
def hunyuan_base(facts: Facts) -> Iterator[KV]:
    """Writes the base of the rotary embedding as it is computed with."""
    found = _stretched(facts)
    if found is None:
        yield from k.rope_kinds("default", "linear")(facts)
    else:
        yield facts.f32("rope.freq_base", found)


@derived
def hunyuan_unscaled(facts: Facts) -> Iterator[KV]:
    """Writes that a stretched base is all there is to the scaling."""
    if _stretched(facts) is not None:
        yield facts.text("rope.scaling.type", "none")
        yield facts.f32("rope.scaling.factor", 1.0)
        yield facts.u32("rope.scaling.original_context_length", _DYNAMIC_CONTEXT)


HUNYUAN = GGUFModel(
    "hunyuan-dense",
    keys=(
        k.block_count,
        hunyuan_context,
        *k.SIZES[2:],
        k.head_count_kv,
        hunyuan_base,
        k.rms_epsilon,
        k.head_sizes,
    ),
    late=(hunyuan_unscaled,),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    checks=(SILU, c.computes("attention_bias", False)),
)

ARCEE = replace(
    LLAMA,
    arch="arcee",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    checks=(
        c.computes("hidden_act", "relu2"),
        c.computes("attention_bias", False),
        c.computes("mlp_bias", False),
    ),
    remarks=(),
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


MODELS: dict[str, GGUFModel | NoGraph] = {
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "olmo3": OLMO3,
    "ernie4_5": ERNIE4_5,
    "ministral3": MINISTRAL3,
    "exaone4": EXAONE4,
    "hunyuan_v1_dense": HUNYUAN,
    "arcee": ARCEE,
    "apertus": NoGraph(
        "llama.cpp has the numbers of Apertus' activation among a file's keys, the model as tensors"
    ),
    "mistral3": replace(MISTRAL, variant=_language_model, variants=(MINISTRAL3,)),
}
