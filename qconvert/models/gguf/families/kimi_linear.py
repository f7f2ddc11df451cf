"""Declares Kimi-Linear and Kimi-K3: gated delta attention (KDA) alternates with latent attention.

Their graphs are younger than others (llama.cpp 86a283532 has them). Sources: the converter's
`KimiLinearModel` and `KimiK3Model`, `kimi-linear.cpp` and `kimi-k3.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.core.config_json import positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.kimi_linear import linear_attention
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    Facts,
    GGUFModel,
    Keys,
    NoGraph,
    Written,
    derived,
    implying,
    read_by,
)
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
    return f"mla_use_nope is false, but llama.cpp's {facts.model.arch} computes no positions"


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
    return None if groups == 1 else f"num_expert_group is {groups}; llama.cpp's {facts.model.arch} has one"


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
    arch = facts.model.arch
    return f"linear_attn_config has {delta} heads, attention {heads}; llama.cpp's {arch} has one number"


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


def _decay_rows(facts: Facts) -> Iterator[range]:
    """Yields the heads' own numbers, without the zeros behind them."""
    yield range(positive_int(linear_attention(facts.settings), "num_heads"))


@derived
def _lower_bound(facts: Facts) -> Iterator[KV]:
    bound = linear_attention(facts.settings).get("gate_lower_bound")
    if isinstance(bound, int | float):
        yield facts.f32("kda.gate_lower_bound", float(bound))


@derived
def _latent_width(facts: Facts) -> Iterator[KV]:
    width = facts.optional("routed_expert_hidden_size")
    if width is not None:
        yield facts.u32("expert_latent_length", width)


def _whole_gate(facts: Facts) -> str | None:
    """Refuses a gate of low rank, which Kimi-Linear's graph has."""
    if linear_attention(facts.settings).get("use_full_rank_gate"):
        return None
    return "use_full_rank_gate is false, but llama.cpp's kimi-k3 has a gate of full rank"


def _no_template(facts: Facts) -> str:
    """Names the template of chats, which no file of the model holds."""
    file = "models/templates/Kimi-K3.jinja"
    return f"Kimi-K3 has no chat template; llama.cpp's {file} is one (--chat-template-file)"


KIMI_K3 = GGUFModel(
    "kimi-k3",
    keys=(
        *k.SIZES,
        _heads_by_layer,
        k.rms_epsilon,
        k.expert_counts,
        k.count("expert_group_used_count", "topk_group"),
        _gating,
    ),
    late=(
        k.vocab_size,
        _of_delta("ssm.conv_kernel", "short_conv_kernel_size"),
        _of_delta("kda.head_dim", "head_dim"),
        _lower_bound,
        latent_heads,
        k.counted("rope.dimension_count", lambda facts: facts.size("qk_rope_head_dim")),
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        k.count("expert_shared_count", "n_shared_experts"),
        k.counted("leading_dense_block_count", _dense_layers, _read_dense),
        k.number("expert_weights_scale", "routed_scaling_factor", 1.0),
        k.flag("expert_weights_norm", "moe_renormalize"),
        _latent_width,
        k.number("activation.situ_beta", "activation_situ_beta"),
        k.number("activation.situ_linear_beta", "activation_situ_linear_beta"),
        k.size("attn_res.block_size", "attn_res_block_size"),
    ),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "routed_scaling_factor": 1.0},
    roles={
        **KIMI_LINEAR.roles,
        "delta.A_log": Written("ssm_a", "minus_exp", rows=_decay_rows, suffix=""),
        "delta.g": Written("ssm_g"),
        "attn.gate": Written("attn_gate"),
        "mlp.latent_in": Written("ffn_routed_down"),
        "mlp.latent_norm": Written("ffn_routed_norm"),
        "mlp.latent_out": Written("ffn_routed_up"),
        "attn.residual": Written("attn_res_score"),
        "mlp.residual": Written("ffn_res_score"),
        "residual": Written("output_res_score"),
    },
    products={
        role: (f"{role}_norm", f"{role}_proj") for role in ("attn.residual", "mlp.residual", "residual")
    },
    special={"eos": "<|end_of_msg|>"},
    checks=(
        c.computes("hidden_act", "situ"),
        c.computes("attention_bias", False),
        c.computes("moe_router_activation_func", "sigmoid"),
        _no_positions,
        _one_group,
        _heads_alike,
        _dense_first,
        _whole_gate,
    ),
    remarks=(_no_template,),
)

MODELS: Mapping[str, GGUFModel | NoGraph] = {"kimi_linear": KIMI_LINEAR, "kimi_k3": KIMI_K3}
