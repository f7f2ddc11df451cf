"""Declares DeepSeek's mixtures of experts, GLM-4.5's, and gpt-oss.

Latent attention is stored with the projection of keys absorbed into that of queries: one key and value head
of the latent width, and the two halves of `kv_b` separately, the keys' half transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import shortest
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written, implying, positive, read_by
from qconvert.models.gguf.families.fused import GLM_SPECIAL
from qconvert.models.gguf.families.llama import ROTATED, SILU
from qconvert.models.gguf.metadata import Metadata

GATING = {"softmax": 1, "sigmoid": 2}  # llama_expert_gating_func_type in llama-hparams.h


def gating(default: str) -> Keys:
    """Declares the function from router scores to weights: `scoring_func` where the config has it."""

    def read(file: Metadata) -> Json:
        number = file.optional("expert_gating_func") or GATING[default]
        found = next((name for name, known in GATING.items() if known == number), None)
        if found is None:
            raise file.wrong("expert_gating_func", f"{number}, none of {', '.join(GATING)}")
        return {"scoring_func": found}

    @read_by(read)
    def keys(facts: Facts) -> Iterator[KV]:
        yield facts.u32("expert_gating_func", GATING[str(facts.settings.get("scoring_func", default))])

    return keys


def known_gating(facts: Facts) -> str | None:
    """Refuses other gating functions than the graphs' two."""
    found = facts.settings.get("scoring_func", "softmax")
    return None if found in GATING else f"scoring_func is {found!r}; llama.cpp knows {', '.join(GATING)}"


