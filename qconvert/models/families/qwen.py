"""Declares Qwen: dense models, and mixtures with and without a shared expert."""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.families.common import (
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
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import ParameterTemplate

SHARED_EXPERT = (
    *gated_mlp(LAYER + "mlp.shared_expert.", "mlp.shared.", "shared_rows"),
    ParameterTemplate(
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

FAMILIES = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
