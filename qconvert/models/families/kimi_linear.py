"""Declares Kimi-Linear and K3: layers of gated delta attention (KDA) alternate with latent attention.

K3 has experts in a narrower space. Sources: llama.cpp's converters (conversion/kimi_linear.py, kimi_k3.py),
vLLM's `kimi_k3`, transformers' `modeling_kimi_linear`; K3's total is that of the published files. The weights
that mix the residuals of earlier layers, convolutions, decay and the two linears around the experts are never
quantized: vLLM has them in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import MAX_LAYERS, count, flag, optional_int, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families import deepseek as d
from qconvert.models.families import vision
from qconvert.models.families.minimax import BLOCK, STACKS
from qconvert.models.parameters import Dimensions, ParameterTemplate, ScalePair

ATTENTION = c.LAYER + "self_attn."


def residual(role: str, module: str) -> tuple[ParameterTemplate, ...]:
    """Returns what weighs the residuals of earlier blocks of layers: a norm and one row."""
    return (
        c.norm(f"{role}_norm", f"{module}_norm", only_if="residuals"),
        ParameterTemplate(f"{role}_proj", f"{module}_proj", ("one", "hidden"), "router", False, "residuals"),
    )


def short_convolution(part: str) -> ParameterTemplate:
    """Returns the convolution over a few positions behind one of q, k and v."""
    return ParameterTemplate(
        f"delta.{part}_conv", f"{ATTENTION}{part}_conv1d", ("delta_rows", "one", "kernel"), "other"
    )


DELTA = (
    c.linear("delta.q", ATTENTION + "q_proj", "delta_rows", "hidden"),
    c.linear("delta.k", ATTENTION + "k_proj", "delta_rows", "hidden"),
    c.linear("delta.v", ATTENTION + "v_proj", "delta_rows", "hidden"),
    *(short_convolution(part) for part in "qkv"),
    ParameterTemplate("delta.A_log", ATTENTION + "A_log", ("decay_rows",), "other", suffix=""),
    ParameterTemplate("delta.dt_bias", ATTENTION + "dt_bias", ("delta_rows",), "other", suffix=""),
    c.linear("delta.f_a", ATTENTION + "f_a_proj", "delta_head_dim", "hidden"),
    c.linear("delta.f_b", ATTENTION + "f_b_proj", "delta_rows", "delta_head_dim"),
    ParameterTemplate("delta.b", ATTENTION + "b_proj", ("delta_heads", "hidden"), "router"),
    c.linear("delta.g", ATTENTION + "g_proj", "full_gate_rows", "hidden"),
    c.linear("delta.g_a", ATTENTION + "g_a_proj", "low_gate", "hidden"),
    c.linear("delta.g_b", ATTENTION + "g_b_proj", "delta_rows", "low_gate"),
    c.norm("delta.norm", ATTENTION + "o_norm", "delta_head_dim"),
    c.linear("delta.o", ATTENTION + "o_proj", "hidden", "delta_rows"),
)
LATENT = (*d.LATENT_ATTENTION, c.linear("attn.gate", ATTENTION + "g_proj", "gate_rows", "hidden"))
EXPERTS = (
    c.router(BLOCK + "gate"),
    ParameterTemplate(
        "mlp.router_correction", BLOCK + "gate", ("experts",), "other", suffix=".e_score_correction_bias"
    ),
    ParameterTemplate("mlp.latent_in", BLOCK + "routed_expert_down_proj", ("latent", "hidden"), "router"),
    c.norm("mlp.latent_norm", BLOCK + "routed_expert_norm", "latent_norm"),
    ParameterTemplate("mlp.latent_out", BLOCK + "routed_expert_up_proj", ("hidden", "latent"), "router"),
    c.linear("mlp.experts.{expert}.gate", BLOCK + "experts.{expert}.w1", "expert_rows", "expert_columns"),
    c.linear("mlp.experts.{expert}.up", BLOCK + "experts.{expert}.w3", "expert_rows", "expert_columns"),
    c.linear("mlp.experts.{expert}.down", BLOCK + "experts.{expert}.w2", "expert_columns", "expert_rows"),
    *c.gated_mlp(BLOCK + "shared_experts.", "mlp.shared.", "shared_rows"),
)


def linear_attention(config: Json) -> Json:
    """Returns what a config says of the layers with KDA, as published files have it.

    transformers saves the same under keys of the config itself.
    """
    found, heads = config.get("linear_attn_config"), config.get("linear_num_heads")
    if not isinstance(found, dict) and heads is not None:
        types = config.get("layer_types")
        kinds = types if isinstance(types, list) else []
        return {
            "num_heads": heads,
            "head_dim": config.get("linear_head_dim"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
            "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        }
    if not isinstance(found, dict):
        raise CorruptCheckpoint(
            "config.json: linear_attn_config is missing", "fetch the model's config.json again"
        )
    return found


def kimi_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns dimensions of Kimi-Linear and K3; layers are counted from 1 in the lists of their configs."""
    settings = linear_attention(config)
    full = layer + 1 in whole_numbers(settings, "full_attn_layers")
    heads, width = positive_int(settings, "num_heads"), positive_int(settings, "head_dim")
    whole_gate = flag(settings, "use_full_rank_gate")
    delta = {
        "delta_heads": heads,
        "decay_rows": -(-heads // 128) * 128,  # its files fill the vector up with zeros
        "delta_head_dim": width,
        "delta_rows": heads * width,
        "kernel": positive_int(settings, "short_conv_kernel_size", MAX_LAYERS),
        "full_gate_rows": heads * width if whole_gate else 0,
        "low_gate": 0 if whole_gate else width,
    }
    latent = d.latent_attention(config)
    latent["gate_rows"] = latent["v_rows"] if flag(config, "mla_use_output_gate") else 0
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": positive_int(config, "hidden_size"),
        "one": 1,
        "residuals": optional_int(config, "attn_res_block_size") is not None,
        **(dict.fromkeys(delta, 0) | latent if full else delta | dict.fromkeys(latent, 0)),
        **_block_dimensions(config, layer),
    }


