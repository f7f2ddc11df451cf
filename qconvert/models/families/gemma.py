"""Declares Gemma, Command-R and GLM: Llama's names with norms, biases and fusions of their own."""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families.common import (
    ATTN_NORM,
    EMBED,
    FINAL_NORM,
    GATE_UP,
    K_NORM,
    LAYER,
    LM_HEAD,
    MLP_NORM,
    Q_NORM,
    QKV,
    attention,
    dense_dimensions,
    gated_mlp,
)
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, ParameterTemplate

BIASED = attention(qkv_bias="attention_bias", o_bias="attention_bias")
# Gemma 2 has norms after both blocks too; Llama's name for the second norm is another norm here.
AFTER_ATTN = ParameterTemplate("attn.post_norm", LAYER + "post_attention_layernorm", ("hidden",), "norm")
BEFORE_MLP = ParameterTemplate("mlp.norm", LAYER + "pre_feedforward_layernorm", ("hidden",), "norm")
AFTER_MLP = ParameterTemplate("mlp.post_norm", LAYER + "post_feedforward_layernorm", ("hidden",), "norm")

GEMMA = replace(
    MISTRAL,
    name="Gemma",
    model_types=("gemma",),
    classes=("GemmaForCausalLM",),
    slots=(EMBED, ATTN_NORM, *BIASED, MLP_NORM, *gated_mlp(), FINAL_NORM, LM_HEAD),
    defaults={"head_dim": 256, "tie_word_embeddings": True},
)

GEMMA2 = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    classes=("Gemma2ForCausalLM",),
    slots=(EMBED, ATTN_NORM, *BIASED, AFTER_ATTN, BEFORE_MLP, *gated_mlp(), AFTER_MLP, FINAL_NORM, LM_HEAD),
)

GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    model_types=("gemma3", "gemma3_text"),
    classes=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    slots=(
        EMBED,
        ATTN_NORM,
        *BIASED,
        Q_NORM,
        K_NORM,
        AFTER_ATTN,
        BEFORE_MLP,
        *gated_mlp(),
        AFTER_MLP,
        FINAL_NORM,
        LM_HEAD,
    ),
    defaults={
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    spellings=({"model.": "language_model.model."}, {"model.": "model.language_model."}),
    carried={r"(model\.)?(vision_tower|multi_modal_projector)\..*": "vision"},
    note="the vision tower is copied as it is",
)


def command_r_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions, and whether each head of q and k has a norm of its own."""
    heads = positive_int(config, "num_attention_heads") if flag(config, "use_qk_norm") else 0
    dense = dense_dimensions(config, layer)
    return {**dense, "q_norm_heads": heads, "k_norm_heads": dense["kv_heads"] if heads else 0}


COMMAND_R = replace(
    GEMMA,
    name="Command-R",
    model_types=("cohere", "cohere2"),
    classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
    slots=(
        EMBED,
        ATTN_NORM,
        *BIASED,
        ParameterTemplate("attn.q_norm", LAYER + "self_attn.q_norm", ("q_norm_heads", "head_dim"), "norm"),
        ParameterTemplate("attn.k_norm", LAYER + "self_attn.k_norm", ("k_norm_heads", "head_dim"), "norm"),
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
    dimensions=command_r_dimensions,
    defaults={"tie_word_embeddings": True},
)

GLM = replace(
    MISTRAL,
    name="GLM-4 (transformers' own class)",
    model_types=("glm",),
    classes=("GlmForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="attention_bias"),
        MLP_NORM,
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
    defaults={"head_dim": 128, "attention_bias": True},
    fusions=(QKV, replace(GATE_UP, native=True)),
)

GLM4 = replace(
    GLM,
    name="GLM-4-0414",
    model_types=("glm4",),
    classes=("Glm4ForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="attention_bias"),
        ParameterTemplate("attn.post_norm", LAYER + "post_self_attn_layernorm", ("hidden",), "norm"),
        MLP_NORM,
        *gated_mlp(),
        ParameterTemplate("mlp.post_norm", LAYER + "post_mlp_layernorm", ("hidden",), "norm"),
        FINAL_NORM,
        LM_HEAD,
    ),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3, COMMAND_R, GLM, GLM4)
