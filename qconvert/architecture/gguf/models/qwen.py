"""Qwen2, Qwen3 and their mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from qconvert.architecture.gguf import keys as k
from qconvert.architecture.gguf.model import GGUFModel
from qconvert.architecture.gguf.models.llama import SILU

_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "rms_norm_eps": 1e-6}

QWEN2 = GGUFModel("qwen2", keys=k.decoder(), defaults=_DEFAULTS, checks=(SILU,))
QWEN3 = replace(QWEN2, arch="qwen3")
QWEN2_MOE = replace(
    QWEN2,
    arch="qwen2moe",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(k.expert_widths,),
    defaults={**_DEFAULTS, "num_key_value_heads": 16},
    head="required",
    checks=(SILU, k.normalises_experts(False), k.experts_everywhere),
)
QWEN3_MOE = replace(
    QWEN2_MOE,
    arch="qwen3moe",
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    head="optional",
    checks=(SILU, k.normalises_experts(True), k.experts_everywhere),
)

MODELS = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE}
