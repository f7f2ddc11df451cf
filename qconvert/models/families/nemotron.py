"""Declares NVIDIA's own families: Nemotron-H (Mamba-2, attention and MLPs, alternating) and Nemotron-NAS.

Sources: transformers' `modeling_nemotron_h`, with the names of the published files from `conversion_mapping`.
Nemotron-NAS is declared by what its config.json says of Llama's blocks; no file of it was at hand.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import divide, positive_int
from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families.granite import mamba2_mixer
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate, ScalePair

LAYER = "backbone.layers.{layer}."
MIXER = LAYER + "mixer."
# Every name of a kind of layer, in lists and in patterns.
KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("E", "moe"), "moe"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
}


def nemotron_kind(config: Json, layer: int) -> str:
    """Returns what a layer is: mamba, attention, moe or mlp."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    word = next((w for w in (c.entry(config, key, layer) for key in keys) if w is not None), None)
    if word not in KINDS:
        raise CorruptCheckpoint(
            f"config.json: hybrid_override_pattern has no known kind for layer {layer}: {word!r}"
        )
    return KINDS[str(word)]


def nemotron_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Nemotron-H's dimensions: each layer is one block."""
    kind = nemotron_kind(config, layer)
    attention = c.attention_dimensions({"head_dim": config.get("attention_head_dim"), **config})
    rows = ("q_rows", "kv_rows")
    return {
        **attention,
        **({} if kind == "attention" else dict.fromkeys(rows, 0)),
        **_mamba_dimensions(config, present=kind == "mamba"),
        "intermediate": positive_int(config, "intermediate_size") if kind == "mlp" else 0,
        **_expert_dimensions(config, present=kind == "moe"),
    }


def _mamba_dimensions(config: Json, *, present: bool) -> dict[str, int]:
    heads, width = positive_int(config, "mamba_num_heads"), positive_int(config, "mamba_head_dim")
    states = 2 * positive_int(config, "n_groups") * positive_int(config, "ssm_state_size")
    sizes = {
        "mamba_heads": heads,
        "mamba_rows": heads * width,
        "conv_rows": heads * width + states,
        "mamba_in_rows": 2 * heads * width + states + heads,
        "kernel": positive_int(config, "conv_kernel"),
    }
    return sizes if present else dict.fromkeys(sizes, 0)


def _expert_dimensions(config: Json, *, present: bool) -> dict[str, int]:
    if not present:
        return dict.fromkeys(("experts", "expert_rows", "expert_columns", "shared_rows", "latent"), 0)
    latent = config.get("moe_latent_size")
    return {
        "experts": positive_int(config, "n_routed_experts"),
        "expert_rows": positive_int(config, "moe_intermediate_size"),
        "expert_columns": positive_int(config, "moe_latent_size" if latent else "hidden_size"),
        "shared_rows": positive_int(config, "moe_shared_expert_intermediate_size"),
        "latent": positive_int(config, "moe_latent_size") if latent else 0,
    }


NEMOTRON_H = Family(
    name="Nemotron-H, Nemotron-3",
    model_types=("nemotron_h",),
    classes=("NemotronHForCausalLM",),
    slots=(
        c.embedding("backbone.embeddings"),
        c.norm("norm", LAYER + "norm"),
        *mamba2_mixer(MIXER, bias="use_bias", conv_bias="use_conv_bias"),
        *c.attention(MIXER),
        c.linear("mlp.up", MIXER + "up_proj", "intermediate", "hidden", bias="mlp_bias"),
        c.linear("mlp.down", MIXER + "down_proj", "hidden", "intermediate", bias="mlp_bias"),
        c.router(MIXER + "gate"),
        ParameterTemplate(
            "mlp.router_correction", MIXER + "gate", ("experts",), "other", suffix=".e_score_correction_bias"
        ),
        c.linear(
            "mlp.experts.{expert}.up", MIXER + "experts.{expert}.up_proj", "expert_rows", "expert_columns"
        ),
        c.linear(
            "mlp.experts.{expert}.down", MIXER + "experts.{expert}.down_proj", "expert_columns", "expert_rows"
        ),
        c.linear("mlp.shared.up", MIXER + "shared_experts.up_proj", "shared_rows", "hidden", bias="mlp_bias"),
        c.linear(
            "mlp.shared.down", MIXER + "shared_experts.down_proj", "hidden", "shared_rows", bias="mlp_bias"
        ),
        c.linear("mlp.latent_in", MIXER + "fc1_latent_proj", "latent", "hidden", bias="mlp_bias"),
        c.linear("mlp.latent_out", MIXER + "fc2_latent_proj", "hidden", "latent", bias="mlp_bias"),
        c.norm("final_norm", "backbone.norm_f"),
        c.LM_HEAD,
    ),
    dimensions=nemotron_dimensions,
    named_by={
        **c.NAMED_BY,
        "mamba_heads": "mamba_num_heads",
        "mamba_rows": "mamba_num_heads x mamba_head_dim",
        "conv_rows": "mamba_num_heads x mamba_head_dim + 2 x n_groups x ssm_state_size",
        "mamba_in_rows": "2 x mamba_num_heads x (mamba_head_dim + 1/2) + 2 x n_groups x ssm_state_size",
        "kernel": "conv_kernel",
        "experts": "n_routed_experts",
        "expert_columns": "moe_latent_size",
        "shared_rows": "moe_shared_expert_intermediate_size",
        "latent": "moe_latent_size",
    },
    defaults={"use_conv_bias": True, "conv_kernel": 4, "head_dim": 128, "n_groups": 8, "ssm_state_size": 128},
    fusions=(
        replace(c.QKV, module=MIXER + "qkv_proj"),
        *(
            replace(
                c.EXPERT_STACKS[1],
                role=f"mlp.experts.{part}",
                module=f"{MIXER}experts.{part}_proj",
                members=(f"mlp.experts.{{expert}}.{part}",),
            )
            for part in ("up", "down")
        ),
    ),
    layer_list="layers_block_type",
    spellings=({"backbone.": "model."},),
    carried={r"mtp\..*": "next-token prediction"},
    scale_pairs=(
        ScalePair(
            "norm",
            (
                *("mamba.in", "attn.q", "attn.k", "attn.v", "mlp.up", "mlp.router", "mlp.shared.up"),
                *("mlp.latent_in", "mlp.experts.{expert}.up"),
            ),
        ),
        c.VALUES,
    ),
    note="blocks have no gate; next-token prediction is copied as it is",
)


