"""Declares Llama and the families built like it."""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.families.common import (
    ATTN_NORM,
    EMBED,
    EXPERT_STACKS,
    FINAL_NORM,
    GATE_UP,
    LAYER,
    LM_HEAD,
    MLP_NORM,
    NAMED_BY,
    QKV,
    ROTARY_BUFFERS,
    attention,
    dense_dimensions,
    every_layer,
    experts,
    gated_mlp,
    sparse_dimensions,
)
from qconvert.models.parameters import Family, ParameterTemplate

LLAMA = Family(
    name="Llama 1, 2, 3",
    model_types=("llama",),
    classes=("LlamaForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="attention_bias", o_bias="attention_bias"),
        MLP_NORM,
        *gated_mlp(bias="mlp_bias"),
        FINAL_NORM,
        LM_HEAD,
    ),
    dimensions=dense_dimensions,
    named_by=NAMED_BY,
    fusions=(QKV, GATE_UP),
    ignored=ROTARY_BUFFERS,
    note="also Yi, DeepSeek 7B and DeepSeek-Coder, which are declared as Llama",
)

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_types=("mistral",),
    classes=("MistralForCausalLM",),
    slots=(EMBED, ATTN_NORM, *attention(), MLP_NORM, *gated_mlp(), FINAL_NORM, LM_HEAD),
    note="",
)

YI = replace(
    LLAMA,
    name="Yi",
    model_types=("Yi",),
    classes=("YiForCausalLM",),
    spellings=({"input_layernorm": "ln1", "post_attention_layernorm": "ln2"},),
    note="the first releases; later ones are declared as Llama",
)

SKYWORK = replace(LLAMA, name="Skywork", model_types=("skywork",), classes=("SkyworkForCausalLM",), note="")

INTERNLM = replace(
    MISTRAL,
    name="InternLM",
    model_types=("internlm",),
    classes=("InternLMForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="bias", o_bias="bias"),
        MLP_NORM,
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
    defaults={"bias": True},
)

OLMO = replace(
    MISTRAL,
    name="OLMo",
    model_types=("olmo",),
    classes=("OlmoForCausalLM",),
    slots=(
        EMBED,
        *attention(qkv_bias="attention_bias", o_bias="attention_bias"),
        *gated_mlp(),
        LM_HEAD,
    ),
)

# Norms stand behind the blocks, and those of q and k are over all heads together.
OLMO2 = replace(
    OLMO,
    name="OLMo 2",
    model_types=("olmo2",),
    classes=("Olmo2ForCausalLM",),
    slots=(
        EMBED,
        *attention(qkv_bias="attention_bias", o_bias="attention_bias"),
        ParameterTemplate("attn.q_norm", LAYER + "self_attn.q_norm", ("q_rows",), "norm"),
        ParameterTemplate("attn.k_norm", LAYER + "self_attn.k_norm", ("kv_rows",), "norm"),
        ParameterTemplate("attn.post_norm", LAYER + "post_attention_layernorm", ("hidden",), "norm"),
        *gated_mlp(),
        ParameterTemplate("mlp.post_norm", LAYER + "post_feedforward_layernorm", ("hidden",), "norm"),
        FINAL_NORM,
        LM_HEAD,
    ),
)

MIXTRAL = replace(
    MISTRAL,
    name="Mixtral",
    model_types=("mixtral",),
    classes=("MixtralForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(),
        MLP_NORM,
        ParameterTemplate("mlp.router", LAYER + "block_sparse_moe.gate", ("experts", "hidden"), "router"),
        *experts(LAYER + "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        FINAL_NORM,
        LM_HEAD,
    ),
    dimensions=sparse_dimensions(every_layer),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    fusions=(QKV, *EXPERT_STACKS),
    spellings=({"block_sparse_moe.": "mlp."},),
)

FAMILIES = (LLAMA, YI, SKYWORK, INTERNLM, OLMO, OLMO2, MISTRAL, MIXTRAL)
