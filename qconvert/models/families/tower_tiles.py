"""Declares the towers of models that cut a picture into tiles: SmolVLM's, InternVL's and Llama 4's.

Sources: transformers' `modeling_smolvlm`, `modeling_internvl` and `modeling_llama4`; for InternVL's first
spelling its own `modeling_intern_vit` and `modeling_internvl_chat`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families.vision import TEXT_HIDDEN, WHOLE, both, layer_norms, role, siglip, table, tower
from qconvert.models.parameters import Dimensions, ParameterTemplate


def side(config: Json, key: str) -> int:
    """Returns the side of a square that some configs state twice, as a list."""
    value = config.get(key)
    return positive_int({key: value[0] if isinstance(value, list) and value else value}, key)


def neighbours(config: Json, key: str, default: float) -> int:
    """Returns how many patches a side become one token, from the share of them that is left."""
    whole = config.get(WHOLE)
    stated = (whole if isinstance(whole, dict) else config).get(key, default)
    share = positive_number(stated)
    if share is None or not 1 / 64 <= share <= 1:
        raise CorruptCheckpoint(f"config.json: {key} is {stated!r}, not a share of the patches")
    return int(1 / share)


def _patches(config: Json) -> dict[str, int]:
    patch = side(config, "patch_size")
    across = side(config, "image_size") // patch
    return {
        "hidden": positive_int(config, "hidden_size"),
        "intermediate": positive_int(config, "intermediate_size"),
        "patch": patch,
        "positions": across * across,
        "channels": optional_int(config, "num_channels") or 3,
        "out": positive_int(config, TEXT_HIDDEN),
        "one": 1,
    }


# SmolVLM and Idefics3: SigLIP, and one linear over neighbours.
SMOL = "vision_model."


def smolvlm_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of SmolVLM's tower."""
    dims, whole = _patches(config), config.get(WHOLE)
    scale = optional_int(whole, "scale_factor") or 2 if isinstance(whole, dict) else 2
    return {**dims, "merged": dims["hidden"] * scale * scale}


SMOLVLM_TOWER = replace(
    tower(
        "SmolVLM's tower",
        (
            *siglip(SMOL),
            c.linear("vision.projection", "connector.modality_projection.proj", "out", "merged"),
        ),
        smolvlm_sizes,
        "num_hidden_layers",
    ),
    defaults={
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 32,
        "layer_norm_eps": 1e-6,
    },
)


# InternVL: a class token, and a scale behind each block. Its larger tower has RMS norms, also of q and k.
INTERN = "vision_model.encoder.layers.{layer}."
INTERN_EMBEDDINGS = "vision_model.embeddings."
INTERN_HF = "vision_tower.encoder.layer.{layer}."
INTERN_HF_EMBEDDINGS = "vision_tower.embeddings."


def internvl_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of InternVL's towers."""
    dims, kernel = _patches(config), neighbours(config, "downsample_ratio", 0.5)
    normed = flag(config, "qk_normalization") or flag(config, "use_qk_norm")
    return {
        **dims,
        "positions": dims["positions"] + 1,
        "qkv": 3 * dims["hidden"],
        "qkv_bias": 3 * dims["hidden"] if flag(config, "qkv_bias", default=True) else 0,
        "attention_bias": dims["hidden"] if flag(config, "attention_bias") else 0,
        "merged": dims["hidden"] * kernel * kernel,
        "norm_bias": 0 if config.get("norm_type") == "rms_norm" else dims["hidden"],
        "qk_norm": dims["hidden"] if normed else 0,
    }


def _norms(layer: str, *names: str) -> tuple[ParameterTemplate, ...]:
    return tuple(
        slot
        for name in names
        for slot in (c.norm(role(layer + name), layer + name), table(f"{layer}{name}.bias", "norm_bias"))
    )


