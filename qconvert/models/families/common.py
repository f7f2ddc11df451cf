"""Defines what families share: Llama's names for the modules of a decoder, and their dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qconvert.core.config_json import count, divided, optional_int, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.parameters import Dimensions, Fusion, ParameterTemplate, ScalePair

LAYER = "model.layers.{layer}."
QKV = Fusion("attn.qkv", LAYER + "self_attn.qkv_proj", ("attn.q", "attn.k", "attn.v"))
GATE_UP = Fusion("mlp.gate_up", LAYER + "mlp.gate_up_proj", ("mlp.gate", "mlp.up"))
# How transformers 5 holds a layer's experts in memory, and newer models store them.
EXPERT_STACKS = (
    Fusion(
        "mlp.experts.gate_up",
        LAYER + "mlp.experts.gate_up_proj",
        ("mlp.experts.{expert}.gate", "mlp.experts.{expert}.up"),
        suffix="",
    ),
    Fusion("mlp.experts.down", LAYER + "mlp.experts.down_proj", ("mlp.experts.{expert}.down",), suffix=""),
)


def norm(
    role: str, module: str, size: str = "hidden", *, bias: bool = False, only_if: str | None = None
) -> ParameterTemplate:
    """Returns the template of a norm over `size` elements."""
    return ParameterTemplate(role, module, (size,), "norm", bias, only_if)


def embedding(module: str) -> ParameterTemplate:
    """Returns the template of the embedding of tokens."""
    return ParameterTemplate("embed", module, ("vocab", "hidden"), "embedding")


def linear(
    role: str, module: str, rows: str, columns: str, *, bias: bool | str = False, transposed: bool = False
) -> ParameterTemplate:
    """Returns the template of a linear with these numbers of outputs and inputs."""
    return ParameterTemplate(role, module, (rows, columns), bias=bias, transposed=transposed)


def head(module: str) -> ParameterTemplate:
    """Returns the template of the head."""
    return ParameterTemplate("lm_head", module, ("vocab", "hidden"))


def router(module: str, *, bias: bool = False) -> ParameterTemplate:
    """Returns the template of the linear that chooses experts."""
    return ParameterTemplate("mlp.router", module, ("experts", "hidden"), "router", bias)


EMBED = embedding("model.embed_tokens")
FINAL_NORM = norm("final_norm", "model.norm")
LM_HEAD = head("lm_head")
ATTN_NORM = norm("attn.norm", LAYER + "input_layernorm")
MLP_NORM = norm("mlp.norm", LAYER + "post_attention_layernorm")
Q_NORM = norm("attn.q_norm", LAYER + "self_attn.q_norm", "head_dim")
K_NORM = norm("attn.k_norm", LAYER + "self_attn.k_norm", "head_dim")
ROUTER = router(LAYER + "mlp.gate")

# Inputs whose channels may be scaled (llm-compressor's and llm-awq's mappings, and the classes themselves).
# A norm before a block is read by only the block, unless the residual begins behind it.
_AFTER_NORM = ("apply_residual_connection_post_layernorm",)
_MLP_READERS = (
    "mlp.gate",
    "mlp.up",
    "mlp.router",
    "mlp.shared_gate",
    "mlp.shared.gate",
    "mlp.shared.up",
    "mlp.experts.{expert}.gate",
    "mlp.experts.{expert}.up",
)
ATTN_INPUT = ScalePair("attn.norm", ("attn.q", "attn.k", "attn.v"), unless=_AFTER_NORM)
MLP_INPUT = ScalePair("mlp.norm", _MLP_READERS, unless=_AFTER_NORM)
BLOCKS_INPUT = ScalePair("attn.norm", (*ATTN_INPUT.readers, *_MLP_READERS), unless=_AFTER_NORM)
# A channel of values is weighed over positions, and clamped in some models; only where no heads share it is
# it one column of the output projection.
VALUES = ScalePair("attn.v", ("attn.o",), unless=("clip_qkv",))
# What a gated block multiplies by the activated gate.
GATED = (
    ScalePair("mlp.up", ("mlp.down",)),
    ScalePair("mlp.shared.up", ("mlp.shared.down",)),
    ScalePair("mlp.experts.{expert}.up", ("mlp.experts.{expert}.down",)),
)
SCALE_PAIRS = (ATTN_INPUT, MLP_INPUT, VALUES, *GATED)

ROTARY_BUFFERS = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
    r"model\.rotary_emb\.inv_freq",
)

# Where checkpoints of models with more than text put the language model.
NESTED = (
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head": "language_model.lm_head"},
)

NAMED_BY = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "q_rows": "num_attention_heads x head_dim",
    "kv_rows": "num_key_value_heads x head_dim",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "expert_rows": "moe_intermediate_size",
    "shared_rows": "shared_expert_intermediate_size",
}


def attention(
    module: str = LAYER + "self_attn.",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    *,
    qkv_bias: bool | str = False,
    o_bias: bool | str = False,
) -> tuple[ParameterTemplate, ...]:
    """Returns separate q, k, v and output projections."""
    q, k, v, o = names
    return (
        ParameterTemplate("attn.q", module + q, ("q_rows", "hidden"), bias=qkv_bias),
        ParameterTemplate("attn.k", module + k, ("kv_rows", "hidden"), bias=qkv_bias),
        ParameterTemplate("attn.v", module + v, ("kv_rows", "hidden"), bias=qkv_bias),
        ParameterTemplate("attn.o", module + o, ("hidden", "q_rows"), bias=o_bias),
    )


BIASED_ATTENTION = attention(qkv_bias="attention_bias", o_bias="attention_bias")


def gated_mlp(
    module: str = LAYER + "mlp.",
    role: str = "mlp.",
    rows: str = "intermediate",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: bool | str = False,
) -> tuple[ParameterTemplate, ...]:
    """Returns the gate, up and down projections of a gated block with `rows` inner features."""
    gate, up, down = names
    return (
        ParameterTemplate(f"{role}gate", module + gate, (rows, "hidden"), bias=bias),
        ParameterTemplate(f"{role}up", module + up, (rows, "hidden"), bias=bias),
        ParameterTemplate(f"{role}down", module + down, ("hidden", rows), bias=bias),
    )


def experts(
    module: str = LAYER + "mlp.experts.{expert}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: bool = False,
) -> tuple[ParameterTemplate, ...]:
    """Returns one gated block for each expert of a layer."""
    return gated_mlp(module, "mlp.experts.{expert}.", "expert_rows", names, bias=bias)


def decoder(
    attention: Iterable[ParameterTemplate],
    mlp: Iterable[ParameterTemplate],
    mlp_norm: ParameterTemplate = MLP_NORM,
) -> tuple[ParameterTemplate, ...]:
    """Returns a decoder of these two blocks in every layer, with Llama's norm before each."""
    return (EMBED, ATTN_NORM, *attention, mlp_norm, *mlp, FINAL_NORM, LM_HEAD)