def _block_dimensions(config: Json, layer: int) -> dict[str, int]:
    sizes = ("experts", "expert_rows", "expert_columns", "shared_rows", "latent", "latent_norm")
    if not d.after_the_first(config, layer):
        return {"intermediate": positive_int(config, "intermediate_size"), **dict.fromkeys(sizes, 0)}
    rows, latent = (
        positive_int(config, "moe_intermediate_size"),
        optional_int(config, "routed_expert_hidden_size") or 0,
    )
    return {
        "intermediate": 0,
        "experts": positive_int(config, "num_experts"),
        "expert_rows": rows,
        "expert_columns": latent or positive_int(config, "hidden_size"),
        "shared_rows": count(config, "num_shared_experts") * rows,
        "latent": latent,
        "latent_norm": latent if flag(config, "latent_moe_use_norm") else 0,
    }


_KEYS = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
}
KIMI_K3 = replace(
    d.DEEPSEEK_V3,
    name="Kimi-K3",
    tower=vision.KIMI_TOWER,
    model_types=("kimi_k3",),
    classes=("KimiK3ForConditionalGeneration",),
    slots=(
        c.EMBED,
        *DELTA,
        *LATENT,
        *c.gated_mlp(),
        *EXPERTS,
        c.ATTN_NORM,
        c.MLP_NORM,
        *residual("attn.residual", c.LAYER + "self_attention_res"),
        *residual("mlp.residual", c.LAYER + "mlp_res"),
        c.FINAL_NORM,
        *residual("residual", "model.output_attn_res"),
        c.LM_HEAD,
    ),
    dimensions=kimi_dimensions,
    named_by={
        **d.DEEPSEEK_V2.named_by,
        "delta_heads": "num_heads",
        "delta_head_dim": "head_dim",
        "delta_rows": "num_heads x head_dim",
        "kernel": "short_conv_kernel_size",
        "experts": "num_experts",
        "expert_columns": "routed_expert_hidden_size",
        "latent": "routed_expert_hidden_size",
        "shared_rows": "num_shared_experts x moe_intermediate_size",
    },
    keys=_KEYS,
    fusions=(c.GATE_UP, *STACKS),
    spellings=(c.NESTED[1],),
    carried={r"(vision_tower|mm_projector)\..*": "vision"},
    scale_pairs=(
        ScalePair(
            "attn.norm",
            (
                *("attn.q", "attn.q_a", "attn.kv_a", "attn.gate"),
                *(f"delta.{part}" for part in ("q", "k", "v", "f_a", "b", "g", "g_a")),
            ),
        ),
        ScalePair("attn.q_a_norm", ("attn.q_b",)),
        ScalePair("attn.kv_a_norm", ("attn.kv_b",)),
        ScalePair(
            "mlp.norm",
            ("mlp.gate", "mlp.up", "mlp.router", "mlp.latent_in", "mlp.shared.gate", "mlp.shared.up"),
        ),
    ),
    note="experts of its files are MXFP4; the vision tower is copied as it is",
)

# Of Kimi-Linear's own: decay of one number for each head, four dimensions; dense blocks as transformers saves
# them.
_DECAY = ParameterTemplate(
    "delta.A_log", ATTENTION + "A_log", ("one", "one", "delta_heads", "one"), "other", suffix=""
)
KIMI_LINEAR = replace(
    KIMI_K3,
    name="Kimi-Linear",
    tower=None,
    model_types=("kimi_linear",),
    classes=("KimiLinearForCausalLM",),
    slots=tuple(
        _DECAY if slot.role == "delta.A_log" else slot
        for slot in KIMI_K3.slots
        if "residual" not in slot.role and "latent_" not in slot.role and slot.role != "attn.gate"
    ),
    keys={"max_position_embeddings": "model_max_length", **_KEYS},
    defaults={"num_expert_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 1},
    spellings=({".mlp.": ".block_sparse_moe."},),
    carried={},
    note="",
)

FAMILIES = (KIMI_LINEAR, KIMI_K3)
