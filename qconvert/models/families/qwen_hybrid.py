"""Declares Qwen3-Next and Qwen3.5 (also 3.6, 3.8): three gated DeltaNet layers per attention layer.

Source: transformers' `modeling_qwen3_next`, `modeling_qwen3_5` and `modeling_qwen3_5_moe`. Decay vectors, the
short convolution and the two small gates (in_proj_a, in_proj_b; in_proj_ba) are never quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qconvert.core.config_json import optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families import vision
from qconvert.models.families.qwen import QWEN3, SHARED_EXPERT
from qconvert.models.parameters import Dimensions, ParameterTemplate

DELTA = c.LAYER + "linear_attn."
# The query projection also makes an output gate, so it has twice the rows that the output reads.
GATED_ATTENTION = (
    c.linear("attn.q", c.LAYER + "self_attn.q_proj", "gated_q_rows", "hidden", bias="attention_bias"),
    *(replace(slot, only_if="full_attention") for slot in (*c.BIASED_ATTENTION[1:], c.Q_NORM, c.K_NORM)),
)
DELTA_NET = (
    ParameterTemplate("delta.dt_bias", DELTA + "dt_bias", ("delta_heads",), "other", suffix=""),
    ParameterTemplate("delta.A_log", DELTA + "A_log", ("delta_heads",), "other", suffix=""),
    ParameterTemplate("delta.conv", DELTA + "conv1d", ("delta_qkv_rows", "one", "kernel"), "other"),
    c.norm("delta.norm", DELTA + "norm", "delta_head_dim"),
    c.linear("delta.o", DELTA + "out_proj", "hidden", "delta_rows"),
    c.linear("delta.qkv", DELTA + "in_proj_qkv", "delta_qkv_rows", "hidden"),
    c.linear("delta.z", DELTA + "in_proj_z", "delta_rows", "hidden"),
    ParameterTemplate("delta.b", DELTA + "in_proj_b", ("delta_heads", "hidden"), "router"),
    ParameterTemplate("delta.a", DELTA + "in_proj_a", ("delta_heads", "hidden"), "router"),
)
SCALE_PAIRS = (
    replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "delta.qkv", "delta.z", "delta.b", "delta.a")),
    *c.SCALE_PAIRS[1:],
)
NORMS = (c.ATTN_NORM, c.MLP_NORM, c.FINAL_NORM)
NAMED_BY_HYBRID = {
    **c.NAMED_BY,
    "gated_q_rows": "2 x num_attention_heads x head_dim",
    "delta_heads": "linear_num_value_heads",
    "delta_head_dim": "linear_value_head_dim",
    "delta_rows": "linear_num_value_heads x linear_value_head_dim",
    "delta_qkv_rows": "2 x linear_num_key_heads x linear_key_head_dim + the values",
    "kernel": "linear_conv_kernel_dim",
}


def full_attention(config: Json, layer: int) -> bool:
    """Returns whether a layer has attention: from `layer_types`, else every fourth."""
    types = config.get("layer_types")
    if types is None:
        return (layer + 1) % (optional_int(config, "full_attention_interval") or 4) == 0
    if not isinstance(types, list) or len(types) <= layer:
        raise CorruptCheckpoint(f"config.json: layer_types has no entry {layer}")
    return bool(types[layer] == "full_attention")


def hybrid(base: Callable[[Json, int], Dimensions]) -> Callable[[Json, int], Dimensions]:
    """Returns the dimensions of `base`, with those of attention or of a DeltaNet, by layer."""

    def dimensions(config: Json, layer: int) -> Dimensions:
        dims, full = base(config, layer), full_attention(config, layer)
        sizes = ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim", "conv_kernel_dim")
        heads, keys, head_dim, key_dim, kernel = (positive_int(config, f"linear_{key}") for key in sizes)
        delta = {
            "delta_heads": heads,
            "delta_head_dim": head_dim,
            "delta_rows": heads * head_dim,
            "delta_qkv_rows": 2 * keys * key_dim + heads * head_dim,
            "kernel": kernel,
        }
        present = {"full_attention": 1, "gated_q_rows": 2 * dims["q_rows"]}
        return {**dims, **(present | dict.fromkeys(delta, 0) if full else delta | dict.fromkeys(present, 0))}

    return dimensions


HYBRID = replace(
    QWEN3,
    name="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_text"),
    classes=("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    slots=(c.EMBED, *DELTA_NET, *GATED_ATTENTION, *c.gated_mlp(), *NORMS, c.LM_HEAD),
    dimensions=hybrid(c.dense_dimensions),
    named_by=NAMED_BY_HYBRID,
    defaults={
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    spellings=({"model.": "model.language_model."},),
    carried={r"model\.visual\..*": "vision", r"mtp\..*": "next-token prediction"},
    tower=vision.QWEN3_TOWER,
    fusions=(c.QKV, c.GATE_UP),
    scale_pairs=SCALE_PAIRS,
    norm_offset=1.0,
    note="also 3.6 and 3.8; vision and next-token prediction are copied as they are",
)

HYBRID_MOE = replace(
    HYBRID,
    name="Qwen3.5-MoE",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    classes=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    slots=(c.EMBED, *DELTA_NET, *GATED_ATTENTION, c.ROUTER, *c.experts(), *SHARED_EXPERT, *NORMS, c.LM_HEAD),
    dimensions=hybrid(c.sparse_dimensions()),
    fusions=(c.QKV, *(replace(stack, native=True) for stack in c.EXPERT_STACKS)),
)

# q, k, v and z of one key head after the other, and so are the two gates: one linear each.
NEXT_DELTA_NET = (
    *(slot for slot in DELTA_NET if slot.role not in ("delta.qkv", "delta.z", "delta.b", "delta.a")),
    c.linear("delta.qkvz", DELTA + "in_proj_qkvz", "delta_qkvz_rows", "hidden"),
    ParameterTemplate("delta.ba", DELTA + "in_proj_ba", ("delta_gates", "hidden"), "router"),
)


def next_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a hybrid's dimensions with experts by Qwen's rule, and those of its two joined projections."""
    dims = hybrid(c.sparse_dimensions(c.every_nth_layer))(config, layer)
    joined = {"delta_qkvz_rows": dims["delta_qkv_rows"] + dims["delta_rows"]}
    return {**dims, **joined, "delta_gates": 2 * dims["delta_heads"]}


QWEN3_NEXT = replace(
    HYBRID_MOE,
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    classes=("Qwen3NextForCausalLM",),
    slots=(
        c.EMBED,
        *NEXT_DELTA_NET,
        *GATED_ATTENTION,
        *c.gated_mlp(),
        c.ROUTER,
        *c.experts(),
        *SHARED_EXPERT,
        *NORMS,
        c.LM_HEAD,
    ),
    dimensions=next_dimensions,
    named_by={
        **NAMED_BY_HYBRID,
        "delta_qkvz_rows": "2 x linear_num_key_heads x linear_key_head_dim + twice the values",
        "delta_gates": "2 x linear_num_value_heads",
    },
    spellings=(),
    tower=None,
    carried={r"mtp\..*": "next-token prediction"},
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "delta.qkvz", "delta.ba")),
        *c.SCALE_PAIRS[1:],
    ),
    note="also Qwen3-Coder-Next; next-token prediction is copied as it is",
)

FAMILIES = (HYBRID, HYBRID_MOE, QWEN3_NEXT)