def attention_dimensions(config: Json) -> dict[str, int]:
    """Returns the dimensions of every layer; a missing head_dim is hidden_size / heads."""
    hidden = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads") or heads
    head_dim = optional_int(config, "head_dim") or divided(config, "hidden_size", "num_attention_heads")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "q_rows": heads * head_dim,
        "kv_rows": kv_heads * head_dim,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "one": 1,
    }


def dense_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of a dense decoder."""
    return {**attention_dimensions(config), "intermediate": positive_int(config, "intermediate_size")}


def sparse_dimensions(
    is_sparse: Callable[[Json, int], bool] = lambda config, layer: True,
) -> Callable[[Json, int], Dimensions]:
    """Returns the dimensions of a decoder with experts in the layers that `is_sparse` selects.

    A sparse layer has no dense block ("intermediate" is 0), a dense one no experts.
    """

    def dimensions(config: Json, layer: int) -> Dimensions:
        if not is_sparse(config, layer):
            return {**dense_dimensions(config, layer), "experts": 0, "expert_rows": 0, "shared_rows": 0}
        return {
            **attention_dimensions(config),
            "intermediate": 0,
            "experts": positive_int(config, "num_experts"),
            "expert_rows": positive_int(config, "moe_intermediate_size"),
            "shared_rows": count(config, "shared_expert_intermediate_size"),
        }

    return dimensions


def language_config(config: Json) -> Json | None:
    """Returns the config of the language model inside that of a model that sees, None where there is none."""
    nested = config.get("text_config", config.get("llm_config"))
    return nested if isinstance(nested, dict) else None


def entry(config: Json, key: str, layer: int) -> str | None:
    """Returns a layer's word in the list under `key` (`layer_types`); None when there is no such list."""
    words = config.get(key)
    if words is None:
        return None
    if not isinstance(words, list | str) or len(words) <= layer or not isinstance(words[layer], str):
        raise CorruptCheckpoint(f"config.json: {key} has no entry {layer}")
    return words[layer]


def every_nth_layer(config: Json, layer: int) -> bool:
    """Applies Qwen's rule: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = optional_int(config, "decoder_sparse_step") or 1
    return layer not in whole_numbers(config, "mlp_only_layers") and (layer + 1) % step == 0
