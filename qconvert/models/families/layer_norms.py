"""Declares rotary decoders whose norms have biases: GPT-NeoX, Phi-1.5 and 2, StarCoder 2, StableLM.

Sources: transformers' `modeling_gpt_neox`, `modeling_phi`, `modeling_starcoder2`, `modeling_stablelm`; the
names of buffers in files of Pythia.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions, Family

NEOX_LAYER = "gpt_neox.layers.{layer}."


def neox_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions: as many heads of keys and values as of queries."""
    return c.dense_dimensions({**config, "num_key_value_heads": None, "head_dim": None}, layer)


GPT_NEOX = Family(
    name="GPT-NeoX, Pythia",
    model_types=("gpt_neox",),
    classes=("GPTNeoXForCausalLM",),
    slots=(
        c.embedding("gpt_neox.embed_in"),
        c.norm("attn.norm", NEOX_LAYER + "input_layernorm", bias=True),
        c.norm("mlp.norm", NEOX_LAYER + "post_attention_layernorm", bias=True),
        *c.attention(
            NEOX_LAYER + "attention.",
            ("query", "key", "value", "dense"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
        ),
        c.linear("mlp.up", NEOX_LAYER + "mlp.dense_h_to_4h", "intermediate", "hidden", bias=True),
        c.linear("mlp.down", NEOX_LAYER + "mlp.dense_4h_to_h", "hidden", "intermediate", bias=True),
        c.norm("final_norm", "gpt_neox.final_layer_norm", bias=True),
        c.head("embed_out"),
    ),
    dimensions=neox_dimensions,
    named_by=c.NAMED_BY,
    fusions=(
        replace(c.QKV, module=NEOX_LAYER + "attention.query_key_value", groups="kv_heads", native=True),
    ),
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    defaults={"attention_bias": True},
    spellings=({"embed_out": "lm_head"},),
    scale_pairs=(c.ATTN_INPUT, c.MLP_INPUT, c.VALUES),
)

# Attention and the block read one norm.
PHI = replace(
    LLAMA,
    name="Phi-1.5, Phi-2",
    model_types=("phi",),
    classes=("PhiForCausalLM",),
    slots=(
        c.EMBED,
        *c.attention(names=("q_proj", "k_proj", "v_proj", "dense"), qkv_bias=True, o_bias=True),
        c.linear("mlp.up", c.LAYER + "mlp.fc1", "intermediate", "hidden", bias=True),
        c.linear("mlp.down", c.LAYER + "mlp.fc2", "hidden", "intermediate", bias=True),
        replace(c.ATTN_NORM, bias=True),
        replace(c.Q_NORM, module=c.LAYER + "self_attn.q_layernorm", bias=True, only_if="qk_norm"),
        replace(c.K_NORM, module=c.LAYER + "self_attn.k_layernorm", bias=True, only_if="qk_norm"),
        c.norm("final_norm", "model.final_layernorm", bias=True),
        replace(c.LM_HEAD, bias=True),
    ),
    dimensions=lambda config, layer: {
        **c.dense_dimensions(config, layer),
        "qk_norm": flag(config, "qk_layernorm"),
    },
    fusions=(c.QKV,),
    scale_pairs=(c.BLOCKS_INPUT, c.VALUES),
    note="",
)

STARCODER2 = replace(
    LLAMA,
    name="StarCoder 2",
    model_types=("starcoder2",),
    classes=("Starcoder2ForCausalLM",),
    slots=(
        c.EMBED,
        *c.attention(qkv_bias="use_bias", o_bias="use_bias"),
        c.linear("mlp.up", c.LAYER + "mlp.c_fc", "intermediate", "hidden", bias="use_bias"),
        c.linear("mlp.down", c.LAYER + "mlp.c_proj", "hidden", "intermediate", bias="use_bias"),
        replace(c.ATTN_NORM, bias=True),
        replace(c.MLP_NORM, bias=True),
        replace(c.FINAL_NORM, bias=True),
        c.LM_HEAD,
    ),
    defaults={"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
    fusions=(c.QKV,),
    scale_pairs=(c.ATTN_INPUT, c.MLP_INPUT, c.VALUES),
    note="",
)

STABLELM = replace(
    LLAMA,
    name="StableLM",
    model_types=("stablelm",),
    classes=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    slots=(
        c.EMBED,
        *c.attention(qkv_bias="use_qkv_bias"),
        *c.gated_mlp(),
        replace(c.ATTN_NORM, bias=True),
        replace(c.MLP_NORM, bias=True, only_if="serial"),
        replace(c.FINAL_NORM, bias=True),
        c.LM_HEAD,
    ),
    dimensions=lambda config, layer: {
        **c.dense_dimensions(config, layer),
        "serial": not flag(config, "use_parallel_residual"),
    },
    defaults={"num_key_value_heads": 32},
    # Each head of StableLM 2 12B has a norm of its own.
    carried={r"model\.layers\.\d+\.self_attn\.[qk]_layernorm\.norms\.\d+\.weight": "norms of heads"},
    scale_pairs=(c.MLP_INPUT, c.BLOCKS_INPUT, c.VALUES, *c.GATED),
    note="norms of single heads (StableLM 2 12B) are copied as they are",
)

FAMILIES = (GPT_NEOX, PHI, STARCODER2, STABLELM)
