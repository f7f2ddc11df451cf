"""Declares models whose attention an indexer makes sparse: DeepSeek-V3.2 and V4, GLM-5.

Sources: transformers' `modeling_deepseek_v32`, `modeling_deepseek_v4` and `modeling_glm_moe_dsa`, with the
names of V4's published files from `conversion_mapping`. The weights of the indexer's heads, what compresses
keys and the mixing of hyper-connections are never quantized, as in the published files.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, divide, optional_int, positive_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families import deepseek as d
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate, ScalePair

INDEXER = d.MLA + "indexer."
INDEXED_ATTENTION = (
    *d.LATENT_ATTENTION,
    c.linear("attn.indexer.q", INDEXER + "wq_b", "indexer_q_rows", "q_rank"),
    c.linear("attn.indexer.k", INDEXER + "wk", "indexer_dim", "hidden"),
    c.norm("attn.indexer.k_norm", INDEXER + "k_norm", "indexer_dim", bias=True),
    ParameterTemplate(
        "attn.indexer.weights", INDEXER + "weights_proj", ("indexer_heads", "hidden"), "router"
    ),
)
INDEXER_NAMES = {
    "indexer_dim": "index_head_dim",
    "indexer_heads": "index_n_heads",
    "indexer_q_rows": "index_n_heads x index_head_dim",
}


def indexer_dimensions(config: Json) -> dict[str, int]:
    """Returns the dimensions of an indexer."""
    heads, width = positive_int(config, "index_n_heads"), positive_int(config, "index_head_dim")
    return {"indexer_dim": width, "indexer_heads": heads, "indexer_q_rows": heads * width}


def indexed_dimensions(config: Json, layer: int) -> Dimensions:
    """Adds the dimensions of the indexer, in the layers that have one, to those of latent attention."""
    indexer = indexer_dimensions(config)
    present = indexer if has_indexer(config, layer) else dict.fromkeys(indexer, 0)
    return {**d.latent_dimensions(config, layer), **present}


def has_indexer(config: Json, layer: int) -> bool:
    """Applies GLM-5's rule: some layers choose positions, the others use those of the last layer that did."""
    stated = c.entry(config, "indexer_types", layer) or c.entry(config, "index_topk_pattern", layer)
    if stated is not None:
        return stated in ("full", "F")
    step, offset = optional_int(config, "index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    if not isinstance(offset, int):
        raise CorruptCheckpoint(f"config.json: index_skip_topk_offset is {offset!r}, not a whole number")
    return max(layer - offset + 1, 0) % step == 0


DEEPSEEK_V32 = replace(
    d.DEEPSEEK_V3,
    name="DeepSeek-V3.2",
    model_types=("deepseek_v32",),
    classes=("DeepseekV32ForCausalLM",),
    slots=c.decoder(
        INDEXED_ATTENTION,
        (*c.gated_mlp(), c.ROUTER, d.ROUTER_CORRECTION, *c.experts(), *d.SHARED_EXPERTS),
    ),
    dimensions=indexed_dimensions,
    named_by={**d.DEEPSEEK_V3.named_by, **INDEXER_NAMES},
    scale_pairs=(
        ScalePair("attn.norm", ("attn.q_a", "attn.kv_a", "attn.indexer.k", "attn.indexer.weights")),
        ScalePair("attn.q_a_norm", ("attn.q_b", "attn.indexer.q")),
        *d.DEEPSEEK_V3.scale_pairs[2:],
    ),
)

GLM_MOE_DSA = replace(
    DEEPSEEK_V32, name="GLM-5, 5.1, 5.2", model_types=("glm_moe_dsa",), classes=("GlmMoeDsaForCausalLM",)
)

# DeepSeek-V4: one head of keys and values, keys compressed over positions, four residual streams.
LAYER = "layers.{layer}."
ATTENTION = LAYER + "attn."
FFN = LAYER + "ffn."


def compressor(role: str, module: str, size: str, only_if: str) -> tuple[ParameterTemplate, ...]:
    """Returns what makes one key of several positions: two linears, a table of positions and a norm."""
    return (
        ParameterTemplate(
            f"{role}.positions", f"{module}ape", (f"{size}_rate", f"{size}_rows"), "other", suffix=""
        ),
        ParameterTemplate(f"{role}.kv", f"{module}wkv", (f"{size}_rows", "hidden"), "router"),
        ParameterTemplate(f"{role}.gate", f"{module}wgate", (f"{size}_rows", "hidden"), "router"),
        c.norm(f"{role}.norm", f"{module}norm", f"{only_if}"),
    )


def streams(
    role: str, module: str, rows: str = "hc_rows", scales: str = "three"
) -> tuple[ParameterTemplate, ...]:
    """Returns the weights of a hyper-connection, which mixes the residual streams around a block."""
    shapes = {"fn": (rows, "hc_columns"), "base": (rows,), "scale": (scales,)}
    return tuple(
        ParameterTemplate(f"{role}.{name}", f"{module}_{name}", shape, "other", suffix="")
        for name, shape in shapes.items()
    )


V4_ATTENTION = (
    ParameterTemplate("attn.sinks", ATTENTION + "attn_sink", ("heads",), "other", suffix=""),
    c.linear("attn.q_a", ATTENTION + "wq_a", "q_rank", "hidden"),
    c.norm("attn.q_a_norm", ATTENTION + "q_norm", "q_rank"),
    c.linear("attn.q_b", ATTENTION + "wq_b", "latent_q_rows", "q_rank"),
    c.linear("attn.kv", ATTENTION + "wkv", "head_dim", "hidden"),
    c.norm("attn.kv_norm", ATTENTION + "kv_norm", "head_dim"),
    c.linear("attn.o_a", ATTENTION + "wo_a", "o_a_rows", "o_a_columns"),
    c.linear("attn.o_b", ATTENTION + "wo_b", "hidden", "o_a_rows"),
    *compressor("attn.compressor", ATTENTION + "compressor.", "compressed", "compressed_dim"),
    *compressor("attn.indexer.compressor", ATTENTION + "indexer.compressor.", "indexed", "indexer_dim"),
    c.linear("attn.indexer.q", ATTENTION + "indexer.wq_b", "indexer_q_rows", "q_rank"),
    ParameterTemplate(
        "attn.indexer.weights", ATTENTION + "indexer.weights_proj", ("indexer_heads", "hidden"), "router"
    ),
)
V4_FFN = (
    c.router(FFN + "gate"),
    ParameterTemplate("mlp.router_correction", FFN + "gate", ("scored_experts",), "other", suffix=".bias"),
    ParameterTemplate("mlp.router_table", FFN + "gate", ("hashed_vocab", "used"), "other", suffix=".tid2eid"),
    *c.experts(FFN + "experts.{expert}.", ("w1", "w3", "w2")),
    *c.gated_mlp(FFN + "shared_experts.", "mlp.shared.", "shared_rows", ("w1", "w3", "w2")),
)
_RATIOS = {
    "sliding_attention": 0,
    "full_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def compression(config: Json, layer: int) -> int:
    """Returns how many positions share a key: 0 (none do), 4 (chosen by an indexer) or 128."""
    kind = c.entry(config, "layer_types", layer)
    if kind is not None:
        if kind not in _RATIOS:
            raise CorruptCheckpoint(
                f"config.json: layer_types has {kind!r}, one of {', '.join(_RATIOS)} expected"
            )
        return _RATIOS[kind]
    ratios = whole_numbers(config, "compress_ratios")
    if not ratios:
        return 4 if layer >= 2 and layer % 2 else 128
    if len(ratios) <= layer or ratios[layer] not in _RATIOS.values():
        raise CorruptCheckpoint(f"config.json: compress_ratios has no 0, 4 or 128 for layer {layer}")
    return ratios[layer]


def _is_hashed(config: Json, layer: int) -> bool:
    """Returns whether a table, not a router, chooses the experts: stated by layer, or of the first ones."""
    kind = c.entry(config, "mlp_layer_types", layer)
    return layer < count(config, "num_hash_layers") if kind is None else kind == "hash_moe"


def v4_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns DeepSeek-V4's dimensions; overlapping windows of 4 positions make two halves of rows."""
    ratio, hashed = compression(config, layer), _is_hashed(config, layer)
    attention = c.attention_dimensions(config)
    heads, width, experts = (
        attention["q_rows"],
        attention["head_dim"],
        positive_int(config, "n_routed_experts"),
    )
    rows, mult = positive_int(config, "moe_intermediate_size"), positive_int(config, "hc_mult")
    groups = positive_int(config, "o_groups")
    indexer = indexer_dimensions(config) | {
        "indexed_rate": 4,
        "indexed_rows": 2 * positive_int(config, "index_head_dim"),
    }
    return {
        **attention,
        "heads": positive_int(config, "num_attention_heads"),
        "q_rank": positive_int(config, "q_lora_rank"),
        "latent_q_rows": heads,
        "o_a_rows": groups * positive_int(config, "o_lora_rank"),
        "o_a_columns": divide(heads, groups, "num_attention_heads x head_dim", "o_groups"),
        "compressed_rate": ratio,
        "compressed_rows": {0: 0, 4: 2 * width, 128: width}[ratio],
        "compressed_dim": width if ratio else 0,
        **(indexer if ratio == 4 else dict.fromkeys(indexer, 0)),
        "experts": experts,
        "scored_experts": 0 if hashed else experts,
        "hashed_vocab": attention["vocab"] if hashed else 0,
        "used": positive_int(config, "num_experts_per_tok"),
        "expert_rows": rows,
        "shared_rows": count(config, "n_shared_experts") * rows,
        "hc_rows": mult * (mult + 2),
        "hc_columns": mult * attention["hidden"],
        "hc_mult": mult,
        "three": 3,
    }


DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    model_types=("deepseek_v4", "deepseek_ref"),
    classes=("DeepseekV4ForCausalLM",),
    slots=(
        c.embedding("embed"),
        *V4_ATTENTION,
        *V4_FFN,
        c.norm("attn.norm", LAYER + "attn_norm"),
        c.norm("mlp.norm", LAYER + "ffn_norm"),
        *streams("attn.streams", LAYER + "hc_attn"),
        *streams("mlp.streams", LAYER + "hc_ffn"),
        c.norm("final_norm", "norm"),
        *streams("streams", "hc_head", "hc_mult", "one"),
        c.head("head"),
    ),
    dimensions=v4_dimensions,
    named_by={
        **c.NAMED_BY,
        **INDEXER_NAMES,
        "experts": "n_routed_experts",
        "scored_experts": "n_routed_experts",
        "hashed_vocab": "vocab_size",
        "used": "num_experts_per_tok",
        "shared_rows": "n_shared_experts x moe_intermediate_size",
        "q_rank": "q_lora_rank",
        "latent_q_rows": "num_attention_heads x head_dim",
        "o_a_rows": "o_groups x o_lora_rank",
        "o_a_columns": "num_attention_heads x head_dim / o_groups",
        "hc_columns": "hc_mult x hidden_size",
    },
    defaults={"num_hash_layers": 3, "n_shared_experts": 1, "hc_mult": 4, "o_groups": 8, "o_lora_rank": 1024},
    fusions=tuple(
        replace(stack, module=stack.module.replace("model.", "").replace("mlp.", "ffn."))
        for stack in c.EXPERT_STACKS
    ),
    carried={r"mtp\..*": "next-token prediction"},
    note="experts of its files are FP4 with E8M0 scales; next-token prediction is copied as it is",
)

FAMILIES = (DEEPSEEK_V32, DEEPSEEK_V4, GLM_MOE_DSA)
