"""`to-gguf --mmproj`: the file of a vision tower that llama.cpp loads beside the language model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.gguf_families import add_tokenizer, scatter
from tests.gguf_models import SIZES

QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 3, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
STORED = "model.safetensors"
# SigLIP's modules have lost a name in transformers 5.
AS_PUBLISHED = (r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.")
# The type of the model, the text model's config and the tower's.
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        "qwen2_vl", MROPE, {"depth": 3, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2}
    ),
    "qwen2.5-vl": ("qwen2_5_vl", MROPE, {**QWEN, "fullatt_block_indexes": [1]}),
    "qwen3-vl": (
        "qwen3_vl",
        {**MROPE, "head_dim": 16},
        {**QWEN, "patch_size": 16, "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
    ),
    "gemma3": (
        "gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16},
        {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "image_size": 56, "patch_size": 14, "vision_use_head": False,
        },
    ),
}  # fmt: skip


def made(folder: Path, name: str) -> Any:
    """A random model that sees, saved by transformers in float32, with a tokenizer and a preprocessor."""
    import transformers
    from safetensors.torch import load_file, save_file

    model_type, text, tower = TOWERS[name]
    inner = {**SIZES, **text}
    config = transformers.AutoConfig.for_model(model_type, text_config=inner, vision_config=tower)
    model = scatter(transformers.AutoModelForImageTextToText.from_config(config), 0.08).eval()
    model.save_pretrained(folder)
    weights = {re.sub(*AS_PUBLISHED, name): weight for name, weight in load_file(folder / STORED).items()}
    save_file(weights, folder / STORED, {"format": "pt"})
    add_tokenizer(folder)
    settings = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.5, 0.25], "image_seq_length": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model
