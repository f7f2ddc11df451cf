"""Declares Gemma 3n and Gemma 4: two sizes of heads, layers without keys of their own, inputs for each layer.

Sources: transformers' `modeling_gemma3n` and `modeling_gemma4`. The table of inputs for each layer, the small
mixing weights outside the blocks and the vision and audio towers are never quantized.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families import vision
from qconvert.models.families.gemma import AFTER_ATTN, AFTER_MLP, BEFORE_MLP, GEMMA3
from qconvert.models.parameters import Dimensions, ParameterTemplate, ScalePair

ATTENTION = c.LAYER + "self_attn."
FULL, SLIDING = "full_attention", "sliding_attention"
PER_LAYER = (
    c.linear("per_layer.gate", c.LAYER + "per_layer_input_gate", "per_layer", "hidden"),
    c.linear("per_layer.out", c.LAYER + "per_layer_projection", "hidden", "per_layer"),
    c.norm("per_layer.norm", c.LAYER + "post_per_layer_input_norm", only_if="per_layer"),
)
# One table holds the inputs of all layers beside each other.
PER_LAYER_TABLES = (
    ParameterTemplate(
        "per_layer.table", "model.embed_tokens_per_layer", ("per_layer_vocab", "all_layers"), "other"
    ),
    ParameterTemplate(
        "per_layer.model", "model.per_layer_model_projection", ("all_layers", "hidden"), "other"
    ),
    c.norm("per_layer.model_norm", "model.per_layer_projection_norm", "per_layer"),
)
# Files hold keys and values that layers which take those of another layer never read.
UNREAD = {r".*\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight": "keys and values that are not read"}
TOWERS = {
    r"(model\.)?(vision_tower|embed_vision|vision_embedder)\..*": "vision",
    r"(model\.)?(audio_tower|embed_audio)\..*": "audio",
}


def kind_of(config: Json, layer: int, every: int) -> str:
    """Returns a layer's kind of attention; without a list, every `every`-th and the last see everything."""
    stated = c.entry(config, "layer_types", layer)
    if stated not in (None, FULL, SLIDING):
        raise CorruptCheckpoint(f"config.json: layer_types has {stated!r} for layer {layer}")
    last = layer + 1 == positive_int(config, "num_hidden_layers")
    return FULL if last and every == 6 else stated or (SLIDING if (layer + 1) % every else FULL)


def shares_keys(config: Json, layer: int) -> bool:
    """Returns whether a layer takes the keys and values of an earlier one."""
    shared = count(config, "num_kv_shared_layers")
    return shared > 0 and layer >= positive_int(config, "num_hidden_layers") - shared


def _common(config: Json, layer: int, attention: dict[str, int]) -> dict[str, int]:
    own, per_layer = not shares_keys(config, layer), count(config, "hidden_size_per_layer_input")
    return {
        **attention,
        "kv_rows": attention["kv_rows"] if own else 0,
        "v_rows": attention["kv_rows"] if own else 0,
        "own_keys": own,
        "per_layer": per_layer,
        "all_layers": per_layer * positive_int(config, "num_hidden_layers"),
        "per_layer_vocab": count(config, "vocab_size_per_layer_input") if per_layer else 0,
    }


def full_heads(config: Json, layer: int) -> dict[str, int]:
    """Returns the size and number of heads of a layer with full attention, where its config states them.

    transformers 5.23 saves them for each such layer under `per_layer_config`, earlier ones once.
    """
    by_layer = config.get("per_layer_config")
    own = by_layer.get(str(layer)) if isinstance(by_layer, dict) else None
    if isinstance(own, dict):
        stated = {key: optional_int(own, key) for key in ("head_dim", "num_key_value_heads")}
        return {key: size for key, size in stated.items() if size is not None}
    heads = {"head_dim": optional_int(config, "global_head_dim") or 512}
    kv = optional_int(config, "num_global_key_value_heads")
    return {**heads, "num_key_value_heads": kv} if kv else heads


def gemma4_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Gemma 4's dimensions: full attention has wider heads, whose keys may be its values."""
    full = kind_of(config, layer, 6) == FULL
    same = full and flag(config, "attention_k_eq_v")
    heads = full_heads(config, layer) if full else {}
    if not same:
        heads.pop("num_key_value_heads", None)
    dims = _common(config, layer, c.attention_dimensions({**config, **heads}))
    sparse, wide = (
        flag(config, "enable_moe_block"),
        flag(config, "use_double_wide_mlp") and not dims["own_keys"],
    )
    return {
        **dims,
        "v_rows": 0 if same else dims["v_rows"],
        "intermediate": positive_int(config, "intermediate_size") * (2 if wide else 1),
        "experts": positive_int(config, "num_experts") if sparse else 0,
        "expert_rows": positive_int(config, "moe_intermediate_size") if sparse else 0,
    }


def heads(q: str = "q_rows") -> tuple[ParameterTemplate, ...]:
    """Returns attention whose values may be its keys, and whose keys may be an earlier layer's."""
    return (
        c.linear("attn.q", ATTENTION + "q_proj", q, "hidden", bias="attention_bias"),
        c.linear("attn.k", ATTENTION + "k_proj", "kv_rows", "hidden", bias="attention_bias"),
        c.linear("attn.v", ATTENTION + "v_proj", "v_rows", "hidden", bias="attention_bias"),
        c.linear("attn.o", ATTENTION + "o_proj", "hidden", q, bias="attention_bias"),
        c.Q_NORM,
        replace(c.K_NORM, only_if="own_keys"),
        AFTER_ATTN,
    )


