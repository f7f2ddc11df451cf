"""The catalogue: one declaration per model family, in the order of the model's printed structure.

To add a family, copy the nearest one and change what differs. Sources: the families' own classes
in transformers (modeling_qwen2, modeling_qwen3, modeling_llama, modeling_mistral).
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.architecture.config import divided, optional_int, positive_int
from qconvert.architecture.slots import Dimensions, Family, Fusion, Slot
from qconvert.tensors import Json

LAYER = "model.layers.{layer}."
QKV = Fusion("attn.qkv", LAYER + "self_attn.qkv_proj", ("attn.q", "attn.k", "attn.v"))
GATE_UP = Fusion("mlp.gate_up", LAYER + "mlp.gate_up_proj", ("mlp.gate", "mlp.up"))

EMBED = Slot("embed", "model.embed_tokens", ("vocab", "hidden"), "embedding")
FINAL_NORM = Slot("final_norm", "model.norm", ("hidden",), "norm")
LM_HEAD = Slot("lm_head", "lm_head", ("vocab", "hidden"))
ATTN_NORM = Slot("attn.norm", LAYER + "input_layernorm", ("hidden",), "norm")
MLP_NORM = Slot("mlp.norm", LAYER + "post_attention_layernorm", ("hidden",), "norm")
Q_NORM = Slot("attn.q_norm", LAYER + "self_attn.q_norm", ("head_dim",), "norm")
K_NORM = Slot("attn.k_norm", LAYER + "self_attn.k_norm", ("head_dim",), "norm")

NAMED_BY = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "q_rows": "num_attention_heads x head_dim",
    "kv_rows": "num_key_value_heads x head_dim",
    "head_dim": "head_dim",
}


def attention(*, qkv_bias: bool | str, o_bias: bool | str) -> tuple[Slot, ...]:
    """Separate q, k, v and output projections, as Llama named them."""
    return (
        Slot("attn.q", LAYER + "self_attn.q_proj", ("q_rows", "hidden"), bias=qkv_bias),
        Slot("attn.k", LAYER + "self_attn.k_proj", ("kv_rows", "hidden"), bias=qkv_bias),
        Slot("attn.v", LAYER + "self_attn.v_proj", ("kv_rows", "hidden"), bias=qkv_bias),
        Slot("attn.o", LAYER + "self_attn.o_proj", ("hidden", "q_rows"), bias=o_bias),
    )


def gated_mlp(*, bias: bool | str = False) -> tuple[Slot, ...]:
    """The gate, up and down projections of a SwiGLU block."""
    return (
        Slot("mlp.gate", LAYER + "mlp.gate_proj", ("intermediate", "hidden"), bias=bias),
        Slot("mlp.up", LAYER + "mlp.up_proj", ("intermediate", "hidden"), bias=bias),
        Slot("mlp.down", LAYER + "mlp.down_proj", ("hidden", "intermediate"), bias=bias),
    )


def dense_dimensions(config: Json, layer: int) -> Dimensions:
    """The dimensions of a dense decoder; a missing head_dim is hidden_size / heads."""
    hidden = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads") or heads
    head_dim = optional_int(config, "head_dim") or divided(config, "hidden_size", "num_attention_heads")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "intermediate": positive_int(config, "intermediate_size"),
        "q_rows": heads * head_dim,
        "kv_rows": kv_heads * head_dim,
        "head_dim": head_dim,
    }


LLAMA = Family(
    name="Llama",
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
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
)

MISTRAL = replace(
    LLAMA,
    name="Mistral",
    model_types=("mistral",),
    classes=("MistralForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias=False, o_bias=False),
        MLP_NORM,
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
)

QWEN2 = replace(
    LLAMA,
    name="Qwen1.5 / Qwen2 / Qwen2.5",
    model_types=("qwen2",),
    classes=("Qwen2ForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias=True, o_bias=False),
        MLP_NORM,
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
)

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_types=("qwen3",),
    classes=("Qwen3ForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="attention_bias", o_bias="attention_bias"),
        Q_NORM,
        K_NORM,
        MLP_NORM,
        *gated_mlp(),
        FINAL_NORM,
        LM_HEAD,
    ),
    defaults={"head_dim": 128},
)

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, LLAMA, MISTRAL)
