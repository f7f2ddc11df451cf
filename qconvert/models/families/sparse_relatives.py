"""Declares mixtures that are Llama's but for a few parts: OLMoE, Hunyuan-A13B, ERNIE 4.5, Phi-3.5-MoE.

Sources: transformers' `modeling_olmoe`, `modeling_hunyuan_v1_moe`, `modeling_ernie4_5_moe`,
`modeling_phimoe`, and its conversion of names.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.llama import LLAMA
from qconvert.models.families.llama_relatives import HUNYUAN_NORMS
from qconvert.models.parameters import Dimensions, Fusion, ParameterTemplate

# Norms of queries and keys are over all heads together.
OLMOE = replace(
    LLAMA,
    name="OLMoE",
    model_types=("olmoe",),
    classes=("OlmoeForCausalLM",),
    slots=c.decoder(
        (
            *c.BIASED_ATTENTION,
            c.norm("attn.q_norm", c.LAYER + "self_attn.q_norm", "q_rows"),
            c.norm("attn.k_norm", c.LAYER + "self_attn.k_norm", "kv_rows"),
        ),
        (c.ROUTER, *c.experts()),
    ),
    dimensions=c.sparse_dimensions(),
    named_by={**c.NAMED_BY, "expert_rows": "intermediate_size"},
    keys={"moe_intermediate_size": "intermediate_size"},
    fusions=(c.QKV, *c.EXPERT_STACKS),
    note="",
)


def _listed(config: Json, key: str, layer: int) -> int:
    """Returns the positive integer under a key, which may be a list with one for each layer."""
    value = config.get(key)
    return positive_int({key: value[layer] if isinstance(value, list) and layer < len(value) else value}, key)


def hunyuan_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Hunyuan's dimensions: counts and widths of experts may be lists with one for each layer."""
    rows = positive_int(config, "intermediate_size")
    own = {"moe_intermediate_size": rows, "num_shared_expert": 1}
    stated = {**own, **{key: value for key, value in config.items() if value is not None}}
    return {
        **c.attention_dimensions(config),
        "experts": _listed(stated, "num_experts", layer),
        "expert_rows": _listed(stated, "moe_intermediate_size", layer),
        "shared_rows": rows * _listed(stated, "num_shared_expert", layer),
    }


HUNYUAN_MOE = replace(
    LLAMA,
    name="Hunyuan-A13B",
    model_types=("hunyuan_v1_moe",),
    classes=("HunYuanMoEV1ForCausalLM",),
    slots=c.decoder(
        (*c.BIASED_ATTENTION, *HUNYUAN_NORMS),
        (
            c.router(c.LAYER + "mlp.gate.wg"),
            *c.experts(),
            *c.gated_mlp(c.LAYER + "mlp.shared_mlp.", "mlp.shared.", "shared_rows"),
        ),
    ),
    dimensions=hunyuan_dimensions,
    named_by={**c.NAMED_BY, "shared_rows": "intermediate_size x num_shared_expert"},
    fusions=(
        c.QKV,
        *c.EXPERT_STACKS,
        Fusion(
            "mlp.shared.gate_up",
            c.LAYER + "mlp.shared_mlp.gate_up_proj",
            ("mlp.shared.gate", "mlp.shared.up"),
        ),
    ),
    note="",
)


def ernie_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns ERNIE's dimensions: every so many layers have experts, from the first to the last that do."""
    step, last = optional_int(config, "moe_layer_interval") or 1, config.get("moe_layer_end_index")
    within = layer >= count(config, "moe_layer_start_index") and (last in (None, -1) or layer <= last)
    if not within or (layer + 1) % step:
        return {**c.dense_dimensions(config, layer), "experts": 0, "expert_rows": 0, "shared_rows": 0}
    rows = positive_int(config, "moe_intermediate_size")
    return {
        **c.attention_dimensions(config),
        "intermediate": 0,
        "experts": positive_int(config, "moe_num_experts"),
        "expert_rows": rows,
        "shared_rows": rows * count(config, "moe_num_shared_experts"),
    }


_ERNIE_SLOTS = c.decoder(
    c.attention(qkv_bias="use_bias", o_bias="use_bias"),
    (
        *c.gated_mlp(bias="use_bias"),
        c.ROUTER,
        ParameterTemplate(
            "mlp.router_correction",
            c.LAYER + "mlp.moe_statics",
            ("one", "experts"),
            "other",
            suffix=".e_score_correction_bias",
        ),
        *c.experts(),
        *c.gated_mlp(c.LAYER + "mlp.shared_experts.", "mlp.shared.", "shared_rows", bias="use_bias"),
    ),
)
ERNIE4_5_MOE = replace(
    LLAMA,
    name="ERNIE 4.5 MoE",
    model_types=("ernie4_5_moe",),
    classes=("Ernie4_5_MoeForCausalLM",),
    slots=(*_ERNIE_SLOTS[:-1], replace(c.LM_HEAD, bias="use_bias")),
    dimensions=ernie_dimensions,
    named_by={
        **c.NAMED_BY,
        "experts": "moe_num_experts",
        "shared_rows": "moe_intermediate_size x moe_num_shared_experts",
    },
    defaults={
        "tie_word_embeddings": True,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
        "moe_num_experts": 64,
        "moe_intermediate_size": 1536,
        "num_key_value_heads": 4,
    },
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
    carried={r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\..*": "next-token prediction"},
    note="next-token prediction is copied as it is",
)

# Norms have biases, and choosing experts is Phi's own.
PHIMOE = replace(
    LLAMA,
    name="Phi-3.5-MoE",
    model_types=("phimoe",),
    classes=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    slots=(
        c.EMBED,
        replace(c.ATTN_NORM, bias=True),
        *c.BIASED_ATTENTION,
        replace(c.MLP_NORM, bias=True),
        c.router(c.LAYER + "block_sparse_moe.gate"),
        *c.experts(c.LAYER + "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        replace(c.FINAL_NORM, bias=True),
        replace(c.LM_HEAD, bias="lm_head_bias"),
    ),
    dimensions=c.sparse_dimensions(),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    fusions=(c.QKV, *c.EXPERT_STACKS),
    note="",
)

FAMILIES = (OLMOE, HUNYUAN_MOE, ERNIE4_5_MOE, PHIMOE)
