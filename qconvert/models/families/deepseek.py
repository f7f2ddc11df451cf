"""Declares DeepSeek's mixtures of experts, with plain and with latent (MLA) attention, and what is built so.

Sources: transformers' `modeling_deepseek_v2`, `modeling_deepseek_v3`, `modeling_kimi_k25`,
`modeling_glm4_moe`, `modeling_glm4_moe_lite`, `modeling_minicpm3` and `modeling_gpt_oss`; for the first
DeepSeek-MoE the modelling file published with it.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, divided, flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families import vision
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, ParameterTemplate, ScalePair

SHARED_EXPERTS = c.gated_mlp(c.LAYER + "mlp.shared_experts.", "mlp.shared.", "shared_rows")
SPARSE_MLP = (*c.gated_mlp(), c.ROUTER, *c.experts(), *SHARED_EXPERTS)


def after_the_first(config: Json, layer: int) -> bool:
    """Applies DeepSeek's rule: dense blocks in the first layers, then experts in every n-th.

    `mlp_layer_types` comes before the rule, where a config has it.
    """
    stated = c.entry(config, "mlp_layer_types", layer)
    if stated is not None:
        return stated == "sparse"
    step = optional_int(config, "moe_layer_freq") or 1
    return layer >= count(config, "first_k_dense_replace") and layer % step == 0


def deepseek_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a sparse decoder's dimensions; all shared experts of a layer are one block."""
    dims = c.sparse_dimensions(after_the_first)(config, layer)
    shared = count(config, "n_shared_experts")
    return {**dims, "shared_rows": shared * dims["expert_rows"]}


