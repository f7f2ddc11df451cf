"""Declares DeepSeek-V4: one head of keys and values, keys compressed over positions, four residual streams.

Its graph is younger than others (llama.cpp b11549 and 0ce8cd114 compute what transformers does). Sources: the
converter's `DeepseekV4Model` and `deepseek4.cpp` at b11549.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.config_json import whole_numbers
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number, shortest
from qconvert.models.families.deepseek_sparse import compression
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written, positive, read_by
from qconvert.models.gguf.families.deepseek import expert_weights
from qconvert.models.gguf.families.deepseek_sparse import INDEXER_KEYS
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.rope import rope_fields

_SQRT_SOFTPLUS = 4  # LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS
_CLAMPS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_CHOSEN = 4  # positions that share a key which an indexer chooses


def _rope_of(facts: Facts) -> Json:
    """The scaling, which is that of compressed keys, with the base of the others."""
    stated = facts.settings.get("rope_parameters")
    if not isinstance(stated, dict) or "compress" not in stated:
        return rope_fields(facts.settings)
    base = rope_fields(facts.settings, "main")["rope_theta"]
    return {**rope_fields(facts.settings, "compress"), "rope_theta": base}


@read_by(k.read_rope)
def _rope(facts: Facts) -> Iterator[KV]:
    found = _rope_of(facts)
    found.pop("attention_factor", None)  # 1, which `_unscaled_angles` sees to
    return k.rope_entries(facts, found)


def _unscaled_angles(facts: Facts) -> str | None:
    """Refuses angles that YaRN scales, which the graph does not."""
    factor = _rope_of(facts).get("attention_factor")
    if factor in (None, 1):
        return None
    return f"attention_factor is {factor}, but llama.cpp's deepseek4 computes 1"


def _rotated(facts: Facts) -> int:
    share = facts.settings.get("partial_rotary_factor", _rope_of(facts).get("partial_rotary_factor"))
    stated = facts.optional("qk_rope_head_dim")
    return stated or int(facts.size("head_dim") * (positive_number(share) or 0.125))


@read_by(lambda file: {"scoring_func": "sqrtsoftplus"})
def _gating(facts: Facts) -> Iterator[KV]:
    yield facts.u32("expert_gating_func", _SQRT_SOFTPLUS)


def _read_clamps(file: Metadata) -> Json:
    bounds = {shortest(float(str(number))) for name in _CLAMPS for number in file.values(name)}
    if len(bounds) != 1:
        raise file.wrong(_CLAMPS[0], f"one of {len(bounds)} bounds, and config.json has one for all layers")
    return {"swiglu_limit": bounds.pop()}


@read_by(_read_clamps)
def _clamps(facts: Facts) -> Iterator[KV]:
    """Writes the bound of the gates of experts, and of those that are shared, layer by layer."""
    limit = facts.number("swiglu_limit")
    for name in _CLAMPS:
        yield KV.f32s(f"{facts.model.arch}.{name}", (limit,) * facts.layers)


_RATIOS = "attention.compress_ratios"


@read_by(lambda file: {"compress_ratios": list(file.values(_RATIOS))})
def _compression(facts: Facts) -> Iterator[KV]:
    """Writes how many positions share a key; for next-token prediction, too, where config.json states it."""
    stated = () if facts.settings.get("layer_types") else whole_numbers(facts.settings, "compress_ratios")
    yield facts.by_layer(_RATIOS, stated or (compression(facts.settings, i) for i in range(facts.layers)))


@read_by(lambda file: {"compress_rope_theta": file.number("attention.compress_rope_freq_base")})
def _compressed_base(facts: Facts) -> Iterator[KV]:
    stated = facts.settings.get("rope_parameters")
    nested = stated.get("compress") if isinstance(stated, dict) else None
    theta = nested if isinstance(nested, dict) else {"rope_theta": facts.settings["compress_rope_theta"]}
    yield facts.f32("attention.compress_rope_freq_base", positive(theta, "rope_theta"))


def _hashed(facts: Facts) -> int:
    return sum(dims["hashed_vocab"] > 0 for dims in facts.dimensions)


def _streams_out(facts: Facts) -> int:
    return facts.size("hidden_size") * facts.size("hc_mult")


def _read_table(file: Metadata) -> Json:
    return {"num_hash_layers": file.count("hash_layer_count")}


_STREAMS: tuple[Keys, ...] = (
    k.size("hyper_connection.count", "hc_mult"),
    k.size("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    k.number("hyper_connection.epsilon", "hc_eps"),
    k.counted("hash_layer_count", _hashed, _read_table),
    k.counted("embedding_length_out", _streams_out),
)


def _stops(facts: Facts) -> str | None:
    """Why llama.cpp divides by zero for a model, in the rotation of a cache without layers; else None."""
    indexed = any(dims["compressed_rate"] == _CHOSEN for dims in facts.dimensions)
    head, index = facts.size("head_dim"), facts.size("index_head_dim")
    if indexed and head != index:
        return None
    why = f"head_dim and index_head_dim are both {head}" if indexed else "no layer has an indexer"
    return f"{why}; llama.cpp up to 0ce8cd114 divides by zero when it loads such a model (llama-kv-cache.cpp)"


def _mixed(role: str, base: str) -> dict[str, Written]:
    return {f"{role}.{part}": Written(f"{base}_{part}") for part in ("fn", "base", "scale")}


def _compressor(role: str, base: str) -> dict[str, Written]:
    own = {part: Written(f"{base}_{part}") for part in ("kv", "gate", "norm")}
    return {f"{role}.{part}": name for part, name in {**own, "positions": Written(f"{base}_ape")}.items()}


DEEPSEEK_V4 = GGUFModel(
    "deepseek4",
    keys=(
        k.block_count, k.context_length, k.embedding_length, k.head_count, k.head_count_kv, _rope,
        k.rms_epsilon, k.size("expert_count", "n_routed_experts"),
        k.size("expert_used_count", "num_experts_per_tok"), _gating, k.stated_head_sizes,
    ),
    late=(
        k.counted(
            "rope.dimension_count",
            _rotated,
            lambda file: {"qk_rope_head_dim": file.size("rope.dimension_count")},
        ),
        k.size("attention.q_lora_rank", "q_lora_rank"),
        k.sliding_window,
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        k.count("expert_shared_count", "n_shared_experts"),
        expert_weights,
        _clamps,
        INDEXER_KEYS,
        k.size("attention.output_group_count", "o_groups"),
        k.size("attention.output_lora_rank", "o_lora_rank"),
        _compression,
        _compressed_base,
        *_STREAMS,
    ),
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "compress_rope_theta": 160000.0, "sliding_window": 128, "num_key_value_heads": 1, "head_dim": 512,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_shared_experts": 1, "o_groups": 8,
        "o_lora_rank": 1024,
    },
    roles={
        "attn.kv": Written("attn_kv"),
        "attn.kv_norm": Written("attn_kv_a_norm"),
        "attn.o_a": Written("attn_output_a"),
        "attn.o_b": Written("attn_output_b"),
        **_compressor("attn.compressor", "attn_compressor"),
        **_compressor("attn.indexer.compressor", "indexer_compressor"),
        "attn.indexer.q": Written("indexer.attn_q_b"),
        "attn.indexer.weights": Written("indexer.proj"),
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
        "mlp.router_table": Written("ffn_gate_tid2eid", "int32", suffix=".weight"),
        **_mixed("attn.streams", "hc_attn"),
        **_mixed("mlp.streams", "hc_ffn"),
        **_mixed("streams", "output_hc"),
    },
    head="required",
    checks=(
        SILU,
        c.computes("scoring_func", "sqrtsoftplus"),
        c.computes("hc_mult", 4),
        c.computes("attention_bias", False),
        _unscaled_angles,
    ),
    remarks=(_stops,),
)  # fmt: skip

MODELS = {"deepseek_v4": DEEPSEEK_V4}