def sparse_norm(role: str, name: str) -> ParameterTemplate:
    """Returns a norm around the experts that stand beside the dense block."""
    return c.norm(role, c.LAYER + name, only_if="experts")


EXPERTS = (
    sparse_norm("mlp.post_norm_1", "post_feedforward_layernorm_1"),
    sparse_norm("mlp.post_norm_2", "post_feedforward_layernorm_2"),
    sparse_norm("mlp.norm_2", "pre_feedforward_layernorm_2"),
    c.router(c.LAYER + "router.proj"),
    ParameterTemplate(
        "mlp.router_scale", c.LAYER + "router", ("hidden",), "other", False, "experts", ".scale"
    ),
    ParameterTemplate(
        "mlp.expert_scale", c.LAYER + "router", ("experts",), "other", suffix=".per_expert_scale"
    ),
    *c.experts(c.LAYER + "experts.{expert}."),
)
GEMMA4 = replace(
    GEMMA3,
    name="Gemma 4",
    model_types=("gemma4", "gemma4_text"),
    classes=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
    slots=(
        c.EMBED,
        c.ATTN_NORM,
        *heads(),
        BEFORE_MLP,
        *c.gated_mlp(),
        AFTER_MLP,
        *EXPERTS,
        *PER_LAYER,
        ParameterTemplate("layer_scale", c.LAYER + "layer_scalar", ("one",), "other", suffix=""),
        *PER_LAYER_TABLES,
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    dimensions=gemma4_dimensions,
    named_by={
        **c.NAMED_BY,
        "per_layer": "hidden_size_per_layer_input",
        "per_layer_vocab": "vocab_size_per_layer_input",
        "all_layers": "num_hidden_layers x hidden_size_per_layer_input",
        "v_rows": "num_key_value_heads x head_dim",
    },
    defaults={
        **GEMMA3.defaults,
        "num_hidden_layers": 30,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
    },
    fusions=(
        c.QKV,
        c.GATE_UP,
        *(replace(stack, module=stack.module.replace("mlp.", ""), native=True) for stack in c.EXPERT_STACKS),
    ),
    spellings=c.NESTED[:1],
    carried={**TOWERS, **UNREAD},
    tower=vision.GEMMA4_TOWER,
    norm_offset=0.0,
    scale_pairs=(  # values have a norm of their own, and the router reads what comes before the norms
        c.ATTN_INPUT,
        ScalePair("mlp.norm", ("mlp.gate", "mlp.up")),
        ScalePair("mlp.norm_2", ("mlp.experts.{expert}.gate", "mlp.experts.{expert}.up")),
        *c.GATED,
    ),
    note="vision and audio towers, and the inputs of each layer, are copied as they are",
)


def gemma3n_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Gemma 3n's dimensions: four residual streams, and a list of inner widths."""
    width = config.get("intermediate_size")
    if isinstance(width, list):
        width = width[layer] if layer < len(width) else None
    streams = positive_int(config, "altup_num_inputs")
    return {
        **_common(config, layer, c.attention_dimensions(config)),
        "intermediate": positive_int({"intermediate_size": width}, "intermediate_size"),
        "streams": streams,
        "pairs": streams * streams,
        "laurel": positive_int(config, "laurel_rank"),
    }


def streams(role: str, name: str, rows: str, columns: str) -> ParameterTemplate:
    """Returns a small matrix of the residual streams' mixing."""
    return ParameterTemplate(f"streams.{role}", f"{c.LAYER}altup.{name}", (rows, columns), "router")


def stream_projections(role: str, name: str) -> tuple[ParameterTemplate, ...]:
    """Returns the matrices that make the further streams, or take them back, outside the layers."""
    return tuple(
        ParameterTemplate(f"streams.{role}_{i}", f"model.{name}.{i}", ("hidden", "hidden"), "other")
        for i in range(3)
    )


GEMMA3N = replace(
    GEMMA4,
    name="Gemma 3n",
    model_types=("gemma3n", "gemma3n_text"),
    classes=("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
    slots=(
        c.EMBED,
        c.ATTN_NORM,
        *heads(),
        BEFORE_MLP,
        *c.gated_mlp(),
        AFTER_MLP,
        ParameterTemplate(
            "streams.scale", c.LAYER + "altup.correct_output_scale", ("hidden",), "other", suffix=""
        ),
        streams("correction", "correction_coefs", "streams", "streams"),
        streams("prediction", "prediction_coefs", "pairs", "streams"),
        streams("router", "modality_router", "streams", "hidden"),
        c.norm("streams.norm", c.LAYER + "altup.router_norm"),
        c.linear("laurel.left", c.LAYER + "laurel.linear_left", "laurel", "hidden"),
        c.linear("laurel.right", c.LAYER + "laurel.linear_right", "hidden", "laurel"),
        c.norm("laurel.norm", c.LAYER + "laurel.post_laurel_norm"),
        *PER_LAYER,
        *PER_LAYER_TABLES,
        *stream_projections("in", "altup_projections"),
        *stream_projections("out", "altup_unembed_projections"),
        c.FINAL_NORM,
        c.LM_HEAD,
    ),
    dimensions=gemma3n_dimensions,
    defaults={
        **GEMMA4.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "vocab_size": 262_400,
        "intermediate_size": 16384,
    },
    fusions=(c.QKV, c.GATE_UP),
    tower=None,
    scale_pairs=(ScalePair("mlp.norm", ("mlp.gate", "mlp.up")),),  # another linear reads the first norm, too
)

FAMILIES = (GEMMA3N, GEMMA4)
