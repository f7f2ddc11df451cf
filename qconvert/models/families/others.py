"""Declares families without relatives: OpenELM, RWKV, Grok-1, Yuan2.

Sources: transformers' `modeling_rwkv`; the modelling files published with OpenELM, RWKV-5, Yuan2 and the
ports of Grok-1 to Hugging Face (two naming variants: the port's own, and that of the released JAX arrays).
"""

from __future__ import annotations

from dataclasses import replace
from math import floor

from qconvert.core.config_json import divide, flag, optional_int, per_layer, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.llama import MISTRAL
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate

OPENELM_LAYER = "transformer.layers.{layer}."


def openelm_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns one layer's dimensions: its number of heads and inner width, rounded as the class rounds."""
    hidden, head_dim = positive_int(config, "model_dim"), positive_int(config, "head_dim")
    q_heads = int(per_layer(config, "num_query_heads", layer))
    kv_heads = int(per_layer(config, "num_kv_heads", layer))
    wanted = per_layer(config, "ffn_multipliers", layer) * hidden
    step = positive_int(config, "ffn_dim_divisor")
    inner = max(step, floor(wanted + step / 2) // step * step)
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "q_rows": q_heads * head_dim,
        "kv_rows": kv_heads * head_dim,
        "head_dim": head_dim,
        "intermediate": inner + step if inner < 0.9 * wanted else inner,
        "qk_norm": flag(config, "normalize_qk_projections"),
    }


OPENELM = Family(
    name="OpenELM",
    model_types=("openelm",),
    classes=("OpenELMForCausalLM",),
    slots=(
        c.embedding("transformer.token_embeddings"),
        c.linear("attn.q", OPENELM_LAYER + "attn.q_proj", "q_rows", "hidden"),
        c.linear("attn.k", OPENELM_LAYER + "attn.k_proj", "kv_rows", "hidden"),
        c.linear("attn.v", OPENELM_LAYER + "attn.v_proj", "kv_rows", "hidden"),
        c.norm("attn.q_norm", OPENELM_LAYER + "attn.q_norm", "head_dim", only_if="qk_norm"),
        c.norm("attn.k_norm", OPENELM_LAYER + "attn.k_norm", "head_dim", only_if="qk_norm"),
        c.linear("attn.o", OPENELM_LAYER + "attn.out_proj", "hidden", "q_rows"),
        *c.gated_mlp(OPENELM_LAYER + "ffn.", names=("gate_proj", "up_proj", "proj_2")),
        c.norm("mlp.norm", OPENELM_LAYER + "ffn_norm"),
        c.norm("attn.norm", OPENELM_LAYER + "attn_norm"),
        c.norm("final_norm", "transformer.norm"),
        c.LM_HEAD,
    ),
    dimensions=openelm_dimensions,
    named_by={
        "vocab": "vocab_size",
        "hidden": "model_dim",
        "q_rows": "num_query_heads x head_dim",
        "kv_rows": "num_kv_heads x head_dim",
        "intermediate": "ffn_multipliers x model_dim",
    },
    fusions=(
        replace(c.QKV, module=OPENELM_LAYER + "attn.qkv_proj", native=True),
        replace(c.GATE_UP, module=OPENELM_LAYER + "ffn.proj_1", native=True),
    ),
    layers=("num_transformer_layers",),
    scale_pairs=c.SCALE_PAIRS,
    tied_by="share_input_output_layers",
)

BLOCK = "rwkv.blocks.{layer}."
TIME, CHANNEL = BLOCK + "attention.", BLOCK + "feed_forward."


def mix(role: str, module: str) -> ParameterTemplate:
    """Returns the template of a token-shift vector (the share of the previous token in a block's input)."""
    return ParameterTemplate(role, module, ("one", "one", "hidden"), "other", suffix="")


def rwkv_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns RWKV's dimensions; only the first block begins with a norm."""
    hidden = positive_int(config, "hidden_size")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "rows": optional_int(config, "attention_hidden_size") or hidden,
        "intermediate": optional_int(config, "intermediate_size") or 4 * hidden,
        "one": 1,
        "first": layer == 0,
    }


RWKV = Family(
    name="RWKV-4",
    model_types=("rwkv",),
    classes=("RwkvForCausalLM",),
    slots=(
        c.embedding("rwkv.embeddings"),
        c.norm("first_norm", BLOCK + "pre_ln", bias=True, only_if="first"),
        c.norm("attn.norm", BLOCK + "ln1", bias=True),
        c.norm("mlp.norm", BLOCK + "ln2", bias=True),
        ParameterTemplate("attn.decay", TIME + "time_decay", ("rows",), "other", suffix=""),
        ParameterTemplate("attn.first", TIME + "time_first", ("rows",), "other", suffix=""),
        mix("attn.mix_k", TIME + "time_mix_key"),
        mix("attn.mix_v", TIME + "time_mix_value"),
        mix("attn.mix_r", TIME + "time_mix_receptance"),
        c.linear("attn.k", TIME + "key", "rows", "hidden"),
        c.linear("attn.v", TIME + "value", "rows", "hidden"),
        c.linear("attn.r", TIME + "receptance", "rows", "hidden"),
        c.linear("attn.o", TIME + "output", "hidden", "rows"),
        mix("mlp.mix_k", CHANNEL + "time_mix_key"),
        mix("mlp.mix_r", CHANNEL + "time_mix_receptance"),
        c.linear("mlp.k", CHANNEL + "key", "intermediate", "hidden"),
        c.linear("mlp.r", CHANNEL + "receptance", "hidden", "hidden"),
        c.linear("mlp.v", CHANNEL + "value", "hidden", "intermediate"),
        c.norm("final_norm", "rwkv.ln_out", bias=True),
        c.head("head"),
    ),
    dimensions=rwkv_dimensions,
    named_by={**c.NAMED_BY, "rows": "attention_hidden_size"},
)


