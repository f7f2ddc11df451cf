"""Declares Llama and the families built like it."""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.families import common as c
from qconvert.models.parameters import Family

LLAMA = Family(
    name="Llama 1, 2, 3",
    model_types=("llama",),
    classes=("LlamaForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, c.gated_mlp(bias="mlp_bias")),
    dimensions=c.dense_dimensions,
    named_by=c.NAMED_BY,
    fusions=(c.QKV, c.GATE_UP),
    ignored=c.ROTARY_BUFFERS,
    scale_pairs=c.SCALE_PAIRS,
    note="also Yi, DeepSeek 7B and DeepSeek-Coder, which are declared as Llama",
)

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_types=("mistral",),
    classes=("MistralForCausalLM",),
    slots=c.decoder(c.attention(), c.gated_mlp()),
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
    slots=c.decoder(c.attention(qkv_bias="bias", o_bias="bias"), c.gated_mlp()),
    defaults={"bias": True},
)

OLMO = replace(
    MISTRAL,
    name="OLMo",
    model_types=("olmo",),
    classes=("OlmoForCausalLM",),
    slots=(c.EMBED, *c.BIASED_ATTENTION, *c.gated_mlp(), c.LM_HEAD),
)

# Norms stand behind the blocks, and those of q and k are over all heads together.
OLMO2 = replace(
    OLMO,
    name="OLMo 2",
    model_types=("olmo2",),
    classes=("Olmo2ForCausalLM",),
    slots=(
        c.EMBED,
        *c.BIASED_ATTENTION,
        c.norm("attn.q_norm", c.LAYER + "self_attn.q_norm", "q_rows"),
        c.norm("attn.k_norm", c.LAYER + "self_attn.k_norm", "kv_rows"),
        c.norm("attn.post_norm", c.LAYER + "post_attention_layernorm"),
        *c.gated_mlp(),
        c.norm("mlp.post_norm", c.LAYER + "post_feedforward_layernorm"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
)

MIXTRAL = replace(
    MISTRAL,
    name="Mixtral",
    model_types=("mixtral",),
    classes=("MixtralForCausalLM",),
    slots=c.decoder(
        c.attention(),
        (
            c.router(c.LAYER + "block_sparse_moe.gate"),
            *c.experts(c.LAYER + "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")),
        ),
    ),
    dimensions=c.sparse_dimensions(),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    fusions=(c.QKV, *c.EXPERT_STACKS),
    spellings=({"block_sparse_moe.": "mlp."},),
)

FAMILIES = (LLAMA, YI, SKYWORK, INTERNLM, OLMO, OLMO2, MISTRAL, MIXTRAL)
