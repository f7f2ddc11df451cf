"""Declares families whose classes store q, k and v as one linear, each in its own order.

The templates name the unfused linears; where the class has no such names, they are those of its nearest
relative. Sources: transformers' `modeling_phi3` and `modeling_falcon`; the modelling files published with
Baichuan, InternLM2, ChatGLM3, OpenELM and Qwen.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families.common import (
    GATE_UP,
    LAYER,
    NAMED_BY,
    QKV,
    attention_dimensions,
    dense_dimensions,
    gated_mlp,
)
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, Family, Fusion, ParameterTemplate

BAICHUAN = replace(
    MISTRAL,
    name="Baichuan, Baichuan2",
    model_types=("baichuan",),
    classes=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    fusions=(replace(QKV, module=LAYER + "self_attn.W_pack", native=True), GATE_UP),
)

PHI3 = replace(
    MISTRAL,
    name="Phi-3, Phi-4",
    model_types=("phi3",),
    classes=("Phi3ForCausalLM",),
    fusions=(replace(QKV, native=True), replace(GATE_UP, native=True)),
)

INTERNLM2 = Family(
    name="InternLM2",
    model_types=("internlm2",),
    classes=("InternLM2ForCausalLM",),
    slots=(
        ParameterTemplate("embed", "model.tok_embeddings", ("vocab", "hidden"), "embedding"),
        ParameterTemplate("attn.norm", LAYER + "attention_norm", ("hidden",), "norm"),
        ParameterTemplate("attn.q", LAYER + "attention.wq", ("q_rows", "hidden"), bias="bias"),
        ParameterTemplate("attn.k", LAYER + "attention.wk", ("kv_rows", "hidden"), bias="bias"),
        ParameterTemplate("attn.v", LAYER + "attention.wv", ("kv_rows", "hidden"), bias="bias"),
        ParameterTemplate("attn.o", LAYER + "attention.wo", ("hidden", "q_rows"), bias="bias"),
        ParameterTemplate("mlp.norm", LAYER + "ffn_norm", ("hidden",), "norm"),
        *gated_mlp(LAYER + "feed_forward.", names=("w1", "w3", "w2")),
        ParameterTemplate("final_norm", "model.norm", ("hidden",), "norm"),
        ParameterTemplate("lm_head", "output", ("vocab", "hidden")),
    ),
    dimensions=dense_dimensions,
    named_by=NAMED_BY,
    fusions=(
        Fusion(
            "attn.qkv",
            LAYER + "attention.wqkv",
            ("attn.q", "attn.k", "attn.v"),
            groups="kv_heads",
            native=True,
        ),
        Fusion("mlp.gate_up", LAYER + "feed_forward.gate_up_proj", ("mlp.gate", "mlp.up")),
    ),
)

CHATGLM_LAYER = "transformer.encoder.layers.{layer}."


def chatglm_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions; without multi-query attention q, k and v interleave by head."""
    shared = flag(config, "multi_query_attention")
    heads = {} if shared else {"num_key_value_heads": positive_int(config, "num_attention_heads")}
    dense = dense_dimensions({**config, **heads}, layer)
    return {**dense, "qkv_groups": 1 if shared else dense["kv_heads"]}


CHATGLM = Family(
    name="ChatGLM2, ChatGLM3, GLM-4",
    model_types=("chatglm",),
    classes=("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM"),
    slots=(
        ParameterTemplate("embed", "transformer.embedding.word_embeddings", ("vocab", "hidden"), "embedding"),
        ParameterTemplate("attn.norm", CHATGLM_LAYER + "input_layernorm", ("hidden",), "norm"),
        ParameterTemplate(
            "attn.q", CHATGLM_LAYER + "self_attention.query", ("q_rows", "hidden"), bias="add_qkv_bias"
        ),
        ParameterTemplate(
            "attn.k", CHATGLM_LAYER + "self_attention.key", ("kv_rows", "hidden"), bias="add_qkv_bias"
        ),
        ParameterTemplate(
            "attn.v", CHATGLM_LAYER + "self_attention.value", ("kv_rows", "hidden"), bias="add_qkv_bias"
        ),
        ParameterTemplate(
            "attn.o", CHATGLM_LAYER + "self_attention.dense", ("hidden", "q_rows"), bias="add_bias_linear"
        ),
        ParameterTemplate("mlp.norm", CHATGLM_LAYER + "post_attention_layernorm", ("hidden",), "norm"),
        *gated_mlp(
            CHATGLM_LAYER + "mlp.", names=("gate_proj", "up_proj", "dense_4h_to_h"), bias="add_bias_linear"
        ),
        ParameterTemplate("final_norm", "transformer.encoder.final_layernorm", ("hidden",), "norm"),
        ParameterTemplate("lm_head", "transformer.output_layer", ("vocab", "hidden")),
    ),
    dimensions=chatglm_dimensions,
    named_by=NAMED_BY,
    keys={
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
    },
    fusions=(
        Fusion(
            "attn.qkv",
            CHATGLM_LAYER + "self_attention.query_key_value",
            ("attn.q", "attn.k", "attn.v"),
            groups="qkv_groups",
            native=True,
        ),
        Fusion("mlp.gate_up", CHATGLM_LAYER + "mlp.dense_h_to_4h", ("mlp.gate", "mlp.up"), native=True),
    ),
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
)

FALCON_LAYER = "transformer.h.{layer}."


