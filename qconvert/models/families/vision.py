"""Declares the vision towers that stand beside language models: what they hold, counted from config.json.

A tower is carried along as it is, by the patterns of its family; its table is for counting. Sources:
transformers' `modeling_qwen2_vl`, `modeling_qwen2_5_vl`, `modeling_qwen3_vl`, `modeling_gemma4`,
`modeling_siglip` and `modeling_kimi_k25`; Kimi-K3's counts are those of its files' headers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate

TEXT_HIDDEN = "text_hidden_size"
"""The key under which a tower's config holds the hidden size of its language model."""
# What the config of a tower holds of the model around it, where it is a model of its own: that model's
# config, and what its pictures become before the tower sees them.
WHOLE, PREPROCESSOR = "whole_model", "preprocessor"


def role(module: str) -> str:
    """Returns the role of a module of a tower."""
    return "vision." + module.replace(".{layer}", "")


def table(module: str, *shape: str) -> ParameterTemplate:
    """Returns a weight that is neither a linear nor a norm: patches, positions."""
    return ParameterTemplate(role(module), module, shape, "other", suffix="")


def tower(
    name: str, slots: tuple[ParameterTemplate, ...], sizes: Callable[[Json, int], Dimensions], layers: str
) -> Family:
    """Returns a tower as a family of its own."""
    # Newer checkpoints have all names in one module more.
    return Family(name, (), (), slots, sizes, {}, layers=(layers,), spellings=({"": "model."},))


def both(module: str, rows: str, columns: str) -> ParameterTemplate:
    """Returns a linear with a bias."""
    return c.linear(role(module), module, rows, columns, bias=True)


def layer_norms(layer: str, *names: str, bias: bool = True) -> tuple[ParameterTemplate, ...]:
    """Returns norms over the tower's hidden size."""
    return tuple(c.norm(role(layer + name), layer + name, bias=bias) for name in names)


# SigLIP's modules, under that of the tower.
SIGLIP_EMBEDDINGS, SIGLIP_LAYER, SIGLIP_NORM = "embeddings.", "encoder.layers.{layer}.", "post_layernorm"


def siglip(tower: str) -> tuple[ParameterTemplate, ...]:
    """Returns SigLIP under the module `tower`: its embeddings, the encoder's layers, the norm after them."""
    embeddings, layer = tower + SIGLIP_EMBEDDINGS, tower + SIGLIP_LAYER
    return (
        table(embeddings + "patch_embedding.weight", "hidden", "channels", "patch", "patch"),
        table(embeddings + "patch_embedding.bias", "hidden"),
        table(embeddings + "position_embedding.weight", "positions", "hidden"),
        *layer_norms(layer, "layer_norm1", "layer_norm2"),
        *(both(f"{layer}self_attn.{part}_proj", "hidden", "hidden") for part in ("q", "k", "v", "out")),
        both(layer + "mlp.fc1", "intermediate", "hidden"),
        both(layer + "mlp.fc2", "hidden", "intermediate"),
        *layer_norms(tower, SIGLIP_NORM),
    )


# Qwen: patches of two frames, and four neighbours merged into one token.
QWEN = "visual.blocks.{layer}."


def qwen_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of a tower of Qwen2.5-VL or later."""
    hidden, merge = positive_int(config, "hidden_size"), optional_int(config, "spatial_merge_size") or 2
    return {
        "hidden": hidden,
        "qkv": 3 * hidden,
        "merged": merge * merge * hidden,
        "out": positive_int(config, "out_hidden_size"),
        "intermediate": positive_int(config, "intermediate_size"),
        "channels": optional_int(config, "in_channels") or 3,
        "frames": optional_int(config, "temporal_patch_size") or 2,
        "patch": positive_int(config, "patch_size"),
        "positions": optional_int(config, "num_position_embeddings") or 2304,
    }


def qwen2_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of Qwen2-VL's tower, whose `hidden_size` is the language model's."""
    width = positive_int(config, "embed_dim")
    sizes = {
        "hidden_size": width,
        "out_hidden_size": positive_int(config, "hidden_size"),
        "intermediate_size": width * (optional_int(config, "mlp_ratio") or 4),
    }
    return qwen_sizes({"patch_size": 14, **config, **sizes}, layer)


QWEN_PATCHES = table("visual.patch_embed.proj.weight", "hidden", "channels", "frames", "patch", "patch")
QWEN_ATTENTION = (both(QWEN + "attn.qkv", "qkv", "hidden"), both(QWEN + "attn.proj", "hidden", "hidden"))
QWEN2_MERGER = (both("visual.merger.mlp.0", "merged", "merged"), both("visual.merger.mlp.2", "out", "merged"))
QWEN2_TOWER = tower(
    "Qwen2-VL's tower",
    (
        QWEN_PATCHES,
        *layer_norms(QWEN, "norm1", "norm2"),
        *QWEN_ATTENTION,
        both(QWEN + "mlp.fc1", "intermediate", "hidden"),
        both(QWEN + "mlp.fc2", "hidden", "intermediate"),
        *layer_norms("visual.merger.", "ln_q"),
        *QWEN2_MERGER,
    ),
    qwen2_sizes,
    "depth",
)
QWEN25_TOWER = replace(
    QWEN2_TOWER,
    name="Qwen2.5-VL's tower",
    dimensions=qwen_sizes,
    slots=(
        QWEN_PATCHES,
        *layer_norms(QWEN, "norm1", "norm2", bias=False),
        *QWEN_ATTENTION,
        *c.gated_mlp(QWEN + "mlp.", "vision.mlp.", bias=True),
        *layer_norms("visual.merger.", "ln_q", bias=False),
        *QWEN2_MERGER,
    ),
)


