"""Declares Gemma, Command-R and GLM: Llama's names with norms, biases and fusions of their own."""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families import vision
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, ParameterTemplate

# Gemma 2 has norms after both blocks too; Llama's name for the second norm is another norm here.
AFTER_ATTN = c.norm("attn.post_norm", c.LAYER + "post_attention_layernorm")
BEFORE_MLP = c.norm("mlp.norm", c.LAYER + "pre_feedforward_layernorm")
AFTER_MLP = c.norm("mlp.post_norm", c.LAYER + "post_feedforward_layernorm")

GEMMA = replace(
    MISTRAL,
    name="Gemma",
    model_types=("gemma",),
    classes=("GemmaForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, c.gated_mlp()),
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    norm_offset=1.0,
)

GEMMA2 = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    classes=("Gemma2ForCausalLM",),
    slots=c.decoder((*c.BIASED_ATTENTION, AFTER_ATTN), (*c.gated_mlp(), AFTER_MLP), BEFORE_MLP),
)

GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    model_types=("gemma3", "gemma3_text"),
    classes=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    slots=c.decoder(
        (*c.BIASED_ATTENTION, c.Q_NORM, c.K_NORM, AFTER_ATTN), (*c.gated_mlp(), AFTER_MLP), BEFORE_MLP
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
    tower=vision.SIGLIP_TOWER,
    carried={r"(model\.)?(vision_tower|multi_modal_projector)\..*": "vision"},
    note="the vision tower is copied as it is",
)


def command_r_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions, and whether each head of q and k has a norm of its own."""
    heads = positive_int(config, "num_attention_heads") if flag(config, "use_qk_norm") else 0
    dense = c.dense_dimensions(config, layer)
    return {**dense, "q_norm_heads": heads, "k_norm_heads": dense["kv_heads"] if heads else 0}


COMMAND_R = replace(
    GEMMA,
    name="Command-R",
    model_types=("cohere", "cohere2"),
    classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
    slots=(
        c.EMBED,
        c.ATTN_NORM,
        *c.BIASED_ATTENTION,
        ParameterTemplate("attn.q_norm", c.LAYER + "self_attn.q_norm", ("q_norm_heads", "head_dim"), "norm"),
        ParameterTemplate("attn.k_norm", c.LAYER + "self_attn.k_norm", ("k_norm_heads", "head_dim"), "norm"),
        *c.gated_mlp(),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    dimensions=command_r_dimensions,
    defaults={"tie_word_embeddings": True},
    scale_pairs=(c.BLOCKS_INPUT, c.VALUES, *c.GATED),
    norm_offset=0.0,
)

GLM = replace(
    MISTRAL,
    name="GLM-4 (transformers' own class)",
    model_types=("glm",),
    classes=("GlmForCausalLM",),
    slots=c.decoder(c.attention(qkv_bias="attention_bias"), c.gated_mlp()),
    defaults={"head_dim": 128, "attention_bias": True},
    fusions=(c.QKV, replace(c.GATE_UP, native=True)),
)

GLM4 = replace(
    GLM,
    name="GLM-4-0414",
    model_types=("glm4",),
    classes=("Glm4ForCausalLM",),
    slots=c.decoder(
        (
            *c.attention(qkv_bias="attention_bias"),
            c.norm("attn.post_norm", c.LAYER + "post_self_attn_layernorm"),
        ),
        (*c.gated_mlp(), c.norm("mlp.post_norm", c.LAYER + "post_mlp_layernorm")),
    ),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3, COMMAND_R, GLM, GLM4)
