"""Declares MiniMax-M2 and M3, MiMo-V2 and Step-3.7: experts in most layers, attention of one or two widths.

Sources: transformers' `modeling_minimax_m2`, `modeling_minimax_m3_vl`, `modeling_mimo_v2_flash` and
`modeling_step3p7`, with the names of the published files from `conversion_mapping`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families.deepseek import ROUTER_CORRECTION
from qconvert.models.families.llama import MISTRAL, MIXTRAL
from qconvert.models.parameters import Dimensions, ParameterTemplate

BLOCK = c.LAYER + "block_sparse_moe."
EXPERTS = (
    c.router(BLOCK + "gate"),
    ParameterTemplate(
        "mlp.router_correction",
        BLOCK.removesuffix("."),
        ("experts",),
        "other",
        suffix=".e_score_correction_bias",
    ),
    *c.experts(BLOCK + "experts.{expert}.", ("w1", "w3", "w2")),
)
STACKS = tuple(replace(s, module=s.module.replace("mlp.", "block_sparse_moe.")) for s in c.EXPERT_STACKS)


def m2_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns MiniMax-M2's dimensions: experts in every layer, norms over all heads of q and of k."""
    return {
        **c.attention_dimensions(config),
        "experts": positive_int(config, "num_local_experts"),
        "expert_rows": positive_int(config, "intermediate_size"),
        "qk_norm": flag(config, "use_qk_norm", default=True),
    }


MINIMAX_M2 = replace(
    MIXTRAL,
    name="MiniMax-M2, M2.1, M2.5, M2.7",
    model_types=("minimax_m2",),
    classes=("MiniMaxM2ForCausalLM",),
    slots=c.decoder(
        (
            *c.attention(),
            c.norm("attn.q_norm", c.LAYER + "self_attn.q_norm", "q_rows", only_if="qk_norm"),
            c.norm("attn.k_norm", c.LAYER + "self_attn.k_norm", "kv_rows", only_if="qk_norm"),
        ),
        EXPERTS,
    ),
    dimensions=m2_dimensions,
    named_by={**c.NAMED_BY, "experts": "num_local_experts", "expert_rows": "intermediate_size"},
    keys={"num_experts": "num_local_experts"},
    fusions=(c.QKV, *STACKS),
    carried={r"(language_model\.)?model\.(mtp_modules|layers\.{later})\..*": "next-token prediction"},
)


def listed(config: Json, key: str, layer: int, *, default: bool) -> bool:
    """Returns a layer's mark in a list of 0 and 1 under `key`; `default` when there is no such list."""
    marks = whole_numbers(config, key)
    if not marks:
        return default
    if len(marks) <= layer or marks[layer] not in (0, 1):
        raise CorruptCheckpoint(f"config.json: {key} has no 0 or 1 for layer {layer}")
    return bool(marks[layer])


def m3_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns MiniMax-M3's dimensions: dense blocks first, and an indexer in layers of sparse attention."""
    stated = c.entry(config, "mlp_layer_types", layer)
    sparse = listed(config, "moe_layer_freq", layer, default=True) if stated is None else stated == "sparse"
    attention = config.get("sparse_attention_config")
    indexer = {**config, **attention} if isinstance(attention, dict) else config
    kind = c.entry(config, "layer_types", layer)
    indexed = (
        listed(indexer, "sparse_attention_freq", layer, default=False) if kind is None else "sparse" in kind
    )
    width = optional_int(indexer, "sparse_index_dim") or optional_int(config, "index_head_dim") or 128
    heads = optional_int(indexer, "sparse_num_index_heads") or optional_int(config, "index_n_heads") or 4
    return {
        **c.attention_dimensions(config),
        "intermediate": 0 if sparse else positive_int(config, "dense_intermediate_size"),
        "experts": positive_int(config, "num_local_experts") if sparse else 0,
        "expert_rows": positive_int(config, "intermediate_size") if sparse else 0,
        "shared_rows": positive_int(config, "shared_intermediate_size") if sparse else 0,
        "indexer_dim": width if indexed else 0,
        "indexer_q_rows": heads * width if indexed else 0,
    }


