"""Qwen: dense models, and mixtures with and without a shared expert.

Sources: transformers' `modeling_qwen2`, `modeling_qwen3` and their mixtures; for the first Qwen the
modelling file published with it.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.architecture.config import optional_int, positive_int
from qconvert.architecture.families.llama import LLAMA
from qconvert.architecture.families.parts import (
    ATTN_NORM,
    EMBED,
    EXPERT_STACKS,
    FINAL_NORM,
    GATE_UP,
    K_NORM,
    LAYER,
    LM_HEAD,
    MLP_NORM,
    Q_NORM,
    QKV,
    ROUTER,
    attention,
    every_nth_layer,
    experts,
    gated_mlp,
    sparse_dimensions,
)
from qconvert.architecture.slots import Dimensions, Family, Fusion, Slot
from qconvert.tensors import Json

FIRST_LAYER = "transformer.h.{layer}."


def first_dimensions(config: Json, layer: int) -> Dimensions:
    """The first Qwen's: as many heads of keys as of queries, and half the inner width that it states."""
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "q_rows": heads * (optional_int(config, "kv_channels") or hidden // heads),
        "intermediate": positive_int(config, "intermediate_size") // 2,
    }


QWEN = Family(
    name="Qwen",
    model_types=("qwen",),
    classes=("QWenLMHeadModel",),
    slots=(
        Slot("embed", "transformer.wte", ("vocab", "hidden"), "embedding"),
        Slot("attn.norm", FIRST_LAYER + "ln_1", ("hidden",), "norm"),
        Slot("attn.q", FIRST_LAYER + "attn.q_proj", ("q_rows", "hidden"), bias=True),
        Slot("attn.k", FIRST_LAYER + "attn.k_proj", ("q_rows", "hidden"), bias=True),
        Slot("attn.v", FIRST_LAYER + "attn.v_proj", ("q_rows", "hidden"), bias=True),
        Slot("attn.o", FIRST_LAYER + "attn.c_proj", ("hidden", "q_rows")),
        Slot("mlp.norm", FIRST_LAYER + "ln_2", ("hidden",), "norm"),
        # The class activates w2 and multiplies by w1.
        *gated_mlp(FIRST_LAYER + "mlp.", names=("w2", "w1", "c_proj")),
        Slot("final_norm", "transformer.ln_f", ("hidden",), "norm"),
        LM_HEAD,
    ),
    dimensions=first_dimensions,
    named_by={
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "q_rows": "num_attention_heads x kv_channels",
        "intermediate": "intermediate_size / 2",
    },
    fusions=(Fusion("attn.qkv", FIRST_LAYER + "attn.c_attn", ("attn.q", "attn.k", "attn.v"), native=True),),
    ignored=(
        r"transformer\.(h\.\d+\.attn\.)?rotary_emb\.inv_freq",
        r"transformer\.h\.\d+\.attn\.masked_bias",
    ),
)

SHARED_EXPERT = (
    *gated_mlp(LAYER + "mlp.shared_expert.", "mlp.shared.", "shared_rows"),
    Slot(
        "mlp.shared_gate",
        LAYER + "mlp.shared_expert_gate",
        ("one", "hidden"),
        "router",
        only_if="shared_rows",
    ),
)

QWEN2 = replace(
    LLAMA,
    name="Qwen1.5, Qwen2, Qwen2.5",
    model_types=("qwen2",),
    classes=("Qwen2ForCausalLM",),
    slots=(EMBED, ATTN_NORM, *attention(qkv_bias=True), MLP_NORM, *gated_mlp(), FINAL_NORM, LM_HEAD),
    note="",
)

QWEN2_MOE = replace(
    QWEN2,
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    classes=("Qwen2MoeForCausalLM",),
    slots=(
        EMBED,
        ATTN_NORM,
        *attention(qkv_bias="qkv_bias"),
        MLP_NORM,
        *gated_mlp(),
        ROUTER,
        *experts(),
        *SHARED_EXPERT,
        FINAL_NORM,
        LM_HEAD,
    ),
    dimensions=sparse_dimensions(every_nth_layer),
    defaults={"qkv_bias": True},
    fusions=(QKV, GATE_UP, *EXPERT_STACKS),
)

QWEN3 = replace(
    QWEN2,
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

QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    classes=("Qwen3MoeForCausalLM",),
    slots=(*QWEN3.slots[:-2], ROUTER, *experts(), FINAL_NORM, LM_HEAD),
    defaults={},
    dimensions=sparse_dimensions(every_nth_layer),
    keys={"num_experts": "num_local_experts"},
    fusions=(QKV, GATE_UP, *EXPERT_STACKS),
)

FAMILIES = (QWEN, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