INTERNVL_TOWER = tower(
    "InternVL's tower",
    (
        table(INTERN_EMBEDDINGS + "class_embedding", "one", "one", "hidden"),
        table(INTERN_EMBEDDINGS + "patch_embedding.weight", "hidden", "channels", "patch", "patch"),
        table(INTERN_EMBEDDINGS + "patch_embedding.bias", "hidden"),
        table(INTERN_EMBEDDINGS + "position_embedding", "one", "positions", "hidden"),
        *_norms(INTERN, "norm1", "norm2"),
        c.linear(role(INTERN + "attn.qkv"), INTERN + "attn.qkv", "qkv", "hidden"),
        table(INTERN + "attn.qkv.bias", "qkv_bias"),
        both(INTERN + "attn.proj", "hidden", "hidden"),
        *(c.norm(f"vision.{part}_norm", f"{INTERN}attn.{part}_norm", "qk_norm") for part in "qk"),
        both(INTERN + "mlp.fc1", "intermediate", "hidden"),
        both(INTERN + "mlp.fc2", "hidden", "intermediate"),
        *(table(f"{INTERN}ls{i}", "hidden") for i in (1, 2)),
        c.norm(role("mlp1.0"), "mlp1.0", "merged", bias=True),
        both("mlp1.1", "out", "merged"),
        both("mlp1.3", "out", "out"),
    ),
    internvl_sizes,
    "num_hidden_layers",
)
INTERNVL_HF_TOWER = replace(
    INTERNVL_TOWER,
    name="InternVL's tower as transformers has it",
    slots=(
        table(INTERN_HF_EMBEDDINGS + "cls_token", "one", "one", "hidden"),
        table(
            INTERN_HF_EMBEDDINGS + "patch_embeddings.projection.weight",
            *("hidden", "channels", "patch", "patch"),
        ),
        table(INTERN_HF_EMBEDDINGS + "patch_embeddings.projection.bias", "hidden"),
        table(INTERN_HF_EMBEDDINGS + "position_embeddings", "one", "positions", "hidden"),
        *_norms(INTERN_HF, "layernorm_before", "layernorm_after"),
        *(
            slot
            for part in "qkv"
            for module in (f"{INTERN_HF}attention.{part}_proj",)
            for slot in (
                c.linear(role(module), module, "hidden", "hidden"),
                table(module + ".bias", "attention_bias"),
            )
        ),
        both(INTERN_HF + "attention.projection_layer", "hidden", "hidden"),
        *(c.norm(f"vision.{part}_norm", f"{INTERN_HF}attention.{part}_norm", "qk_norm") for part in "qk"),
        both(INTERN_HF + "mlp.fc1", "intermediate", "hidden"),
        both(INTERN_HF + "mlp.fc2", "hidden", "intermediate"),
        *(table(f"{INTERN_HF}lambda_{i}", "hidden") for i in (1, 2)),
        c.norm(
            role("multi_modal_projector.layer_norm"), "multi_modal_projector.layer_norm", "merged", bias=True
        ),
        both("multi_modal_projector.linear_1", "out", "merged"),
        both("multi_modal_projector.linear_2", "out", "out"),
    ),
)


# Llama 4: patches as rows of a linear, a class token that comes last, rotary positions.
LLAMA4 = "vision_model.model.layers.{layer}."


def llama4_sizes(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of Llama 4's tower."""
    dims = _patches(config)
    return {
        **dims,
        "positions": dims["positions"] + 1,
        "pixels": dims["channels"] * dims["patch"] * dims["patch"],
        "adapter": positive_int(config, "projector_input_dim"),
        "adapted": positive_int(config, "projector_output_dim"),
        "seen": positive_int(config, "vision_output_dim"),
    }


LLAMA4_TOWER = tower(
    "Llama 4's tower",
    (
        table("vision_model.class_embedding", "hidden"),
        table("vision_model.positional_embedding_vlm", "positions", "hidden"),
        c.linear("vision.patches", "vision_model.patch_embedding.linear", "hidden", "pixels"),
        *layer_norms("vision_model.", "layernorm_pre"),
        *(both(f"{LLAMA4}self_attn.{part}_proj", "hidden", "hidden") for part in "qkvo"),
        both(LLAMA4 + "mlp.fc1", "intermediate", "hidden"),
        both(LLAMA4 + "mlp.fc2", "hidden", "intermediate"),
        *layer_norms(LLAMA4, "input_layernorm", "post_attention_layernorm"),
        *layer_norms("vision_model.", "layernorm_post"),
        c.linear("vision.adapter.1", "vision_model.vision_adapter.mlp.fc1", "adapter", "intermediate"),
        c.linear("vision.adapter.2", "vision_model.vision_adapter.mlp.fc2", "adapted", "adapted"),
        c.linear("vision.projection", "multi_modal_projector.linear_1", "out", "seen"),
    ),
    llama4_sizes,
    "num_hidden_layers",
)
