"""Declares Falcon-H1, whose layers have attention and Mamba-2 side by side.

Source: transformers' `modeling_falcon_h1`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.granite import MAMBA2_NAMES, mamba2_mixer
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions


def inner_width(config: Json) -> int:
    """Returns the width inside a mixer: stated, or a multiple of the hidden size."""
    expand = optional_int(config, "mamba_expand") or 2
    return optional_int(config, "mamba_d_ssm") or expand * positive_int(config, "hidden_size")


def falcon_h1_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Falcon-H1's dimensions."""
    inner, heads = inner_width(config), positive_int(config, "mamba_n_heads")
    states = 2 * positive_int(config, "mamba_n_groups") * positive_int(config, "mamba_d_state")
    return {
        **c.dense_dimensions(config, layer),
        "mamba_heads": heads,
        "mamba_rows": inner,
        "conv_rows": inner + states,
        "mamba_in_rows": 2 * inner + states + heads,
        "kernel": positive_int(config, "mamba_d_conv"),
        "mamba_norm": flag(config, "mamba_rms_norm"),
    }


_MIXER = tuple(
    replace(slot, only_if="mamba_norm") if slot.role == "mamba.norm" else slot
    for slot in mamba2_mixer(c.LAYER + "mamba.", bias="mamba_proj_bias", conv_bias="mamba_conv_bias")
)
FALCON_H1 = replace(
    LLAMA,
    name="Falcon-H1",
    model_types=("falcon_h1",),
    classes=("FalconH1ForCausalLM",),
    slots=(
        c.EMBED,
        *c.gated_mlp(c.LAYER + "feed_forward.", bias="mlp_bias"),
        *(replace(slot, bias="projectors_bias") if slot.role == "mamba.out" else slot for slot in _MIXER),
        *c.BIASED_ATTENTION,
        c.ATTN_NORM,
        replace(c.MLP_NORM, module=c.LAYER + "pre_ff_layernorm"),
        c.norm("final_norm", "model.final_layernorm"),
        c.LM_HEAD,
    ),
    dimensions=falcon_h1_dimensions,
    named_by={**c.NAMED_BY, **MAMBA2_NAMES, "mamba_rows": "mamba_d_ssm"},
    defaults={
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
    },
    fusions=(c.QKV, replace(c.GATE_UP, module=c.LAYER + "feed_forward.gate_up_proj")),
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "mamba.in")),
        *c.SCALE_PAIRS[1:],
    ),
    note="",
)

FAMILIES = (FALCON_H1,)
