"""Declares MiniMax-M2, with norms over all heads of q and of k together, and M3, whose attention is sparse.

M3's graph is younger than others (llama.cpp 86a283532 and 0ce8cd114 have it); its sources are the converter's
`MiniMaxM3Model` and `minimax-m3.cpp` at commit 0c1e57098.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.config_json import optional_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written, read_by
from qconvert.models.gguf.families.deepseek import gating, known_gating
from qconvert.models.gguf.families.gemma import PLUS_ONE
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata


def _read_rotary(file: Metadata) -> Json:
    return {"rotary_dim": file.optional("rope.dimension_count") or file.head_size}


@read_by(_read_rotary)
def rotary(facts: Facts) -> Iterator[KV]:
    """Writes how many dimensions of a head are rotated: stated, or a share of the head."""
    share = (
        k.rope_of(facts).get("partial_rotary_factor") or facts.settings.get("partial_rotary_factor") or 1.0
    )
    rotated = int(k.head_size(facts.settings) * float(share))
    yield facts.u32("rope.dimension_count", facts.optional("rotary_dim") or rotated)


MINIMAX_M2 = GGUFModel(
    "minimax-m2",
    keys=k.decoder(more=(k.expert_counts, gating("sigmoid"))),
    late=(k.size("expert_feed_forward_length", "intermediate_size"), rotary),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
    },
    roles={"mlp.router_correction": Written("exp_probs_b", suffix=".bias")},
    checks=(SILU, known_gating, c.computes("use_qk_norm", True), c.computes("attention_bias", False)),
)


def _stated(facts: Facts, key: str, older: str) -> int:
    """A number of the indexer, which published configs have in `sparse_attention_config`."""
    sparse = facts.settings.get("sparse_attention_config")
    found = optional_int(sparse, older) if isinstance(sparse, dict) else None
    return found or facts.size(key)


def _indexer_key(name: str, key: str, older: str) -> Keys:
    whole = f"attention.indexer.{name}"
    return k.counted(whole, lambda facts: _stated(facts, key, older), lambda file: {key: file.size(whole)})


_INDEXER = (
    _indexer_key("head_count", "index_n_heads", "sparse_num_index_heads"),
    _indexer_key("key_length", "index_head_dim", "sparse_index_dim"),
    _indexer_key("top_k", "index_topk_blocks", "sparse_topk_blocks"),
    _indexer_key("block_size", "index_block_size", "sparse_block_size"),
    _indexer_key("local_blocks", "index_local_blocks", "sparse_local_block"),
)


def _share(facts: Facts) -> float | None:
    stated = facts.settings.get("partial_rotary_factor")
    return positive_number(k.rope_of(facts).get("partial_rotary_factor", stated))


@read_by(lambda file: {**_read_rotary(file), **k.rotated(file)})
def _rotated(facts: Facts) -> Iterator[KV]:
    """Writes the rotated dimensions: the share that transformers' class reads, else `rotary_dim`."""
    share, head = _share(facts), k.head_size(facts.settings)
    if share is None:
        whole = isinstance(facts.settings.get("rope_parameters"), dict)  # as transformers 5 saves them
        share = 1.0 if whole else facts.size("rotary_dim") / head
    yield facts.u32("rope.dimension_count", int(head * share))


FULL, SPARSE = "full_attention", "minimax_m3_sparse"


def _read_dense(file: Metadata) -> Json:
    dense = file.count("leading_dense_block_count")
    sparse = max(0, file.layers - dense)
    return {
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * sparse,
        "layer_types": [FULL] * dense + [SPARSE] * sparse,
    }


def _dense_layers(facts: Facts) -> int:
    return next((i for i, dims in enumerate(facts.dimensions) if dims["experts"]), facts.layers)


@read_by(_read_dense)
def _dense(facts: Facts) -> Iterator[KV]:
    yield facts.u32("leading_dense_block_count", _dense_layers(facts))


def _sparse_layers_last(facts: Facts) -> str | None:
    """Refuses experts or an indexer elsewhere than in all layers after the dense ones."""
    first = _dense_layers(facts)
    for layer, dims in enumerate(facts.dimensions):
        if bool(dims["experts"]) != (layer >= first) or bool(dims["indexer_dim"]) != (layer >= first):
            return (
                f"layer {layer} is not as llama.cpp's minimax-m3 has it: dense blocks and full attention "
                "first, experts and sparse attention in all layers after them"
            )
    return None


def _one_indexer_a_group(facts: Facts) -> str | None:
    heads, groups = (
        _stated(facts, "index_n_heads", "sparse_num_index_heads"),
        facts.size("num_key_value_heads"),
    )
    if heads == groups:
        return None
    return f"{heads} heads of the indexer for {groups} of keys; llama.cpp's minimax-m3 has one for each"


def _shared_width(facts: Facts) -> str | None:
    """Refuses shared experts of another width than the loader's: that of the others."""
    each, shared = facts.size("intermediate_size"), facts.size("n_shared_experts")
    wide = facts.size("shared_intermediate_size")
    if wide == each * shared:
        return None
    return f"shared_intermediate_size is {wide}; llama.cpp's minimax-m3 has {shared} of {each}"


def _activation(facts: Facts) -> str | None:
    """Refuses another clamped gate than the graph's, which is gpt-oss's."""
    alpha, limit = facts.number("swiglu_alpha"), facts.number("swiglu_limit")
    if (alpha, limit) == (1.702, 7.0):
        return None
    return f"swiglu_alpha is {alpha:g} and swiglu_limit {limit:g}; llama.cpp's minimax-m3 has 1.702 and 7"


MINIMAX_M3 = GGUFModel(
    "minimax-m3",
    keys=(
        k.block_count,
        k.context_length,
        k.embedding_length,
        k.size("feed_forward_length", "dense_intermediate_size"),
        k.head_count,
        k.head_count_kv,
        k.rope,
        k.rms_epsilon,
        k.expert_counts,
        gating("sigmoid"),
        k.stated_head_sizes,
    ),
    late=(
        k.size("expert_feed_forward_length", "intermediate_size"),
        _rotated,
        k.size("expert_shared_count", "n_shared_experts"),
        k.number("expert_weights_scale", "routed_scaling_factor", 1.0),
        k.flag("expert_weights_norm", "norm_topk_prob"),
        *_INDEXER,
        _dense,
        k.read_only(lambda file: {"shared_intermediate_size": file.size("expert_feed_forward_length")}),
    ),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524288,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 5e6,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    },
    roles={
        **PLUS_ONE,
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
        "attn.indexer.q": Written("indexer.q_proj"),
        "attn.indexer.k": Written("indexer.k_proj"),
        "attn.indexer.q_norm": Written("indexer.q_norm", "plus_one"),
        "attn.indexer.k_norm": Written("indexer.k_norm", "plus_one"),
    },
    head="required",
    checks=(
        known_gating,
        _sparse_layers_last,
        _one_indexer_a_group,
        _shared_width,
        _activation,
        c.computes("hidden_act", "silu", "swigluoai"),
        c.computes("scoring_func", "sigmoid"),
        c.normalises_experts(True),
        c.computes("attention_bias", False),
        c.computes("attention_output_gate", None, False),
    ),
)

MODELS = {
    "minimax_m2": MINIMAX_M2,
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3", "minimax_m3_vl_text"), MINIMAX_M3),
}
