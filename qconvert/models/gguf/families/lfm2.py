"""Declares Liquid's LFM2, dense and with experts: short convolutions with attention between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.lfm2 import convolves, inner_width
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, read_by
from qconvert.models.gguf.families.nemotron import listed_counts
from qconvert.models.gguf.metadata import Metadata

_KV_HEADS = "attention.head_count_kv"


def _read_kinds(file: Metadata) -> Json:
    heads = listed_counts(file, _KV_HEADS)
    kinds = ["full_attention" if each else "conv" for each in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(*heads, 1)}


@read_by(_read_kinds)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of keys in layers with attention, 0 in the others."""
    heads = (
        0 if convolves(facts.settings, layer) else facts.size("num_key_value_heads")
        for layer in range(facts.layers)
    )
    yield facts.by_layer(_KV_HEADS, heads)


_width = k.counted(
    "feed_forward_length",
    lambda facts: inner_width(facts.settings),
    lambda file: {"intermediate_size": file.size("feed_forward_length"), "block_auto_adjust_ff_dim": False},
)
_CACHE = k.size("shortconv.l_cache", "conv_L_cache")


def _kernel_shape(facts: Facts) -> tuple[int, ...]:
    return facts.size("hidden_size"), facts.size("conv_L_cache")


LFM2 = GGUFModel(
    "lfm2",
    keys=(
        *k.SIZES[:3],
        _width,
        k.head_count,
        _kv_heads,
        k.rope_kinds("default"),
        k.rms_epsilon_of("norm_eps"),
    ),
    late=(k.vocab_size, _CACHE),
    defaults={"max_position_embeddings": 128_000, "norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    roles={
        "conv.kernel": Written("shortconv.conv", shape=_kernel_shape),
        "conv.in": Written("shortconv.in_proj"),
        "conv.out": Written("shortconv.out_proj"),
        "final_norm": Written("token_embd_norm"),
    },
    checks=(c.computes("conv_bias", False), c.square_attention),
)

_SIGMOID = k.counted("expert_gating_func", lambda facts: 2)
LFM2_MOE = replace(
    LFM2,
    arch="lfm2moe",
    keys=(
        *k.SIZES,
        _kv_heads,
        k.rope_kinds("default"),
        k.rms_epsilon_of("norm_eps"),
        k.expert_counts,
    ),
    late=(
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        k.count("leading_dense_block_count", "num_dense_layers"),
        _SIGMOID,
        k.vocab_size,
        _CACHE,
    ),
    defaults={**LFM2.defaults, "num_experts_per_tok": 4, "norm_topk_prob": True},
    roles={**LFM2.roles, "mlp.router_correction": Written("exp_probs_b", suffix=".bias")},
    checks=(
        *LFM2.checks,
        c.normalises_experts(True),
        c.computes("use_expert_bias", True),
        c.computes("routed_scaling_factor", 1.0),
    ),
)

MODELS = {"lfm2": LFM2, "lfm2_moe": LFM2_MOE}
