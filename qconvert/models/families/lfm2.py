"""Declares Liquid's LFM2, dense and with experts: layers of short convolutions with attention between them.

Sources: transformers' `modeling_lfm2` and `modeling_lfm2_moe`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, flag, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions, ParameterTemplate

ATTENTION, CONV, BLOCK = (c.LAYER + name for name in ("self_attn.", "conv.", "feed_forward."))


def convolves(config: Json, layer: int) -> bool:
    """Returns whether a layer has a short convolution in place of attention."""
    word = c.entry(config, "layer_types", layer)
    if word is not None:
        return word == "conv"
    full = config.get("full_attn_idxs")
    return full is not None and layer not in whole_numbers(config, "full_attn_idxs")


def inner_width(config: Json) -> int:
    """Returns the inner width of LFM2's blocks: two thirds of what is stated, rounded up, by default."""
    key = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    stated = positive_int(config, key)
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return stated
    share = config.get("block_ffn_dim_multiplier", 1.0)
    if share is None:
        return int(2 * stated / 3)
    factor, step = (
        positive_number(share),
        positive_int({"block_multiple_of": 256, **config}, "block_multiple_of"),
    )
    if factor is None or factor > 1024:
        raise CorruptCheckpoint(f"config.json: block_ffn_dim_multiplier is {share!r}")
    return -(-int(factor * int(2 * stated / 3)) // step) * step


def _attention_dimensions(config: Json, layer: int) -> dict[str, int]:
    dims, conv = c.attention_dimensions(config), convolves(config, layer)
    return {
        **dims,
        **({"q_rows": 0, "kv_rows": 0} if conv else {}),
        "attention": not conv,
        "conv_rows": dims["hidden"] if conv else 0,
        "conv_in_rows": 3 * dims["hidden"] if conv else 0,
        "kernel": positive_int(config, "conv_L_cache") if conv else 0,
    }


def lfm2_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns LFM2's dimensions."""
    return {**_attention_dimensions(config, layer), "intermediate": inner_width(config)}


def lfm2_moe_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of LFM2 with experts in all layers but the first ones."""
    sparse = layer >= count(config, "num_dense_layers")
    return {
        **_attention_dimensions(config, layer),
        "intermediate": 0 if sparse else positive_int(config, "intermediate_size"),
        "experts": positive_int(config, "num_experts") if sparse else 0,
        "expert_rows": positive_int(config, "moe_intermediate_size") if sparse else 0,
        "router_biased": sparse and flag(config, "use_expert_bias", default=True),
    }


def _slots(block: tuple[ParameterTemplate, ...]) -> tuple[ParameterTemplate, ...]:
    return (
        c.EMBED,
        *c.attention(ATTENTION, ("q_proj", "k_proj", "v_proj", "out_proj")),
        replace(c.Q_NORM, module=ATTENTION + "q_layernorm", only_if="attention"),
        replace(c.K_NORM, module=ATTENTION + "k_layernorm", only_if="attention"),
        ParameterTemplate("conv.kernel", CONV + "conv", ("conv_rows", "one", "kernel"), "other", "conv_bias"),
        c.linear("conv.in", CONV + "in_proj", "conv_in_rows", "hidden", bias="conv_bias"),
        c.linear("conv.out", CONV + "out_proj", "conv_rows", "hidden", bias="conv_bias"),
        *block,
        replace(c.ATTN_NORM, module=c.LAYER + "operator_norm"),
        replace(c.MLP_NORM, module=c.LAYER + "ffn_norm"),
        c.norm("final_norm", "model.embedding_norm"),
        c.LM_HEAD,
    )


_NAMES = ("w1", "w3", "w2")
LFM2 = replace(
    LLAMA,
    name="LFM2",
    model_types=("lfm2",),
    classes=("Lfm2ForCausalLM", "LFM2ForCausalLM"),
    slots=_slots(c.gated_mlp(BLOCK, names=_NAMES)),
    dimensions=lfm2_dimensions,
    named_by={
        **c.NAMED_BY,
        "intermediate": "2/3 x intermediate_size",
        "conv_rows": "hidden_size",
        "conv_in_rows": "3 x hidden_size",
        "kernel": "conv_L_cache",
    },
    defaults={"tie_word_embeddings": True, "conv_L_cache": 3, "num_key_value_heads": 8},
    fusions=(c.QKV, replace(c.GATE_UP, module=BLOCK + "gate_up_proj")),
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "conv.in")),
        *c.SCALE_PAIRS[1:],
    ),
    note="",
)

LFM2_MOE = replace(
    LFM2,
    name="LFM2 MoE",
    model_types=("lfm2_moe",),
    classes=("Lfm2MoeForCausalLM",),
    slots=_slots(
        (
            *c.gated_mlp(BLOCK, names=_NAMES),
            c.router(BLOCK + "gate"),
            ParameterTemplate(
                "mlp.router_correction",
                BLOCK + "expert_bias",
                ("experts",),
                "other",
                suffix="",
                only_if="router_biased",
            ),
            *c.experts(BLOCK + "experts.{expert}.", _NAMES),
        )
    ),
    dimensions=lfm2_moe_dimensions,
    named_by={**LFM2.named_by, "intermediate": "intermediate_size"},
    defaults={**LFM2.defaults, "num_dense_layers": 2},
    fusions=(
        *LFM2.fusions,
        *(replace(stack, module=stack.module.replace("mlp.", "feed_forward.")) for stack in c.EXPERT_STACKS),
    ),
)

FAMILIES = (LFM2, LFM2_MOE)