def falcon_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Falcon's dimensions; the three generations differ in k and v heads and in norms."""
    new = flag(config, "new_decoder_architecture")
    heads = positive_int(config, "num_attention_heads")
    grouped = optional_int(config, "num_kv_heads") or heads
    kv_heads = grouped if new else 1 if flag(config, "multi_query", default=True) else heads
    base = attention_dimensions({**config, "num_key_value_heads": kv_heads})
    norms = optional_int(config, "num_ln_in_parallel_attn") or (2 if new else 1)
    serial = not flag(config, "parallel_attn", default=True)
    two = norms == 2 and not serial
    ffn = optional_int(config, "ffn_hidden_size") or 4 * base["hidden"]
    return {**base, "intermediate": ffn, "serial": serial, "two_norms": two, "one_norm": not two}


FALCON = Family(
    name="Falcon",
    model_types=("falcon",),
    classes=("FalconForCausalLM",),
    slots=(
        ParameterTemplate("embed", "transformer.word_embeddings", ("vocab", "hidden"), "embedding"),
        ParameterTemplate(
            "attn.norm", FALCON_LAYER + "input_layernorm", ("hidden",), "norm", True, "one_norm"
        ),
        ParameterTemplate("attn.norm_2", FALCON_LAYER + "ln_attn", ("hidden",), "norm", True, "two_norms"),
        ParameterTemplate("mlp.norm_2", FALCON_LAYER + "ln_mlp", ("hidden",), "norm", True, "two_norms"),
        ParameterTemplate("attn.q", FALCON_LAYER + "self_attention.query", ("q_rows", "hidden"), bias="bias"),
        ParameterTemplate("attn.k", FALCON_LAYER + "self_attention.key", ("kv_rows", "hidden"), bias="bias"),
        ParameterTemplate(
            "attn.v", FALCON_LAYER + "self_attention.value", ("kv_rows", "hidden"), bias="bias"
        ),
        ParameterTemplate("attn.o", FALCON_LAYER + "self_attention.dense", ("hidden", "q_rows"), bias="bias"),
        ParameterTemplate(
            "mlp.norm", FALCON_LAYER + "post_attention_layernorm", ("hidden",), "norm", True, "serial"
        ),
        ParameterTemplate(
            "mlp.up", FALCON_LAYER + "mlp.dense_h_to_4h", ("intermediate", "hidden"), bias="bias"
        ),
        ParameterTemplate(
            "mlp.down", FALCON_LAYER + "mlp.dense_4h_to_h", ("hidden", "intermediate"), bias="bias"
        ),
        ParameterTemplate("final_norm", "transformer.ln_f", ("hidden",), "norm", True),
        ParameterTemplate("lm_head", "lm_head", ("vocab", "hidden")),
    ),
    dimensions=falcon_dimensions,
    named_by={**NAMED_BY, "intermediate": "ffn_hidden_size"},
    defaults={"tie_word_embeddings": True},
    fusions=(
        Fusion(
            "attn.qkv",
            FALCON_LAYER + "self_attention.query_key_value",
            ("attn.q", "attn.k", "attn.v"),
            groups="kv_heads",
            native=True,
        ),
    ),
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
)

QWEN1_LAYER = "transformer.h.{layer}."


def qwen1_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions; the config counts the gate and up projections together."""
    return {**attention_dimensions(config), "intermediate": positive_int(config, "intermediate_size") // 2}


QWEN1 = Family(
    name="Qwen (1)",
    model_types=("qwen",),
    classes=("QWenLMHeadModel",),
    slots=(
        ParameterTemplate("embed", "transformer.wte", ("vocab", "hidden"), "embedding"),
        ParameterTemplate("attn.norm", QWEN1_LAYER + "ln_1", ("hidden",), "norm"),
        ParameterTemplate("attn.q", QWEN1_LAYER + "attn.q_proj", ("q_rows", "hidden"), bias=True),
        ParameterTemplate("attn.k", QWEN1_LAYER + "attn.k_proj", ("kv_rows", "hidden"), bias=True),
        ParameterTemplate("attn.v", QWEN1_LAYER + "attn.v_proj", ("kv_rows", "hidden"), bias=True),
        ParameterTemplate("attn.o", QWEN1_LAYER + "attn.c_proj", ("hidden", "q_rows")),
        ParameterTemplate("mlp.norm", QWEN1_LAYER + "ln_2", ("hidden",), "norm"),
        # The class activates w2, not w1.
        *gated_mlp(QWEN1_LAYER + "mlp.", names=("w2", "w1", "c_proj")),
        ParameterTemplate("final_norm", "transformer.ln_f", ("hidden",), "norm"),
        ParameterTemplate("lm_head", "lm_head", ("vocab", "hidden")),
    ),
    dimensions=qwen1_dimensions,
    named_by={**NAMED_BY, "intermediate": "intermediate_size / 2"},
    keys={"head_dim": "kv_channels"},
    fusions=(
        Fusion("attn.qkv", QWEN1_LAYER + "attn.c_attn", ("attn.q", "attn.k", "attn.v"), native=True),
        Fusion("mlp.gate_up", QWEN1_LAYER + "mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
    ),
    ignored=(
        r"transformer\.(h\.\d+\.attn\.)?rotary_emb\.inv_freq",
        r"transformer\.h\.\d+\.attn\.masked_bias",
    ),
)

FAMILIES = (QWEN1, BAICHUAN, PHI3, INTERNLM2, CHATGLM, FALCON)