def _merger(module: str, norm: str) -> tuple[ParameterTemplate, ...]:
    return (
        c.norm(role(module + "norm"), module + "norm", norm, bias=True),
        both(module + "linear_fc1", "merged", "merged"),
        both(module + "linear_fc2", "out", "merged"),
    )


def qwen3_sizes(config: Json, layer: int) -> Dimensions:
    """Adds which of its deeper mergers a Qwen3-VL tower has: one for each layer that it names."""
    indexes = config.get("deepstack_visual_indexes")
    if not isinstance(indexes, list) or len(indexes) > _DEEPSTACK:
        raise CorruptCheckpoint("config.json: deepstack_visual_indexes is not a short list of layers")
    dims = qwen_sizes(config, layer)
    return {**dims, **{f"merged_{i}": dims["merged"] if i < len(indexes) else 0 for i in range(_DEEPSTACK)}}


_DEEPSTACK = 8
QWEN3_TOWER = tower(
    "Qwen3-VL's tower",
    (
        QWEN_PATCHES,
        table("visual.patch_embed.proj.bias", "hidden"),
        table("visual.pos_embed.weight", "positions", "hidden"),
        *layer_norms(QWEN, "norm1", "norm2"),
        *QWEN_ATTENTION,
        both(QWEN + "mlp.linear_fc1", "intermediate", "hidden"),
        both(QWEN + "mlp.linear_fc2", "hidden", "intermediate"),
        *_merger("visual.merger.", "hidden"),
        *(
            replace(slot, only_if=f"merged_{i}")
            for i in range(_DEEPSTACK)
            for slot in _merger(f"visual.deepstack_merger_list.{i}.", "merged")
        ),
    ),
    qwen3_sizes,
    "depth",
)

# Gemma 4: a decoder's layer with norms around both blocks, positions by row and column.
GEMMA = "vision_tower.encoder.layers.{layer}."
GEMMA_LINEARS = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear")


GEMMA_MODULES = {
    **{f"attn.{part}": f"{GEMMA}self_attn.{part}_proj" for part in "qkvo"},
    **{f"vision.mlp.{part}": f"{GEMMA}mlp.{part}_proj" for part in ("gate", "up", "down")},
}
BOUNDS = ("input_max", "input_min", "output_max", "output_min")
"""What a clipped linear of Gemma 4's tower has, besides its weight: one number each."""


def _bounds() -> tuple[ParameterTemplate, ...]:
    return tuple(
        ParameterTemplate(f"{role}.{bound}", f"{module}.{bound}", (), "other", only_if="clipped", suffix="")
        for role, module in GEMMA_MODULES.items()
        for bound in BOUNDS
    )


def gemma4_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of Gemma 4's tower."""
    patch, standard = positive_int(config, "patch_size"), flag(config, "standardize")
    dims = c.attention_dimensions({**config, "vocab_size": 1})
    return {
        **dims,
        "intermediate": positive_int(config, "intermediate_size"),
        "positions": positive_int(config, "position_embedding_size"),
        "two": 2,
        "patch": patch,
        "points": 3 * patch * patch,
        "standard": dims["hidden"] if standard else 0,
        "clipped": flag(config, "use_clipped_linears"),
        "out": positive_int(config, TEXT_HIDDEN),
    }


GEMMA4_TOWER = tower(
    "Gemma 4's tower",
    (
        table("vision_tower.std_bias", "standard"),
        table("vision_tower.std_scale", "standard"),
        table("vision_tower.patch_embedder.position_embedding_table", "two", "positions", "hidden"),
        c.linear("vision.patches", "vision_tower.patch_embedder.input_proj", "hidden", "points"),
        *c.attention(
            GEMMA + "self_attn.", ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear")
        ),
        c.norm("vision.q_norm", GEMMA + "self_attn.q_norm", "head_dim"),
        c.norm("vision.k_norm", GEMMA + "self_attn.k_norm", "head_dim"),
        *c.gated_mlp(
            GEMMA + "mlp.", "vision.mlp.", names=("gate_proj.linear", "up_proj.linear", "down_proj.linear")
        ),
        *_bounds(),
        *layer_norms(GEMMA, "input_layernorm", "post_attention_layernorm", bias=False),
        *layer_norms(GEMMA, "pre_feedforward_layernorm", "post_feedforward_layernorm", bias=False),
        c.linear("vision.projection", "embed_vision.embedding_projection", "out", "hidden"),
    ),
    gemma4_sizes,
    "num_hidden_layers",
)