INDEX = c.LAYER + "self_attn.index_"
MINIMAX_M3 = replace(
    MINIMAX_M2,
    name="MiniMax-M3",
    model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
    classes=(
        "MiniMaxM3ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3VLForConditionalGeneration",
    ),
    slots=c.decoder(
        (
            *c.attention(),
            c.Q_NORM,
            c.K_NORM,
            c.linear("attn.indexer.q", INDEX + "q_proj", "indexer_q_rows", "hidden"),
            c.linear("attn.indexer.k", INDEX + "k_proj", "indexer_dim", "hidden"),
            c.norm("attn.indexer.q_norm", INDEX + "q_norm", "indexer_dim"),
            c.norm("attn.indexer.k_norm", INDEX + "k_norm", "indexer_dim"),
        ),
        (
            *c.gated_mlp(),
            *EXPERTS,
            *c.gated_mlp(BLOCK + "shared_experts.", "mlp.shared.", "shared_rows"),
        ),
    ),
    dimensions=m3_dimensions,
    named_by={
        **MINIMAX_M2.named_by,
        "intermediate": "dense_intermediate_size",
        "shared_rows": "shared_intermediate_size",
        "indexer_dim": "sparse_index_dim",
        "indexer_q_rows": "sparse_num_index_heads x sparse_index_dim",
    },
    defaults={"dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_local_experts": 128},
    fusions=(c.QKV, c.GATE_UP, *STACKS),
    spellings=c.NESTED[::-1],
    carried={
        **MINIMAX_M2.carried,
        r"(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\..*": "vision",
    },
    norm_offset=1.0,
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "attn.indexer.q", "attn.indexer.k")),
        c.MLP_INPUT,
        c.VALUES,  # its blocks clamp what up makes, and add 1
    ),
    note="the vision tower is copied as it is",
)


def v2_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns MiMo-V2's dimensions: other heads in layers with a window, values narrower than keys."""
    kind = c.entry(config, "layer_types", layer)
    full = not listed(config, "hybrid_layer_pattern", layer, default=layer > 0 and (layer + 1) % 6 != 0)
    local = kind == "sliding_attention" if kind is not None else not full
    heads, kv_heads, width, values = (
        (local and optional_int(config, f"swa_{key}")) or positive_int(config, key)
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    )
    stated = c.entry(config, "mlp_layer_types", layer)
    sparse = (
        listed(config, "moe_layer_freq", layer, default=layer > 0) if stated is None else stated == "sparse"
    )
    sinks = "add_swa_attention_sink_bias" if local else "add_full_attention_sink_bias"
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": positive_int(config, "hidden_size"),
        "q_rows": heads * width,
        "k_rows": kv_heads * width,
        "v_rows": kv_heads * values,
        "o_columns": heads * values,
        "sinks": heads if flag(config, sinks, default=local) else 0,
        "intermediate": 0 if sparse else positive_int(config, "intermediate_size"),
        "experts": positive_int(config, "n_routed_experts") if sparse else 0,
        "expert_rows": positive_int(config, "moe_intermediate_size") if sparse else 0,
    }


ATTENTION = c.LAYER + "self_attn."
MIMO_V2 = replace(
    MISTRAL,
    name="MiMo-V2-Flash",
    model_types=("mimo_v2_flash",),
    classes=("MiMoV2FlashForCausalLM",),
    slots=c.decoder(
        (
            c.linear("attn.q", ATTENTION + "q_proj", "q_rows", "hidden", bias="attention_bias"),
            c.linear("attn.k", ATTENTION + "k_proj", "k_rows", "hidden", bias="attention_bias"),
            c.linear("attn.v", ATTENTION + "v_proj", "v_rows", "hidden", bias="attention_bias"),
            c.linear("attn.o", ATTENTION + "o_proj", "hidden", "o_columns"),
            ParameterTemplate(
                "attn.sinks", ATTENTION + "attention_sink_bias", ("sinks",), "other", suffix=""
            ),
        ),
        (*c.gated_mlp(), c.ROUTER, ROUTER_CORRECTION, *c.experts()),
    ),
    dimensions=v2_dimensions,
    named_by={
        **c.NAMED_BY,
        "k_rows": "num_key_value_heads x head_dim",
        "v_rows": "num_key_value_heads x v_head_dim",
        "o_columns": "num_attention_heads x v_head_dim",
        "experts": "n_routed_experts",
    },
    fusions=(c.QKV, c.GATE_UP, *c.EXPERT_STACKS),
    carried={r"model\.mtp\..*|mtp\..*": "next-token prediction"},
    scale_pairs=(c.ATTN_INPUT, c.MLP_INPUT, *c.GATED),
)