def rwkv5_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns RWKV-5's dimensions, with heads, each with one decay per element."""
    rwkv = rwkv_dimensions(config, layer)
    size = optional_int(config, "head_size") or 64
    inner = optional_int(config, "intermediate_size") or 7 * rwkv["hidden"] // 2 // 32 * 32
    heads = divide(rwkv["rows"], size, "attention_hidden_size", "head_size")
    return {**rwkv, "heads": heads, "head_size": size, "intermediate": inner}


def _fifth(slot: ParameterTemplate) -> tuple[ParameterTemplate, ...]:
    """Returns version 5's templates for a template of version 4."""
    if slot.role in ("attn.decay", "attn.first"):
        name = "time_decay" if slot.role == "attn.decay" else "time_faaaa"
        return (ParameterTemplate(slot.role, TIME + name, ("heads", "head_size"), "other", suffix=""),)
    gate = (c.linear("attn.g", TIME + "gate", "rows", "hidden"),)
    norm = (c.norm("attn.out_norm", TIME + "ln_x", "rows", bias=True),)
    before = {"attn.mix_k": (mix("attn.mix_g", TIME + "time_mix_gate"),), "attn.o": gate, "mlp.mix_k": norm}
    return (*before.get(slot.role, ()), slot)


RWKV5 = replace(
    RWKV,
    name="RWKV-5",
    model_types=("rwkv5",),
    classes=("Rwkv5ForCausalLM",),
    slots=tuple(made for slot in RWKV.slots for made in _fifth(slot)),
    dimensions=rwkv5_dimensions,
    named_by={**RWKV.named_by, "heads": "attention_hidden_size / head_size"},
    note="version 5.2",
)


# This model calls the weight of a norm its scale.
GROK_NORMS = {
    "attn.norm": "pre_attn_norm",
    "attn.post_norm": "post_attn_norm",
    "mlp.norm": "pre_moe_norm",
    "mlp.post_norm": "post_moe_norm",
}
GROK = replace(
    MISTRAL,
    name="Grok-1",
    model_types=("grok-1",),
    classes=("Grok1ModelForCausalLM", "Grok1ForCausalLM"),
    slots=(
        c.EMBED,
        *c.attention(c.LAYER + "attn."),
        c.router(c.LAYER + "moe_block.gate"),
        *c.experts(c.LAYER + "moe_block.experts.{expert}.", ("linear", "linear_v", "linear_1")),
        *(replace(c.norm(role, c.LAYER + name), suffix=".scale") for role, name in GROK_NORMS.items()),
        replace(c.FINAL_NORM, suffix=".scale"),
        c.LM_HEAD,
    ),
    dimensions=c.sparse_dimensions(),
    keys={"moe_intermediate_size": "intermediate_size"},
    fusions=(),
    spellings=(
        {".scale": ".weight"},
        {
            "model.layers.": "transformer.decoder_layer.",
            "model.embed_tokens": "transformer.in_out_embed",
            "model.norm.scale": "transformer.rms_norm.weight",
            "attn.q_proj": "multi_head_attention.query",
            "attn.k_proj": "multi_head_attention.key",
            "attn.v_proj": "multi_head_attention.value",
            "attn.o_proj": "multi_head_attention.linear",
            "moe_block.gate": "router",
            "moe_block.experts.": "moe.",
            "pre_attn_norm.scale": "rms_norm.weight",
            "post_attn_norm.scale": "rms_norm_1.weight",
            "pre_moe_norm.scale": "rms_norm_2.weight",
            "post_moe_norm.scale": "rms_norm_3.weight",
        },
    ),
)


def yuan_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns a dense decoder's dimensions, and half the hidden width between the two convolutions."""
    dense = c.dense_dimensions(config, layer)
    return {**dense, "half": dense["hidden"] // 2, "two": 2}


FILTER = c.LAYER + "self_attn.lf_gate."
YUAN2 = replace(
    MISTRAL,
    name="Yuan2",
    model_types=("yuan",),
    classes=("YuanForCausalLM",),
    slots=(
        c.EMBED,
        *c.attention(),
        ParameterTemplate(
            "attn.filter.conv1", FILTER + "conv1", ("half", "hidden", "two", "one"), "other", True
        ),
        ParameterTemplate(
            "attn.filter.conv2", FILTER + "conv2", ("hidden", "half", "two", "one"), "other", True
        ),
        c.norm("attn.filter.norm", FILTER + "output_layernorm"),
        # The class activates up_proj and multiplies by gate_proj.
        *c.gated_mlp(names=("up_proj", "gate_proj", "down_proj")),
        c.ATTN_NORM,
        c.MLP_NORM,
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    dimensions=yuan_dimensions,
    named_by={**c.NAMED_BY, "half": "hidden_size / 2"},
    fusions=(c.QKV, replace(c.GATE_UP, members=("mlp.up", "mlp.gate"))),
    scale_pairs=(c.MLP_INPUT, c.VALUES, *c.GATED),  # the filter adds its input to what it makes
)

FAMILIES = (OPENELM, RWKV, RWKV5, GROK, YUAN2)
