"""Declares Mamba and Mamba-2, which have no attention.

Sources: transformers' `modeling_mamba` and `modeling_mamba2`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.granite import mamba2_mixer
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate, ScalePair

LAYER = "backbone.layers.{layer}."
MIXER = LAYER + "mixer."


def time_step_rank(config: Json) -> int:
    """Returns the rank of Mamba's time steps: a sixteenth of the hidden size, unless it is stated."""
    if config.get("time_step_rank", "auto") == "auto":
        return -(-positive_int(config, "hidden_size") // 16)
    return positive_int(config, "time_step_rank")


def inner_width(config: Json) -> int:
    """Returns the width inside a mixer."""
    return (optional_int(config, "expand") or 2) * positive_int(config, "hidden_size")


def mamba_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Mamba's dimensions."""
    inner, rank, state = inner_width(config), time_step_rank(config), positive_int(config, "state_size")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": positive_int(config, "hidden_size"),
        "mamba_rows": inner,
        "mamba_in_rows": 2 * inner,
        "x_rows": rank + 2 * state,
        "rank": rank,
        "state": state,
        "kernel": positive_int(config, "conv_kernel"),
        "one": 1,
    }


MAMBA = Family(
    name="Mamba",
    model_types=("mamba",),
    classes=("MambaForCausalLM",),
    slots=(
        c.embedding("backbone.embeddings"),
        c.norm("norm", LAYER + "norm"),
        ParameterTemplate("mamba.A_log", MIXER + "A_log", ("mamba_rows", "state"), "other", suffix=""),
        ParameterTemplate("mamba.D", MIXER + "D", ("mamba_rows",), "other", suffix=""),
        ParameterTemplate(
            "mamba.conv", MIXER + "conv1d", ("mamba_rows", "one", "kernel"), "other", "use_conv_bias"
        ),
        c.linear("mamba.in", MIXER + "in_proj", "mamba_in_rows", "hidden", bias="use_bias"),
        c.linear("mamba.x", MIXER + "x_proj", "x_rows", "mamba_rows"),
        # Small, and its rows are too short for groups.
        ParameterTemplate("mamba.dt", MIXER + "dt_proj", ("mamba_rows", "rank"), "other", True),
        c.linear("mamba.out", MIXER + "out_proj", "hidden", "mamba_rows", bias="use_bias"),
        c.norm("final_norm", "backbone.norm_f"),
        c.LM_HEAD,
    ),
    dimensions=mamba_dimensions,
    named_by={
        **c.NAMED_BY,
        "mamba_rows": "expand x hidden_size",
        "mamba_in_rows": "2 x expand x hidden_size",
        "x_rows": "time_step_rank + 2 x state_size",
        "rank": "time_step_rank",
        "state": "state_size",
        "kernel": "conv_kernel",
    },
    defaults={"tie_word_embeddings": True, "state_size": 16, "conv_kernel": 4, "use_conv_bias": True},
    scale_pairs=(ScalePair("norm", ("mamba.in",)),),
)


def mamba2_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Mamba-2's dimensions."""
    inner, heads = inner_width(config), positive_int(config, "num_heads")
    states = 2 * positive_int(config, "n_groups") * positive_int(config, "state_size")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": positive_int(config, "hidden_size"),
        "mamba_heads": heads,
        "mamba_rows": inner,
        "conv_rows": inner + states,
        "mamba_in_rows": 2 * inner + states + heads,
        "kernel": positive_int(config, "conv_kernel"),
        "one": 1,
    }


MAMBA2 = replace(
    MAMBA,
    name="Mamba-2",
    model_types=("mamba2",),
    classes=("Mamba2ForCausalLM",),
    slots=(
        *MAMBA.slots[:2],
        *mamba2_mixer(MIXER, bias="use_bias", conv_bias="use_conv_bias"),
        *MAMBA.slots[-2:],
    ),
    dimensions=mamba2_dimensions,
    named_by={
        **c.NAMED_BY,
        "mamba_heads": "num_heads",
        "mamba_rows": "expand x hidden_size",
        "conv_rows": "expand x hidden_size + 2 x n_groups x state_size",
        "mamba_in_rows": "2 x (expand x hidden_size + n_groups x state_size) + num_heads",
        "kernel": "conv_kernel",
    },
    defaults={
        "num_heads": 128,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
    },
    spellings=({"backbone.": "model.backbone.", "lm_head": "model.lm_head"},),
)

FAMILIES = (MAMBA, MAMBA2)