DEEPSEEK_MOE = replace(
    MISTRAL,
    name="DeepSeek-MoE",
    model_types=("deepseek",),
    classes=("DeepseekForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, SPARSE_MLP),
    dimensions=deepseek_dimensions,
    named_by={**c.NAMED_BY, "shared_rows": "n_shared_experts x moe_intermediate_size"},
    keys={"num_experts": "n_routed_experts"},
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
)

MLA = c.LAYER + "self_attn."
LATENT_ATTENTION = (
    c.linear("attn.q", MLA + "q_proj", "full_q_rows", "hidden"),
    c.linear("attn.q_a", MLA + "q_a_proj", "q_rank", "hidden", bias="attention_bias"),
    c.norm("attn.q_a_norm", MLA + "q_a_layernorm", "q_rank"),
    c.linear("attn.q_b", MLA + "q_b_proj", "latent_q_rows", "q_rank"),
    c.linear("attn.kv_a", MLA + "kv_a_proj_with_mqa", "kv_a_rows", "hidden", bias="attention_bias"),
    c.norm("attn.kv_a_norm", MLA + "kv_a_layernorm", "kv_rank"),
    c.linear("attn.kv_b", MLA + "kv_b_proj", "kv_b_rows", "kv_rank"),
    c.linear("attn.o", MLA + "o_proj", "hidden", "v_rows", bias="attention_bias"),
)


def latent_attention(config: Json) -> dict[str, int]:
    """Returns the dimensions of latent attention, with or without a low-rank q."""
    heads = positive_int(config, "num_attention_heads")
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    plain, rotary, value = (positive_int(config, key) for key in sizes)
    q_rank, kv_rank = count(config, "q_lora_rank"), positive_int(config, "kv_lora_rank")
    q_rows = heads * (plain + rotary)
    return {
        "full_q_rows": 0 if q_rank else q_rows,
        "latent_q_rows": q_rows if q_rank else 0,
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "kv_a_rows": kv_rank + rotary,
        "kv_b_rows": heads * (plain + value),
        "v_rows": heads * value,
    }


def latent_dimensions(config: Json, layer: int) -> Dimensions:
    """Adds the dimensions of latent attention to `deepseek_dimensions`."""
    rotary = {**config, "head_dim": positive_int(config, "qk_rope_head_dim")}
    return {**deepseek_dimensions(rotary, layer), **latent_attention(config)}


def dense_latent_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions with latent attention; values are as wide as a head by default."""
    head = divided(config, "hidden_size", "num_attention_heads")
    sizes = {**config, "v_head_dim": optional_int(config, "v_head_dim") or head}
    return {**c.dense_dimensions(config, layer), **latent_attention(sizes)}


DEEPSEEK_V2 = replace(
    DEEPSEEK_MOE,
    name="DeepSeek-V2",
    model_types=("deepseek_v2",),
    classes=("DeepseekV2ForCausalLM",),
    slots=c.decoder(LATENT_ATTENTION, SPARSE_MLP),
    dimensions=latent_dimensions,
    named_by={
        **DEEPSEEK_MOE.named_by,
        "full_q_rows": "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
        "latent_q_rows": "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "kv_a_rows": "kv_lora_rank + qk_rope_head_dim",
        "kv_b_rows": "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
        "v_rows": "num_attention_heads x v_head_dim",
    },
    fusions=(c.GATE_UP, *c.EXPERT_STACKS),
    scale_pairs=(
        ScalePair("attn.norm", ("attn.q", "attn.q_a", "attn.kv_a")),
        ScalePair("attn.q_a_norm", ("attn.q_b",)),
        ScalePair("attn.kv_a_norm", ("attn.kv_b",)),
        c.MLP_INPUT,
        *c.GATED,
    ),
)

ROUTER_CORRECTION = ParameterTemplate(
    "mlp.router_correction", c.LAYER + "mlp.gate", ("experts",), "other", suffix=".e_score_correction_bias"
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepSeek-V3, R1, Kimi-K2",
    model_types=("deepseek_v3", "kimi_k2"),
    classes=("DeepseekV3ForCausalLM",),
    slots=c.decoder(
        LATENT_ATTENTION, (*c.gated_mlp(), c.ROUTER, ROUTER_CORRECTION, *c.experts(), *SHARED_EXPERTS)
    ),
    carried={r"model\.layers\.{layers}\..*": "next-token prediction"},
)


# The language model is DeepSeek-V3, prefixed; the vision tower and its projector stand beside it.
KIMI_K25 = replace(
    DEEPSEEK_V3,
    name="Kimi-K2.5, K2.6, K2.7",
    tower=vision.KIMI_TOWER,
    model_types=("kimi_k25",),
    classes=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    spellings=(c.NESTED[1], c.NESTED[0]),
    carried={
        **DEEPSEEK_V3.carried,
        r"language_model\.model\.layers\.{later}\..*": "next-token prediction",
        r"(model\.)?(vision_tower|mm_projector)\..*": "vision",
    },
    note="the vision tower is copied as it is",
)

KIMI_VL = replace(
    KIMI_K25,
    name="Kimi-VL",
    tower=vision.KIMI_VL_TOWER,
    model_types=("kimi_vl",),
    classes=("KimiVLForConditionalGeneration",),
    carried={
        **{pattern: what for pattern, what in KIMI_K25.carried.items() if what != "vision"},
        r"(model\.)?(vision_tower|multi_modal_projector)\..*": "vision",
    },
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    classes=("Glm4MoeLiteForCausalLM",),
    defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
)

MINICPM3 = replace(
    DEEPSEEK_V2,
    name="MiniCPM3",
    model_types=("minicpm3",),
    classes=("MiniCPM3ForCausalLM",),
    slots=c.decoder(LATENT_ATTENTION, c.gated_mlp()),
    dimensions=dense_latent_dimensions,
    defaults={"tie_word_embeddings": True},
    keys={},
    fusions=(c.GATE_UP,),
)

GLM4_MOE = replace(
    DEEPSEEK_MOE,
    name="GLM-4.5, 4.6, 4.7",
    model_types=("glm4_moe",),
    classes=("Glm4MoeForCausalLM",),
    slots=c.decoder(
        (
            *c.attention(qkv_bias="attention_bias"),
            *(replace(norm, only_if="qk_norm") for norm in (c.Q_NORM, c.K_NORM)),
        ),
        (*c.gated_mlp(), c.ROUTER, ROUTER_CORRECTION, *c.experts(), *SHARED_EXPERTS),
    ),
    dimensions=lambda config, layer: (
        {**deepseek_dimensions(config, layer), "qk_norm": flag(config, "use_qk_norm")}
    ),
    defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
    carried={r"model\.layers\.{layers}\..*": "next-token prediction"},
)


def gpt_oss_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns gpt-oss's dimensions: every layer has experts, of width `intermediate_size`."""
    return {
        **c.attention_dimensions(config),
        "heads": positive_int(config, "num_attention_heads"),
        "experts": positive_int(config, "num_local_experts"),
        "expert_rows": positive_int(config, "intermediate_size"),
    }


# The class has [experts, in, out] parameters with the columns of gate and up interleaved. The names of single
# experts are llm-compressor's (its pull request 3100).
GPT_OSS_STACKS = tuple(
    replace(stack, native=True, transposed=True, bias_suffix="_bias", interleaved=stack is c.EXPERT_STACKS[0])
    for stack in c.EXPERT_STACKS
)
GPT_OSS = replace(
    MISTRAL,
    name="gpt-oss",
    model_types=("gpt_oss",),
    classes=("GptOssForCausalLM",),
    slots=c.decoder(
        (
            *c.BIASED_ATTENTION,
            ParameterTemplate("attn.sinks", c.LAYER + "self_attn.sinks", ("heads",), "other", suffix=""),
        ),
        (c.router(c.LAYER + "mlp.router", bias=True), *c.experts(bias=True)),
    ),
    dimensions=gpt_oss_dimensions,
    named_by={**c.NAMED_BY, "experts": "num_local_experts", "expert_rows": "intermediate_size"},
    defaults={"attention_bias": True, "head_dim": 64},
    keys={"num_experts": "num_local_experts"},
    fusions=(c.QKV, *GPT_OSS_STACKS),
    scale_pairs=(c.ATTN_INPUT, c.MLP_INPUT, c.VALUES),  # its blocks clamp what up makes, and add 1
    mlx_experts="experts",
    note="experts are stored [in, out], columns of gate and up in turns; quantized, each is a linear",
)

FAMILIES = (
    DEEPSEEK_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K25,
    KIMI_VL,
    MINICPM3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
)
