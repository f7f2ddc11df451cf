"""Declares families whose classes store q, k and v as one linear, each in its own order.

The templates name the unfused linears; where the class has no such names, they are those of its nearest
relative. Sources: transformers' `modeling_phi3` and `modeling_falcon`; the modelling files published with
Baichuan, InternLM2, ChatGLM3, OpenELM, Qwen and Molmo.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate

BAICHUAN = replace(
    MISTRAL,
    name="Baichuan, Baichuan2",
    model_types=("baichuan",),
    classes=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    fusions=(replace(c.QKV, module=c.LAYER + "self_attn.W_pack", native=True), c.GATE_UP),
)

PHI3 = replace(
    MISTRAL,
    name="Phi-3, Phi-4",
    model_types=("phi3",),
    classes=("Phi3ForCausalLM",),
    fusions=(replace(c.QKV, native=True), replace(c.GATE_UP, native=True)),
)

INTERNLM2 = Family(
    name="InternLM2",
    model_types=("internlm2",),
    classes=("InternLM2ForCausalLM",),
    slots=(
        c.embedding("model.tok_embeddings"),
        c.norm("attn.norm", c.LAYER + "attention_norm"),
        *c.attention(c.LAYER + "attention.", ("wq", "wk", "wv", "wo"), qkv_bias="bias", o_bias="bias"),
        c.norm("mlp.norm", c.LAYER + "ffn_norm"),
        *c.gated_mlp(c.LAYER + "feed_forward.", names=("w1", "w3", "w2")),
        c.norm("final_norm", "model.norm"),
        c.head("output"),
    ),
    dimensions=c.dense_dimensions,
    named_by=c.NAMED_BY,
    fusions=(
        replace(c.QKV, module=c.LAYER + "attention.wqkv", groups="kv_heads", native=True),
        replace(c.GATE_UP, module=c.LAYER + "feed_forward.gate_up_proj"),
    ),
    scale_pairs=c.SCALE_PAIRS,
)

CHATGLM_LAYER = "transformer.encoder.layers.{layer}."
NAMES = ("query", "key", "value", "dense")


def chatglm_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions; without multi-query attention q, k and v interleave by head."""
    shared = flag(config, "multi_query_attention")
    heads = {} if shared else {"num_key_value_heads": positive_int(config, "num_attention_heads")}
    dense = c.dense_dimensions({**config, **heads}, layer)
    return {**dense, "qkv_groups": 1 if shared else dense["kv_heads"]}


CHATGLM = Family(
    name="ChatGLM2, ChatGLM3, GLM-4",
    model_types=("chatglm",),
    classes=("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM"),
    slots=(
        c.embedding("transformer.embedding.word_embeddings"),
        c.norm("attn.norm", CHATGLM_LAYER + "input_layernorm"),
        *c.attention(
            CHATGLM_LAYER + "self_attention.", NAMES, qkv_bias="add_qkv_bias", o_bias="add_bias_linear"
        ),
        c.norm("mlp.norm", CHATGLM_LAYER + "post_attention_layernorm"),
        *c.gated_mlp(
            CHATGLM_LAYER + "mlp.", names=("gate_proj", "up_proj", "dense_4h_to_h"), bias="add_bias_linear"
        ),
        c.norm("final_norm", "transformer.encoder.final_layernorm"),
        c.head("transformer.output_layer"),
    ),
    dimensions=chatglm_dimensions,
    named_by=c.NAMED_BY,
    keys={
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
    },
    fusions=(
        replace(
            c.QKV, module=CHATGLM_LAYER + "self_attention.query_key_value", groups="qkv_groups", native=True
        ),
        replace(c.GATE_UP, module=CHATGLM_LAYER + "mlp.dense_h_to_4h", native=True),
    ),
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
    scale_pairs=c.SCALE_PAIRS,
)

# Falcon's and the first Qwen's, as GPT-2's.
GPT_LAYER = "transformer.h.{layer}."


