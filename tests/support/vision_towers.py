"""Tiny random models that see, and what transformers and llama.cpp make of a picture with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_families import add_tokenizer, scatter
from tests.support.gguf_models import SIZES

QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 3, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
MEAN, STD = [0.5, 0.25, 0.125], [0.5, 0.5, 0.25]
STORED = "model.safetensors"
# SigLIP's modules have lost a name in transformers 5.
AS_PUBLISHED = (r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.")
GEMMA4_TEXT = {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2, "patch_size": 16, "pooling_kernel_size": 2,
    "position_embedding_size": 40, "standardize": True,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MOON_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 14,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
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
    "smolvlm": (
        "smolvlm", {"model_type": "llama"},
        {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "image_size": 56, "patch_size": 14,
        },
    ),
    "internvl": (
        "internvl", {"model_type": "qwen2"},
        {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "image_size": 56, "patch_size": 14, "attention_bias": True,
        },
    ),
    "gemma4": ("gemma4", GEMMA4_TEXT, GEMMA4),
    "gemma4-clipped": ("gemma4", GEMMA4_TEXT, {**GEMMA4, "use_clipped_linears": True}),
    "kimi-k2.5": ("kimi_k25", LATENT, {**MOON_VIT, "num_hidden_layers": 2}),
    # transformers has no class of it; that of K2.5 computes the same on one picture.
    "kimi-vl": ("kimi_k25", LATENT, {**MOON_VIT, "num_hidden_layers": 3}),
    "llama4": (
        "llama4",
        {
            "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16,
            "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        },
        {
            "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2,
            "image_size": 56, "patch_size": 14, "projector_input_dim": 40, "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
    ),
}  # fmt: skip
TILED = ("smolvlm", "internvl", "llama4")
KIMI = ("kimi-k2.5", "kimi-vl")
# MoonViT's modules as transformers saves them, and as Moonshot publishes them; its config likewise.
MOON = (
    (r"^language_model\.model\.blocks", "language_model.model.layers"),
    (r"^model\.mm_projector", "mm_projector"),
    (r"vision_tower\.encoder\.patch_embed", "vision_tower.patch_embed"),
)
MOON_KEYS = {
    **{
        f"vt_{key}": key
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    },
    **{f"init_pos_emb_{side}": f"pos_emb_{side}" for side in ("height", "width", "time")},
    **{key: key for key in ("patch_size", "merge_kernel_size")},
}
# What Kimi-VL's projector is called, which is the same as K2.5's.
VL = (
    ("mm_projector.proj.0", "multi_modal_projector.linear_1"),
    ("mm_projector.proj.2", "multi_modal_projector.linear_2"),
    ("mm_projector.pre_norm", "multi_modal_projector.pre_norm"),
)


def made(folder: Path, name: str) -> Any:
    """A random model that sees, saved by transformers in float32, with a tokenizer and a preprocessor."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    model_type, text, tower = TOWERS[name]
    inner = {**SIZES, **text}
    more = {"mm_tokens_per_image": 4} if name == "gemma3" else {}
    more |= {"min_dynamic_patch": 1, "max_dynamic_patch": 1} if name == "internvl" else {}
    more |= {"projection_hidden_size": tower["hidden_size"]} if name in KIMI else {}
    config = transformers.AutoConfig.for_model(model_type, text_config=inner, vision_config=tower, **more)
    model = scatter(transformers.AutoModelForImageTextToText.from_config(config), 0.08).eval()
    if name in KIMI:  # attention that shows which pairs turn by what
        with torch.no_grad():
            for key, weight in model.model.vision_tower.named_parameters():
                if ".q_proj." in key or ".k_proj." in key:
                    weight.mul_(6)
    if name == "gemma4-clipped":
        clip(model)
    model.save_pretrained(folder)
    if name == "gemma3":
        weights = {re.sub(*AS_PUBLISHED, key): weight for key, weight in load_file(folder / STORED).items()}
        save_file(weights, folder / STORED, {"format": "pt"})
    if name in KIMI:
        moonshots(folder)
    if name == "kimi-vl":
        kimi_vl(folder)
    add_tokenizer(folder)
    settings = {"image_mean": MEAN, "image_std": STD, "image_seq_length": 4, "size": {"longest_edge": 56}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def clip(model: Any) -> None:
    """Gives the clipped linears bounds that a few numbers in a hundred reach; one side of some has none."""
    linears = [module for module in model.modules() if hasattr(module, "input_min")]
    for i, linear in enumerate(linears):
        linear.input_min.fill_(-1.5 + 0.01 * i)
        linear.input_max.fill_(1.25 + 0.01 * i)
        linear.output_min.fill_(-0.5 - 0.01 * i)
        if i % 3:
            linear.output_max.fill_(0.75 + 0.01 * i)


def moonshots(folder: Path) -> None:
    """Renames what transformers saved of a Kimi-K2.5 as Moonshot has it."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for key, weight in load_file(folder / STORED).items():
        name = key
        for now, then in MOON:
            name = re.sub(now, then, name)
        weights[name] = weight
    save_file(weights, folder / STORED, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["vision_config"] = {then: config["vision_config"][now] for then, now in MOON_KEYS.items()}
    (folder / "config.json").write_text(json.dumps(config))


def kimi_vl(folder: Path) -> None:
    """Makes a Kimi-VL of a Kimi-K2.5 as Moonshot has it, with other names of the projector and keys."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for key, weight in load_file(folder / STORED).items():
        name = key
        for then, now in VL:
            name = name.replace(then, now)
        weights[name] = weight
    save_file(weights, folder / STORED, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    tower = {key.removeprefix("vt_"): value for key, value in config["vision_config"].items()}
    del tower["init_pos_emb_time"]
    config["vision_config"] = {"model_type": "moonvit", **tower}
    (folder / "config.json").write_text(json.dumps(config))


def in_rows(picture_CHW: Any, patch: int) -> Any:
    """A picture cut into patches, row by row: [rows, columns, colours, patch, patch]."""
    return picture_CHW.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4)


def placed(picture_CHW: Any, name: str, patch: int) -> dict[str, Any]:
    """A picture as the processors of Gemma 4 and Kimi-K2.5 give it, with the places of its patches."""
    import torch

    cut = in_rows(picture_CHW, patch)
    rows, columns = cut.shape[:2]
    if name in KIMI:
        return {"pixel_values": cut.flatten(0, 1), "image_grid_thw": torch.tensor([[1, rows, columns]])}
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    points = cut.permute(0, 1, 3, 4, 2).reshape(1, rows * columns, -1)
    return {"pixel_values": points, "image_position_ids": places[None]}


def patches(picture_CHW: Any, patch: int) -> dict[str, Any]:
    """A picture as Qwen's processor gives it: twice, for two frames, and cut into squares of four patches."""
    import torch

    rows, columns = (side // patch for side in picture_CHW.shape[1:])
    cut = picture_CHW.repeat(2, 1, 1, 1).reshape(1, 2, 3, rows // 2, 2, patch, columns // 2, 2, patch)
    flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    return {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def seen_by_transformers(model: Any, name: str, pixels_HWC: np.ndarray) -> np.ndarray:
    """What a tower makes of a picture, [tokens, hidden] float32; of deeper layers, beside it."""
    import torch

    normal = (pixels_HWC / 255 - np.array(MEAN)) / np.array(STD)
    picture_CHW = torch.tensor(normal, dtype=torch.float32).permute(2, 0, 1)
    given = {"pixel_values": picture_CHW[None]}
    if name == "smolvlm":
        given = {"pixel_values": picture_CHW[None, None]}
    elif name in ("gemma4", "gemma4-clipped", *KIMI):
        given = placed(picture_CHW, name, model.config.vision_config.patch_size)
    elif name != "gemma3" and name not in TILED:
        given = patches(picture_CHW, model.config.vision_config.patch_size)
    with torch.no_grad():
        found = (model if name == "llama4" else model.model).get_image_features(**given)
        seen = found.last_hidden_state if name == "llama4" else None
        pooled = found.pooler_output if seen is None else model.multi_modal_projector(seen)
    deep = getattr(found, "deepstack_features", None) or ()
    rows = [torch.cat(list(each)) if isinstance(each, tuple | list) else each for each in (pooled, *deep)]
    return np.concatenate([row.reshape(-1, row.shape[-1]).numpy() for row in rows], axis=1)


def seen_by_llama_cpp(model: Path, tower: Path, pixels_HWC: np.ndarray, width: int) -> np.ndarray:
    """The same, by the two files in llama.cpp."""
    from cyllama.llama import llama_cpp
    from cyllama.llama.mtmd import MtmdBitmap, MtmdContext, MtmdContextParams, get_default_media_marker

    params = MtmdContextParams(use_gpu=False, n_threads=1)
    params.image_min_tokens, params.warmup = 1, False
    text = llama_cpp.LlamaModel(str(model), llama_cpp.LlamaModelParams(), verbose=False)
    context = MtmdContext(str(tower), text, params)
    assert context.supports_vision
    height, wide, _ = pixels_HWC.shape
    picture = MtmdBitmap.create_image(wide, height, pixels_HWC.tobytes())
    chunks = context.tokenize(get_default_media_marker(), [picture])
    chunk = max((chunks[i] for i in range(len(chunks))), key=lambda each: each.type.value)
    assert context.encode_chunk(chunk) == 0
    found = np.array(context.get_output_embeddings(chunk.n_tokens, width), np.float32)
    del chunk, chunks, picture
    context.close()
    return found