def _block(config: Json, layer: int, part: str) -> Json:
    blocks = config.get("block_configs")
    block = blocks[layer] if isinstance(blocks, list) and layer < len(blocks) else None
    found = block.get(part) if isinstance(block, dict) else None
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"config.json: block_configs has no {part} for layer {layer}")
    return found


def nas_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns one layer's dimensions: its heads and inner width; a block is left out, or one linear."""
    attention, ffn = _block(config, layer, "attention"), _block(config, layer, "ffn")
    heads, hidden = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
    plain = not attention.get("no_op") and not attention.get("replace_with_linear")
    per_group = positive_int(attention, "n_heads_in_group") if plain else 1
    kv_heads = divide(heads, per_group, "num_attention_heads", "n_heads_in_group")
    dims = dict(c.attention_dimensions({**config, "num_key_value_heads": kv_heads}))
    gated = not ffn.get("no_op") and not ffn.get("replace_with_linear")
    return {
        **dims,
        **({} if plain else {"q_rows": 0, "kv_rows": 0}),
        "attention": not attention.get("no_op"),
        "attn_columns": hidden if attention.get("replace_with_linear") else 0,
        "ffn": not ffn.get("no_op"),
        "ffn_columns": hidden if ffn.get("replace_with_linear") else 0,
        "intermediate": _inner_width(ffn, hidden) if gated else 0,
    }


def _inner_width(ffn: Json, hidden: int) -> int:
    """Two thirds of `ffn_mult` times the hidden size, rounded up to 256, as the class does."""
    share = positive_number(ffn.get("ffn_mult"))
    if share is None or share > 1024:
        raise CorruptCheckpoint(f"config.json: ffn_mult is {ffn.get('ffn_mult')!r}, not a positive number")
    return -(-int(2 * share * hidden / 3) // 256) * 256


NEMOTRON_NAS = replace(
    LLAMA,
    name="Nemotron-NAS (Llama-Nemotron)",
    model_types=("nemotron-nas", "deci"),
    classes=("DeciLMForCausalLM",),
    slots=(
        c.EMBED,
        replace(c.ATTN_NORM, only_if="attention"),
        *c.BIASED_ATTENTION,
        c.linear("attn.linear", c.LAYER + "self_attn.linear_attn", "hidden", "attn_columns"),
        replace(c.MLP_NORM, only_if="ffn"),
        *c.gated_mlp(bias="mlp_bias"),
        c.linear("mlp.linear", c.LAYER + "mlp.linear_mlp", "hidden", "ffn_columns"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    dimensions=nas_dimensions,
    named_by={
        **c.NAMED_BY,
        "kv_rows": "num_attention_heads / n_heads_in_group x head_dim",
        "intermediate": "ffn_mult x hidden_size",
    },
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "attn.linear")),
        replace(c.MLP_INPUT, readers=(*c.MLP_INPUT.readers, "mlp.linear")),
        *c.SCALE_PAIRS[2:],
    ),
    note="layers differ in heads and width, and may have no attention or no block",
)

FAMILIES = (NEMOTRON_H, NEMOTRON_NAS)
