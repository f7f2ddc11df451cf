"""Declares mixtures of experts that are Llama's but for a few parts: OLMoE, Hunyuan-A13B, ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.config_json import positive_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, NoGraph, Written, implying, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.families.llama_relatives import (
    ERNIE4_5,
    hunyuan_base,
    hunyuan_context,
    hunyuan_unscaled,
)
from qconvert.models.gguf.metadata import Metadata


def _as_many_keys(facts: Facts) -> str | None:
    """Refuses heads that share keys: the norm of keys is as wide as the model in the loader."""
    heads, kv = facts.size("num_attention_heads"), facts.optional("num_key_value_heads")
    if kv in (None, heads):
        return None
    return f"num_key_value_heads is {kv}, but llama.cpp's {facts.model.arch} has as many as {heads} heads"


OLMOE = GGUFModel(
    "olmoe",
    keys=k.decoder(more=(k.expert_counts,)),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
    head="required",
    checks=(
        SILU,
        c.square_attention,
        _as_many_keys,
        c.normalises_experts(False),
        c.computes("clip_qkv", None),
        c.computes("attention_bias", False),
    ),
)


def _first(facts: Facts, key: str, default: int) -> int:
    """Returns the number under a key, of the first layer where there is one for each."""
    value = facts.settings.get(key, default)
    return positive_int({key: value[0] if isinstance(value, list) and value else value}, key)


def _all_alike(facts: Facts) -> str | None:
    """Refuses layers whose experts differ in number or width, and experts of another width than the block."""
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        value = facts.settings.get(key)
        if isinstance(value, list) and len(set(map(str, value))) > 1:
            return f"{key} differs from layer to layer, which llama.cpp's {facts.model.arch} does not know"
    rows = facts.size("intermediate_size")
    if _first(facts, "moe_intermediate_size", rows) == rows:
        return None
    return f"moe_intermediate_size is not intermediate_size, {rows}, as llama.cpp's {facts.model.arch} has it"


HUNYUAN_MOE = GGUFModel(
    "hunyuan-moe",
    keys=(
        k.block_count,
        hunyuan_context,
        *k.SIZES[2:],
        k.head_count_kv,
        hunyuan_base,
        k.rms_epsilon,
        k.counted(
            "expert_count",
            lambda facts: _first(facts, "num_experts", 1),
            lambda file: {"num_experts": file.size("expert_count")},
        ),
        k.head_sizes,
    ),
    late=(
        k.counted(
            "expert_shared_feed_forward_length",
            lambda facts: facts.dimensions[0]["shared_rows"],
        ),
        k.counted("expert_feed_forward_length", lambda facts: facts.dimensions[0]["expert_rows"]),
        k.counted(
            "expert_used_count",
            lambda facts: _first(facts, "moe_topk", 1),
            lambda file: {"moe_topk": file.size("expert_used_count")},
        ),
        k.counted(
            "expert_shared_count",
            lambda facts: _first(facts, "num_shared_expert", 1),
            lambda file: {"num_shared_expert": file.size("expert_shared_count")},
        ),
        hunyuan_unscaled,
    ),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    checks=(SILU, c.computes("attention_bias", False), _all_alike),
)


@implying(lambda file: {"moe_layer_end_index": file.layers - 1})
def _experts_to_the_last(facts: Facts) -> str | None:
    """Refuses dense layers behind those with experts, and between them."""
    last, step = facts.settings.get("moe_layer_end_index"), facts.optional("moe_layer_interval") or 1
    if last in (None, -1, facts.layers - 1) and step == 1:
        return None
    return (
        f"moe_layer_end_index is {last}, moe_layer_interval {step}; llama.cpp's {facts.model.arch} loads "
        "experts in every layer from moe_layer_start_index on"
    )


def _read_shared(file: Metadata) -> Json:
    shared = file.count("expert_shared_feed_forward_length")
    return {"moe_num_shared_experts": shared // file.size("expert_feed_forward_length")}


@read_by(_read_shared)
def _shared(facts: Facts) -> Iterator[KV]:
    """Writes the number of shared experts, and their width together."""
    number = facts.count("moe_num_shared_experts")
    yield facts.u32("expert_shared_count", number)
    if number:
        yield facts.u32("expert_shared_feed_forward_length", number * facts.size("moe_intermediate_size"))


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    arch="ernie4_5-moe",
    keys=k.decoder(),
    late=(
        k.size("expert_count", "moe_num_experts"),
        k.size("expert_used_count", "moe_k"),
        k.size("interleave_moe_layer_step", "moe_layer_interval"),
        k.count("leading_dense_block_count", "moe_layer_start_index"),
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        _shared,
    ),
    defaults={
        **{key: value for key, value in ERNIE4_5.defaults.items() if key != "head_dim"},
        "moe_k": 6,
        "moe_layer_interval": 1,
    },
    roles={"mlp.router_correction": Written("exp_probs_b", suffix=".bias")},
    checks=(*ERNIE4_5.checks, _experts_to_the_last),
)

MODELS: dict[str, GGUFModel | NoGraph] = {
    "olmoe": OLMOE,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "ernie4_5_moe": ERNIE4_5_MOE,
    # Tried with a random model: log-probabilities differ by 1.2.
    "phimoe": NoGraph(
        "llama.cpp's graph has RMS norms where Phi-3.5-MoE subtracts means, and weighs experts otherwise"
    ),
}
