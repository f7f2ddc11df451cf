"""Declares Qwen 1 to 3, their mixtures of experts, and the language models of those that see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, derived, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata

_DEFAULTS = {
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}

QWEN2 = GGUFModel("qwen2", keys=k.decoder(), defaults=_DEFAULTS, checks=(SILU,), remarks=(c.window_left_out,))
QWEN3 = replace(QWEN2, arch="qwen3")
QWEN2_MOE = replace(
    QWEN2,
    arch="qwen2moe",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(k.expert_widths,),
    defaults={**_DEFAULTS, "num_key_value_heads": 16},
    head="required",
    checks=(SILU, c.normalises_experts(False), c.experts_everywhere),
)
# Published configs have the number of experts under one name, transformers 5 under the other.
_EITHER_NAME = k.read_only(lambda file: {"num_local_experts": file.size("expert_count")})
QWEN3_MOE = replace(
    QWEN2_MOE,
    arch="qwen3moe",
    keys=k.decoder(more=(k.expert_counts, _EITHER_NAME)),
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    head="optional",
    checks=(SILU, c.normalises_experts(True), c.experts_everywhere),
)


def _read_sections(file: Metadata) -> Json:
    """Reads the rotary embedding with the sections of its dimensions."""
    rope = k.read_rope(file)
    known = {"mrope_section": list(file.values("rope.dimension_sections")[:3])}
    return {"rope_parameters": {"rope_type": "default", **rope.pop("rope_scaling", {}), **rope, **known}}


@read_by(_read_sections)
def sections(facts: Facts) -> Iterator[KV]:
    """Writes how the rotated part is divided between time, height and width; equal for text."""
    parts = k.rope_of(facts).get("mrope_section") or facts.settings["mrope_section"]
    yield facts.by_layer("rope.dimension_sections", (list(parts) + [0] * 4)[:4])


@derived
def deepstack(facts: Facts) -> Iterator[KV]:
    """Writes how many of the first layers take features of images, which the other file holds."""
    vision = facts.architecture.config.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    yield facts.u32("n_deepstack_layers", len(layers) if isinstance(layers, list) else 0)


# One graph for Qwen2-VL and 2.5-VL: they differ in the tower alone.
QWEN2_VL = replace(
    QWEN2, arch="qwen2vl", late=(sections,), defaults={**_DEFAULTS, "mrope_section": [16, 24, 24]}
)
QWEN3_VL = replace(
    QWEN3, arch="qwen3vl", late=(sections, deepstack), defaults={**_DEFAULTS, "mrope_section": [24, 20, 20]}
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    arch="qwen3vlmoe",
    keys=k.decoder(more=(k.expert_counts,)),
    late=(k.expert_widths, sections, deepstack),
    defaults={**QWEN3_MOE.defaults, "mrope_section": [24, 20, 20], "norm_topk_prob": True},
)


def _first_rope(file: Metadata) -> Json:
    heads = file.optional("rope.dimension_count") or file.head_size
    return {"head_dim": heads, "rotary_emb_base": file.number("rope.freq_base", 10000.0)}


@read_by(_first_rope)
def first_rope(facts: Facts) -> Iterator[KV]:
    """Writes the first Qwen's rotary embedding, which rotates whole heads."""
    yield facts.u32("rope.dimension_count", facts.optional("kv_channels") or k.head_size(facts.settings))
    yield facts.f32("rope.freq_base", facts.number("rotary_emb_base"))


# `intermediate_size` is twice the inner width, and llama.cpp halves it.
QWEN = GGUFModel(
    "qwen",
    keys=(*k.SIZES, first_rope, k.rms_epsilon_of("layer_norm_epsilon")),
    defaults={"max_position_embeddings": 8192, "rotary_emb_base": 10000.0, "layer_norm_epsilon": 1e-6},
    whole=("attn.qkv",),
    head="required",
    checks=(c.computes("rotary_pct", 1.0),),
)

# Of types with one graph, a file is read as the first.
MODELS = {
    "qwen": QWEN,
    "qwen2": QWEN2,
    "mimo": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen2_5_vl": QWEN2_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_vl_moe_text": QWEN3_VL_MOE,
}