MOE = c.LAYER + "moe."


def step_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Step-3.7's dimensions; a layer with a window may have more heads."""
    other = config.get("attention_other_setting")
    local = c.entry(config, "layer_types", layer) == "sliding_attention"
    many = optional_int(config, "num_sliding_attention_heads") if local else None
    if local and many is None and isinstance(other, dict):
        many = optional_int(other, "num_attention_heads")
    heads = many or positive_int(config, "num_attention_heads")
    sparse = _step_is_sparse(config, layer)
    return {
        **c.attention_dimensions({**config, "num_attention_heads": heads}),
        "heads": heads,
        "intermediate": 0 if sparse else positive_int(config, "intermediate_size"),
        "experts": positive_int(config, "num_experts") if sparse else 0,
        "expert_rows": positive_int(config, "moe_intermediate_size") if sparse else 0,
        "shared_rows": positive_int(config, "share_expert_dim") if sparse else 0,
    }


def _step_is_sparse(config: Json, layer: int) -> bool:
    stated = c.entry(config, "mlp_layer_types", layer)
    if stated is not None:
        return stated == "sparse"
    listed = config.get("moe_layers_enum")
    if isinstance(listed, str):
        return str(layer) in listed.replace(" ", "").split(",")
    if listed is not None:
        return layer in whole_numbers(config, "moe_layers_enum")
    return layer >= (optional_int(config, "first_k_dense_replace") or 3)


# Its files hold a stack of experts for each projection.
STEP_STACKS = tuple(
    replace(
        c.EXPERT_STACKS[1],
        role=f"mlp.experts.{part}",
        module=f"{MOE}{part}_proj",
        members=(f"mlp.experts.{{expert}}.{part}",),
        suffix=".weight",
        native=True,
    )
    for part in ("gate", "up", "down")
)
STEP = replace(
    MISTRAL,
    name="Step-3.5, Step-3.7",
    model_types=("step3p7", "step3p5"),
    classes=(
        "Step3p7FlashForCausalLM",
        "Step3p7ForConditionalGeneration",
        "Step3p7ForCausalLM",
        "Step3p5ForCausalLM",
    ),
    slots=c.decoder(
        (
            *c.BIASED_ATTENTION,
            c.Q_NORM,
            c.K_NORM,
            ParameterTemplate("attn.head_gate", c.LAYER + "self_attn.g_proj", ("heads", "hidden"), "router"),
        ),
        (
            *c.gated_mlp(bias="mlp_bias"),
            c.router(MOE + "gate"),
            ParameterTemplate("mlp.router_correction", MOE + "router_bias", ("experts",), "other", suffix=""),
            *c.experts(MOE + "experts.{expert}."),
            *c.gated_mlp(c.LAYER + "share_expert.", "mlp.shared.", "shared_rows"),
        ),
    ),
    dimensions=step_dimensions,
    named_by={**c.NAMED_BY, "shared_rows": "share_expert_dim"},
    defaults={"head_dim": 128, "num_experts": 288, "share_expert_dim": 1280},
    keys={"num_experts": "n_routed_experts", "num_key_value_heads": "num_attention_groups"},
    fusions=(c.QKV, c.GATE_UP, *STEP_STACKS),
    spellings=c.NESTED[:1],
    carried={
        r"(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\..*": "vision",
        r"model\.(language_model\.)?layers\.{later}\..*": "next-token prediction",
    },
    norm_offset=1.0,
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "attn.head_gate")),
        c.MLP_INPUT,
        c.VALUES,
    ),
    note="the vision tower is copied as it is; a projection of all experts is one stack",
)

FAMILIES = (MINIMAX_M2, MINIMAX_M3, MIMO_V2, STEP)
