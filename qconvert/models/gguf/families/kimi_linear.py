"""Declares Kimi-Linear: gated delta attention (KDA), alternating with latent attention without positions.

Its graph is younger than others (llama.cpp 86a283532 has it). Sources: the converter's `KimiLinearModel` and
`kimi-linear.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.core.config_json import positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.kimi_linear import linear_attention
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, NoGraph, Written, implying, read_by
from qconvert.models.gguf.families.deepseek import DEEPSEEK_V3, GATING, latent_heads
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata


def _full_layers(facts: Facts) -> tuple[int, ...]:
    """The layers with latent attention, counted from 1."""
    return whole_numbers(linear_attention(facts.settings), "full_attn_layers")


def _read_layers(file: Metadata) -> Json:
    heads = file.values("attention.head_count_kv")
    full = [layer for layer, count in enumerate(heads, 1) if count]
    return {
        "num_key_value_heads": file.size("attention.head_count"),
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, len(heads) + 1) if layer not in full],
            "num_heads": file.size("attention.head_count"),
            "head_dim": file.size("kda.head_dim"),
            "short_conv_kernel_size": file.size("ssm.conv_kernel"),
        },
    }


@read_by(_read_layers)
def _heads_by_layer(facts: Facts) -> Iterator[KV]:
    """Writes one head of keys for layers with attention, none for those with KDA."""
    full = _full_layers(facts)
    yield facts.by_layer(
        "attention.head_count_kv", (int(layer in full) for layer in range(1, facts.layers + 1))
    )


def _of_delta(name: str, key: str) -> Keys:
    return k.counted(name, lambda facts: positive_int(linear_attention(facts.settings), key))


@read_by(lambda file: {"moe_router_activation_func": "sigmoid"})
def _gating(facts: Facts) -> Iterator[KV]:
    yield facts.u32("expert_gating_func", GATING["sigmoid"])


@implying(lambda file: {"mla_use_nope": True})
def _no_positions(facts: Facts) -> str | None:
    """Refuses attention that rotates its keys, which the graph does not."""
    if facts.settings.get("mla_use_nope", True):
        return None
    return "mla_use_nope is false, but llama.cpp's kimi-linear computes no positions"


def _dense_layers(facts: Facts) -> int:
    return next((i for i, dims in enumerate(facts.dimensions) if dims["experts"]), facts.layers)


def _read_dense(file: Metadata) -> Json:
    return {"first_k_dense_replace": file.count("leading_dense_block_count"), "moe_layer_freq": 1}


def _dense_first(facts: Facts) -> str | None:
    """Refuses dense blocks after the first layers with experts."""
    later = range(_dense_layers(facts), facts.layers)
    layer = next((i for i in later if not facts.dimensions[i]["experts"]), None)
    return (
        None
        if layer is None
        else f"layer {layer} is dense after others with experts; llama.cpp reads only the first ones so"
    )


@implying(lambda file: {"n_group": 1, "topk_group": 1})
def _one_group(facts: Facts) -> str | None:
    """Refuses groups of experts, which the graph does not choose among."""
    groups = facts.optional("n_group") or 1
    return None if groups == 1 else f"num_expert_group is {groups}, but llama.cpp's kimi-linear has one"


def _whole_queries(facts: Facts) -> str | None:
    """Refuses a low-rank projection of queries, whose rank the loader does not read."""
    rank = facts.count("q_lora_rank")
    return f"q_lora_rank is {rank}, but llama.cpp's kimi-linear has no low-rank queries" if rank else None


def _heads_alike(facts: Facts) -> str | None:
    """Refuses another number of heads in layers with KDA: the file has one."""
    delta, heads = (
        positive_int(linear_attention(facts.settings), "num_heads"),
        facts.size("num_attention_heads"),
    )
    if delta == heads:
        return None
    return f"linear_attn_config has {delta} heads, attention {heads}; llama.cpp's kimi-linear has one number"


def _convolution(facts: Facts) -> tuple[int, ...]:
    """The shape of a convolution over positions, as the converter writes it."""
    settings = linear_attention(facts.settings)
    heads, width, kernel = (
        positive_int(settings, key) for key in ("num_heads", "head_dim", "short_conv_kernel_size")
    )
    return 1, heads * width, 1, kernel


_DELTA = {
    **{f"delta.{part}": Written(f"attn_{part}") for part in "qkv"},
    **{f"delta.{part}_conv": Written(f"ssm_conv1d_{part}", shape=_convolution) for part in "qkv"},
    **{f"delta.{part}": Written(f"ssm_{part}") for part in ("f_a", "f_b", "g_a", "g_b", "norm")},
    "delta.A_log": Written("ssm_a", "minus_exp", suffix=""),
    "delta.dt_bias": Written("ssm_dt", suffix=".bias"),
    "delta.b": Written("ssm_beta"),
    "delta.o": Written("attn_output"),
}

KIMI_LINEAR = GGUFModel(
    "kimi-linear",
    keys=(*k.SIZES, _heads_by_layer, k.rms_epsilon, k.expert_counts, _gating),
    late=(
        k.vocab_size,
        _of_delta("ssm.conv_kernel", "short_conv_kernel_size"),
        _of_delta("kda.head_dim", "head_dim"),
        latent_heads,
        k.counted("rope.dimension_count", lambda facts: facts.size("qk_rope_head_dim")),
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        k.count("expert_shared_count", "n_shared_experts"),
        k.counted("leading_dense_block_count", _dense_layers, _read_dense),
        k.number("expert_weights_scale", "routed_scaling_factor", 1.0),
    ),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "routed_scaling_factor": 2.446,
    },
    roles={**DEEPSEEK_V3.roles, **_DELTA},
    checks=(
        SILU,
        c.computes("attention_bias", False),
        c.computes("moe_renormalize", True),
        c.computes("moe_router_activation_func", "sigmoid"),
        _no_positions,
        _one_group,
        _whole_queries,
        _heads_alike,
        _dense_first,
    ),
)

_K3 = (
    "llama.cpp's graph reads the product of each residual's norm and row, which is not computed here; "
    "its convert_hf_to_gguf.py writes it"
)
MODELS: Mapping[str, GGUFModel | NoGraph] = {"kimi_linear": KIMI_LINEAR, "kimi_k3": NoGraph(_K3)}