def falcon_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Falcon's dimensions; the three generations differ in k and v heads and in norms."""
    new = flag(config, "new_decoder_architecture")
    heads = positive_int(config, "num_attention_heads")
    grouped = optional_int(config, "num_kv_heads") or heads
    kv_heads = grouped if new else 1 if flag(config, "multi_query", default=True) else heads
    base = c.attention_dimensions({**config, "num_key_value_heads": kv_heads})
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
        c.embedding("transformer.word_embeddings"),
        c.norm("attn.norm", GPT_LAYER + "input_layernorm", bias=True, only_if="one_norm"),
        c.norm("attn.norm_2", GPT_LAYER + "ln_attn", bias=True, only_if="two_norms"),
        c.norm("mlp.norm_2", GPT_LAYER + "ln_mlp", bias=True, only_if="two_norms"),
        *c.attention(GPT_LAYER + "self_attention.", NAMES, qkv_bias="bias", o_bias="bias"),
        c.norm("mlp.norm", GPT_LAYER + "post_attention_layernorm", bias=True, only_if="serial"),
        c.linear("mlp.up", GPT_LAYER + "mlp.dense_h_to_4h", "intermediate", "hidden", bias="bias"),
        c.linear("mlp.down", GPT_LAYER + "mlp.dense_4h_to_h", "hidden", "intermediate", bias="bias"),
        c.norm("final_norm", "transformer.ln_f", bias=True),
        c.head("lm_head"),
    ),
    dimensions=falcon_dimensions,
    named_by={**c.NAMED_BY, "intermediate": "ffn_hidden_size"},
    defaults={"tie_word_embeddings": True},
    fusions=(
        replace(c.QKV, module=GPT_LAYER + "self_attention.query_key_value", groups="kv_heads", native=True),
    ),
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    scale_pairs=(
        c.MLP_INPUT,
        replace(c.MLP_INPUT, source="mlp.norm_2"),
        replace(c.ATTN_INPUT, source="attn.norm_2"),
        c.BLOCKS_INPUT,  # of attention alone where the block has a norm of its own
        c.VALUES,
    ),
)


def qwen1_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions; the config counts the gate and up projections together."""
    return {**c.attention_dimensions(config), "intermediate": positive_int(config, "intermediate_size") // 2}


QWEN1 = Family(
    name="Qwen (1)",
    model_types=("qwen",),
    classes=("QWenLMHeadModel",),
    slots=(
        c.embedding("transformer.wte"),
        c.norm("attn.norm", GPT_LAYER + "ln_1"),
        *c.attention(GPT_LAYER + "attn.", ("q_proj", "k_proj", "v_proj", "c_proj"), qkv_bias=True),
        c.norm("mlp.norm", GPT_LAYER + "ln_2"),
        # The class activates w2, not w1.
        *c.gated_mlp(GPT_LAYER + "mlp.", names=("w2", "w1", "c_proj")),
        c.norm("final_norm", "transformer.ln_f"),
        c.head("lm_head"),
    ),
    dimensions=qwen1_dimensions,
    named_by={**c.NAMED_BY, "intermediate": "intermediate_size / 2"},
    keys={"head_dim": "kv_channels"},
    fusions=(
        replace(c.QKV, module=GPT_LAYER + "attn.c_attn", native=True),
        replace(c.GATE_UP, module=GPT_LAYER + "mlp.gate_up_proj"),
    ),
    ignored=(
        r"transformer\.(h\.\d+\.attn\.)?rotary_emb\.inv_freq",
        r"transformer\.h\.\d+\.attn\.masked_bias",
    ),
    scale_pairs=c.SCALE_PAIRS,
)

MOLMO_LAYER = "model.transformer.blocks.{layer}."


def molmo_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Molmo's dimensions; the config counts gate and up together, and image tokens apart."""
    dims = {**c.attention_dimensions(config), "intermediate": positive_int(config, "intermediate_size") // 2}
    vocab = optional_int(config, "embedding_size") or dims["vocab"]
    return {**dims, "vocab": vocab, "image_vocab": positive_int(config, "additional_vocab_size")}


MOLMO = Family(
    name="Molmo",
    model_types=("molmo",),
    classes=("MolmoForCausalLM",),
    slots=(
        replace(c.embedding("model.transformer.wte.embedding"), suffix=""),
        ParameterTemplate(
            "image_tokens",
            "model.transformer.wte.new_embedding",
            ("image_vocab", "hidden"),
            "other",
            suffix="",
        ),
        *c.attention(MOLMO_LAYER, ("q_proj", "k_proj", "v_proj", "attn_out"), qkv_bias="qkv_bias"),
        # The class activates the second half.
        *c.gated_mlp(MOLMO_LAYER, names=("gate_proj", "up_proj", "ff_out")),
        c.norm("attn.norm", MOLMO_LAYER + "attn_norm"),
        c.norm("mlp.norm", MOLMO_LAYER + "ff_norm"),
        c.norm("final_norm", "model.transformer.ln_f"),
        c.head("model.transformer.ff_out"),
    ),
    dimensions=molmo_dimensions,
    named_by={**c.NAMED_BY, "intermediate": "intermediate_size / 2", "vocab": "embedding_size"},
    defaults={"additional_vocab_size": 128, "qkv_bias": True},
    fusions=(
        replace(c.QKV, module=MOLMO_LAYER + "att_proj", native=True),
        replace(c.GATE_UP, module=MOLMO_LAYER + "ff_proj", members=("mlp.up", "mlp.gate"), native=True),
    ),
    carried={r"model\.vision_backbone\..*": "vision"},
    scale_pairs=c.SCALE_PAIRS,
    tied_by="weight_tying",
    note="the vision tower is copied as it is",
)

FAMILIES = (QWEN1, BAICHUAN, PHI3, INTERNLM2, CHATGLM, FALCON, MOLMO)
