"""Declares Qwen: dense models, mixtures with and without a shared expert, and those that see; MiMo-7B."""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.families import common as c
from qconvert.models.families import vision
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import ParameterTemplate

SHARED_EXPERT = (
    *c.gated_mlp(c.LAYER + "mlp.shared_expert.", "mlp.shared.", "shared_rows"),
    ParameterTemplate(
        "mlp.shared_gate",
        c.LAYER + "mlp.shared_expert_gate",
        ("one", "hidden"),
        "router",
        False,
        "shared_rows",
    ),
)

QWEN2 = replace(
    LLAMA,
    name="Qwen1.5, Qwen2, Qwen2.5",
    model_types=("qwen2",),
    classes=("Qwen2ForCausalLM",),
    slots=c.decoder(c.attention(qkv_bias=True), c.gated_mlp()),
    note="",
)

QWEN2_MOE = replace(
    QWEN2,
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    classes=("Qwen2MoeForCausalLM",),
    slots=c.decoder(
        c.attention(qkv_bias="qkv_bias"), (*c.gated_mlp(), c.ROUTER, *c.experts(), *SHARED_EXPERT)
    ),
    dimensions=c.sparse_dimensions(c.every_nth_layer),
    defaults={"qkv_bias": True},
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
)

QWEN3 = replace(
    QWEN2,
    name="Qwen3",
    model_types=("qwen3",),
    classes=("Qwen3ForCausalLM",),
    slots=c.decoder((*c.BIASED_ATTENTION, c.Q_NORM, c.K_NORM), c.gated_mlp()),
    defaults={"head_dim": 128},
)

QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    classes=("Qwen3MoeForCausalLM",),
    slots=(*QWEN3.slots[:-2], c.ROUTER, *c.experts(), c.FINAL_NORM, c.LM_HEAD),
    defaults={},
    dimensions=c.sparse_dimensions(c.every_nth_layer),
    keys={"num_experts": "num_local_experts"},
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
)

VISION = {r"(model\.)?visual\..*": "vision"}
VISION_NOTE = "the vision tower is copied as it is"

QWEN2_VL = replace(
    QWEN2,
    name="Qwen2-VL",
    model_types=("qwen2_vl",),
    classes=("Qwen2VLForConditionalGeneration",),
    spellings=c.NESTED,
    carried=VISION,
    tower=vision.QWEN2_TOWER,
    note=VISION_NOTE,
)

QWEN2_5_VL = replace(
    QWEN2_VL,
    name="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    classes=("Qwen2_5_VLForConditionalGeneration",),
    tower=vision.QWEN25_TOWER,
)

QWEN3_VL = replace(
    QWEN3,
    name="Qwen3-VL",
    model_types=("qwen3_vl", "qwen3_vl_text"),
    classes=("Qwen3VLForConditionalGeneration", "Qwen3VLTextModel"),
    spellings=c.NESTED,
    carried=VISION,
    tower=vision.QWEN3_TOWER,
    note=VISION_NOTE,
)

# Its files hold the experts [in, out], gate beside up.
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="Qwen3-VL-MoE",
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    classes=("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextModel"),
    defaults={"head_dim": 128},
    fusions=(
        c.QKV,
        c.GATE_UP,
        *(replace(stack, native=True, transposed=True) for stack in c.EXPERT_STACKS),
    ),
    spellings=c.NESTED,
    carried=VISION,
    tower=vision.QWEN3_TOWER,
    note=f"{VISION_NOTE}; experts are stored [in, out]; quantized, each is a linear",
)

# The class adds prediction of further tokens to Qwen2's.
MIMO = replace(
    QWEN2,
    name="MiMo-7B",
    model_types=("mimo",),
    classes=("MiMoForCausalLM",),
    carried={r"model\.mtp_layers\..*": "next-token prediction"},
)

FAMILIES = (QWEN2, QWEN2_MOE, QWEN2_VL, QWEN2_5_VL, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE, MIMO)