# Gemma 3: SigLIP.
GEMMA3 = "vision_tower.vision_model."


def siglip_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of SigLIP: one position for each patch of the image."""
    patch, image = positive_int(config, "patch_size"), positive_int(config, "image_size")
    if flag(config, "vision_use_head", default=True):
        raise CorruptCheckpoint(
            "config.json: vision_use_head is not false, and that head is not counted here"
        )
    across = image // patch
    return {
        "hidden": positive_int(config, "hidden_size"),
        "intermediate": positive_int(config, "intermediate_size"),
        "patch": patch,
        "positions": across * across,
        "channels": optional_int(config, "num_channels") or 3,
        "out": positive_int(config, TEXT_HIDDEN),
    }


SIGLIP_TOWER = replace(
    tower(
        "Gemma 3's tower",
        (
            *siglip(GEMMA3),
            table("multi_modal_projector.mm_input_projection_weight", "hidden", "out"),
            *layer_norms("multi_modal_projector.", "mm_soft_emb_norm", bias=False),
        ),
        siglip_sizes,
        "num_hidden_layers",
    ),
    spellings=({"": "model."}, {"vision_model.": ""}),
)  # transformers 5 saves the second

# Kimi: MoonViT, without biases from K3 on.
KIMI = "vision_tower.encoder.blocks.{layer}."


def kimi_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of MoonViT and its projector; K3's norms have no bias, and one comes last."""
    hidden = positive_int(config, "vt_hidden_size")
    kernel = config.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list) or not all(isinstance(n, int) and 0 < n < 256 for n in kernel):
        raise CorruptCheckpoint("config.json: merge_kernel_size is not a pair of small numbers")
    merged = hidden
    for n in kernel:
        merged *= n
    plain = config.get("norm_type") == "rmsnorm"
    width = optional_int(config, "qkv_hidden_size") or hidden
    return {
        "hidden": hidden,
        "heads_width": width,
        "qkv": 3 * width,
        "intermediate": positive_int(config, "vt_intermediate_size"),
        "patch": positive_int(config, "patch_size"),
        "channels": 3,
        "height": positive_int(config, "init_pos_emb_height"),
        "width": positive_int(config, "init_pos_emb_width"),
        "merged": merged,
        "out": positive_int(config, TEXT_HIDDEN),
        "bias": 0 if plain else 1,
        "last": 1 if plain else 0,
    }


def _unless_plain(module: str, size: str) -> ParameterTemplate:
    return replace(table(f"{module}.bias", size), only_if="bias")


def _linear(module: str, rows: str, columns: str) -> tuple[ParameterTemplate, ...]:
    return c.linear(role(module), module, rows, columns), _unless_plain(module, rows)


def _norm(module: str, size: str = "hidden", only_if: str | None = None) -> tuple[ParameterTemplate, ...]:
    return c.norm(role(module), module, size, only_if=only_if), _unless_plain(module, size)


# MoonViT itself, as Kimi-VL and K2.5 have it; norms and linears of K3's have no bias.
_MOON_VIT = (
    table("vision_tower.patch_embed.proj.weight", "hidden", "channels", "patch", "patch"),
    _unless_plain("vision_tower.patch_embed.proj", "hidden"),
    table("vision_tower.patch_embed.pos_emb.weight", "height", "width", "hidden"),
    *_norm(KIMI + "norm0"),
    *_norm(KIMI + "norm1"),
    *_linear(KIMI + "wqkv", "qkv", "hidden"),
    *_linear(KIMI + "wo", "hidden", "heads_width"),
    *_linear(KIMI + "mlp.fc0", "intermediate", "hidden"),
    *_linear(KIMI + "mlp.fc1", "hidden", "intermediate"),
    *_norm("vision_tower.encoder.final_layernorm"),
)
KIMI_TOWER = tower(
    "Kimi's tower",
    (
        *_MOON_VIT,
        *_norm("mm_projector.pre_norm", only_if="bias"),
        *_linear("mm_projector.proj.0", "merged", "merged"),
        *_linear("mm_projector.proj.2", "out", "merged"),
        c.norm("vision.last_norm", "mm_projector.post_norm", "out", only_if="last"),
    ),
    kimi_sizes,
    "vt_num_hidden_layers",
)


def kimi_vl_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of Kimi-VL's tower, whose config has MoonViT's own keys."""
    sizes = ("hidden_size", "intermediate_size")
    return kimi_sizes({**config, **{f"vt_{key}": config.get(key) for key in sizes}}, layer)


KIMI_VL_TOWER = tower(
    "Kimi-VL's tower",
    (
        *_MOON_VIT,
        *_norm("multi_modal_projector.pre_norm"),
        *_linear("multi_modal_projector.linear_1", "merged", "merged"),
        *_linear("multi_modal_projector.linear_2", "out", "merged"),
    ),
    kimi_vl_sizes,
    "num_hidden_layers",
)