_GROUPS = (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count"))


def _read_groups(file: Metadata) -> Json:
    found = {key: file.optional(name) or 1 for key, name in _GROUPS}
    if file.optional("expert_gating_func") == GATING["sigmoid"]:
        return {**found, "topk_method": "noaux_tc"}
    return {**found, "topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


@read_by(_read_groups)
def expert_groups(facts: Facts) -> Iterator[KV]:
    """Writes the number of groups of experts, and of those that each token uses."""
    for key, name in _GROUPS:
        if facts.optional(key) is not None:
            yield facts.u32(name, facts.size(key))


# The scale and normalisation of the chosen experts' weights.
expert_weights = k.together(
    k.number("expert_weights_scale", "routed_scaling_factor", 1.0),
    k.flag("expert_weights_norm", "norm_topk_prob"),
)
# The number of dense layers, and the shape of the experts in the others.
dense_and_sparse = k.together(
    k.count("leading_dense_block_count", "first_k_dense_replace"),
    k.size("expert_feed_forward_length", "moe_intermediate_size"),
    k.count("expert_shared_count", "n_shared_experts"),
)


@implying(lambda file: {"moe_layer_freq": 1})
def dense_layers_first(facts: Facts) -> str | None:
    """Refuses other dense layers than the first ones: the graphs have experts in every layer after them."""
    step = facts.optional("moe_layer_freq") or 1
    return None if step == 1 else f"moe_layer_freq is {step}, but llama.cpp has experts in every layer"


DEEPSEEK = GGUFModel(
    "deepseek",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(k.rope_dimensions(), k.vocab_size, dense_and_sparse, k.fixed("expert_weights_scale", 1.0)),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "scoring_func": "softmax"},
    roles=ROTATED,
    checks=(
        SILU,
        c.computes("scoring_func", "softmax"),
        c.computes("attention_bias", False),
        c.normalises_experts(False),
        c.square_attention,
        dense_layers_first,
    ),
)


def head_rows(facts: Facts) -> int:
    """Returns the rows of one head's keys in `kv_b`."""
    return facts.size("qk_nope_head_dim")


def key_rows(facts: Facts) -> Iterator[range]:
    """Yields the rows of `kv_b` that make keys, head by head."""
    each = head_rows(facts) + facts.size("v_head_dim")
    return (range(h * each, h * each + head_rows(facts)) for h in range(facts.size("num_attention_heads")))


def value_rows(facts: Facts) -> Iterator[range]:
    """Yields the rows of `kv_b` that make values, head by head."""
    size = facts.size("v_head_dim")
    return (range(keys.stop, keys.stop + size) for keys in key_rows(facts))


def value_shape(facts: Facts) -> tuple[int, ...]:
    """Returns the shape of the values' half of `kv_b`, by heads."""
    return facts.size("num_attention_heads"), facts.size("v_head_dim"), facts.size("kv_lora_rank")


def _read_latent(file: Metadata) -> Json:
    rotary = file.size("rope.dimension_count")
    return {
        "q_lora_rank": file.optional("attention.q_lora_rank"),
        "kv_lora_rank": file.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": file.size("attention.key_length_mla") - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": file.size("attention.value_length_mla"),
    }


@read_by(_read_latent)
def latent_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of absorbed attention, and their sizes before absorption."""
    rank, rotary = facts.size("kv_lora_rank"), facts.size("qk_rope_head_dim")
    if facts.count("q_lora_rank"):
        yield facts.u32("attention.q_lora_rank", facts.size("q_lora_rank"))
    yield facts.u32("attention.kv_lora_rank", rank)
    yield facts.u32("attention.key_length", rank + rotary)
    yield facts.u32("attention.value_length", rank)
    yield facts.u32("attention.key_length_mla", head_rows(facts) + rotary)
    yield facts.u32("attention.value_length_mla", facts.size("v_head_dim"))


def _read_latent_rope(file: Metadata) -> Json:
    rope = k.read_rope(file)
    if file.has("rope.scaling.yarn_log_multiplier") and "rope_scaling" in rope:
        mscale = shortest(10 * file.number("rope.scaling.yarn_log_multiplier"))
        rope["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


@read_by(_read_latent_rope)
def latent_rope(facts: Facts) -> Iterator[KV]:
    """Writes the rotated part of a head, and YaRN's attention factor."""
    yield facts.u32("rope.dimension_count", facts.size("qk_rope_head_dim"))
    rope = k.rope_of(facts)
    if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
        yield facts.f32("rope.scaling.yarn_log_multiplier", 0.1 * positive(rope, "mscale_all_dim"))


# The one head of keys and values of absorbed attention.
one_head_kv = k.counted(
    "attention.head_count_kv",
    lambda facts: 1,
    lambda file: {"num_key_value_heads": file.size("attention.head_count")},
)


def known_scaling(facts: Facts) -> str | None:
    """Refuses other YaRN factors than those from `mscale_all_dim` alone, which the graph computes."""
    rope = k.rope_of(facts)
    if rope["rope_type"] != "yarn":
        return None
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    if other and one == other:
        return None
    return f"rope scaling has mscale {one} and mscale_all_dim {other}, which llama.cpp takes as equal"


def low_rank_queries(facts: Facts) -> str | None:
    """Refuses low-rank queries that the loader would not find: it decides by the number of layers."""
    lite = facts.layers in (26, 27) or (facts.layers == 48 and facts.size("vocab_size") == 128256)
    if bool(facts.count("q_lora_rank")) != lite:
        return None
    return (
        f"q_lora_rank is {facts.settings.get('q_lora_rank')} in {facts.layers} layers, but llama.cpp's "
        f"{facts.model.arch} has {'no' if lite else 'a'} low-rank projection of queries there"
    )


def best_of_group(facts: Facts) -> str | None:
    """Refuses other group choices than by the two best experts (DeepSeek-V3's), which the graph makes."""
    if facts.settings.get("topk_method") != "group_limited_greedy" or (facts.optional("n_group") or 1) == 1:
        return None
    return (
        "topk_method is group_limited_greedy, which chooses groups by their best expert; llama.cpp goes by "
        "the two best, and may choose other experts"
    )


DEEPSEEK_V2 = GGUFModel(
    "deepseek2",
    keys=(*k.SIZES, one_head_kv, k.rope, k.rms_epsilon, k.expert_counts, expert_groups, gating("softmax")),
    late=(dense_and_sparse, k.vocab_size, latent_heads, expert_weights, latent_rope),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
    },
    roles={
        "attn.kv_b": (
            Written("attn_k_b", "transpose", block=head_rows, rows=key_rows),
            Written("attn_v_b", rows=value_rows, shape=value_shape),
        ),
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
    },
    checks=(
        SILU,
        c.computes("attention_bias", False),
        c.computes("rope_interleave", True),
        known_gating,
        dense_layers_first,
        known_scaling,
        low_rank_queries,
    ),
    remarks=(best_of_group,),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    keys=(*DEEPSEEK_V2.keys[:-1], gating("sigmoid")),
    defaults={
        **DEEPSEEK_V2.defaults,
        "max_position_embeddings": 4096,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    },
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    defaults={
        **DEEPSEEK_V3.defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    special={"bos": "[gMASK]", **GLM_SPECIAL},
)

_norms_of_heads = k.read_only(lambda file: {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors})
GLM4_MOE = GGUFModel(
    "glm4moe",
    keys=k.decoder(more=(k.expert_counts, expert_groups, gating("sigmoid"))),
    late=(k.rope_dimensions(0.5), dense_and_sparse, expert_weights, _norms_of_heads),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    roles={
        "mlp.norm": Written("post_attention_norm"),
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
    },
    special={"bos": "[gMASK]", **GLM_SPECIAL},
    checks=(SILU, known_gating, dense_layers_first),
)


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


@implying(lambda file: {"layer_types": _alternating(file.layers)})
def alternating_windows(facts: Facts) -> str | None:
    """Refuses other windows than those of every even layer, as in the graph."""
    if facts.settings.get("layer_types") in (None, _alternating(facts.layers)):
        return None
    return "layer_types is not a window in every other layer, as llama.cpp has it"


def whole_dimensions(facts: Facts) -> str | None:
    """Refuses YaRN bounds that are not rounded, as the graph rounds them (and most models do)."""
    rope = k.rope_of(facts)
    if rope["rope_type"] != "yarn" or rope.get("truncate", True):
        return None
    return "rope scaling is not truncated; llama.cpp begins and ends it at whole dimensions"


def _read_rope(file: Metadata) -> Json:
    """Reads "no scaling" where the class would assume YaRN; its own truncation is in no key."""
    rope = {"rope_scaling": {"rope_type": "default"}, **k.read_rope(file)}
    yarn = {"truncate": False} if rope["rope_scaling"]["rope_type"] == "yarn" else {}
    return {**rope, "rope_scaling": {**rope["rope_scaling"], **yarn}}


GPT_OSS = GGUFModel(
    "gpt-oss",
    keys=k.decoder(rope=Keys(k.rope.write, _read_rope), more=(k.expert_counts,)),
    late=(k.sliding_window, k.size("expert_feed_forward_length", "intermediate_size")),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "head_dim": 64,
    },
    roles={"mlp.norm": Written("post_attention_norm")},
    head="required",
    checks=(SILU, alternating_windows, c.computes("swiglu_limit", 7.0), c.computes("attention_bias", True)),
    remarks=(whole_dimensions,),
)

MODELS = {
    "deepseek": DEEPSEEK,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_k25": DEEPSEEK_V3,
    "kimi_vl": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
}
