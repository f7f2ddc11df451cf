"""`to-gguf --mmproj`: the file of a vision tower that llama.cpp loads beside the language model."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import add_tokenizer, scatter, written
from tests.support.gguf_models import SIZES, transformers_model
from tests.support.newer_llama_cpp import newer_sight

QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 3, "out_hidden_size": 64,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
MEAN, STD = [0.5, 0.25, 0.125], [0.5, 0.5, 0.25]
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
    "gemma4": (
        "gemma4",
        {
            "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 16, "num_hidden_layers": 2, "patch_size": 16, "pooling_kernel_size": 2,
            "position_embedding_size": 40, "standardize": True,
        },
    ),
    "kimi-k2.5": (
        "kimi_k25",
        {
            "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
            "n_shared_experts": 1, "first_k_dense_replace": 1,
        },
        {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2,
            "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4,
        },
    ),
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


def made(folder: Path, name: str) -> Any:
    """A random model that sees, saved by transformers in float32, with a tokenizer and a preprocessor."""
    import transformers
    from safetensors.torch import load_file, save_file

    model_type, text, tower = TOWERS[name]
    inner = {**SIZES, **text}
    more = {"mm_tokens_per_image": 4} if name == "gemma3" else {}
    more |= {"min_dynamic_patch": 1, "max_dynamic_patch": 1} if name == "internvl" else {}
    more |= {"projection_hidden_size": tower["hidden_size"]} if name == "kimi-k2.5" else {}
    config = transformers.AutoConfig.for_model(model_type, text_config=inner, vision_config=tower, **more)
    model = scatter(transformers.AutoModelForImageTextToText.from_config(config), 0.08).eval()
    model.save_pretrained(folder)
    if name == "gemma3":
        weights = {re.sub(*AS_PUBLISHED, key): weight for key, weight in load_file(folder / STORED).items()}
        save_file(weights, folder / STORED, {"format": "pt"})
    if name == "kimi-k2.5":
        moonshots(folder)
    add_tokenizer(folder)
    settings = {"image_mean": MEAN, "image_std": STD, "image_seq_length": 4, "size": {"longest_edge": 56}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


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


def in_rows(picture_CHW: Any, patch: int) -> Any:
    """A picture cut into patches, row by row: [rows, columns, colours, patch, patch]."""
    return picture_CHW.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4)


def placed(picture_CHW: Any, name: str, patch: int) -> dict[str, Any]:
    """A picture as the processors of Gemma 4 and Kimi-K2.5 give it, with the places of its patches."""
    import torch

    cut = in_rows(picture_CHW, patch)
    rows, columns = cut.shape[:2]
    if name == "kimi-k2.5":
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
    elif name in ("gemma4", "kimi-k2.5"):
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


@pytest.mark.parametrize(("file_type", "says"), [("q4_k_m", "no such file"), ("f16", "")])
def test_types_of_a_tower(tmp_path: Path, file_type: str, says: str) -> None:
    """What is looked up or convolved stays float32 in SigLIP; what is multiplied by has half the bits."""
    made(tmp_path, "gemma3")
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", file_type, "-o", tmp_path / "m.gguf", "-q")
    assert (ran.code == 1) == bool(says) and says in ran.err
    if says:
        return
    with GGUFFile(tmp_path / "m.gguf") as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
        assert file.kv["general.type"].value == "mmproj"
    f32 = {"v.patch_embd.weight", "v.position_embd.weight", "mm.soft_emb_norm.weight"}
    assert {kinds[name] for name in f32} == {"F32"} and kinds["mm.input_projection.weight"] == "F16"
    assert kinds["v.blk.0.attn_q.weight"] == "F16" and kinds["v.blk.0.ln1.weight"] == "F32"


def test_its_name_is_what_programs_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "Seer-VL", "qwen3-vl")
    assert qconvert("to-gguf", tmp_path / "Seer-VL", "--mmproj", "-q").code == 0
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["mmproj-Seer-VL-F16.gguf"]


def test_a_model_that_does_not_see_has_none(tmp_path: Path) -> None:
    ran = qconvert("to-gguf", transformers_model(tmp_path, "qwen3"), "--mmproj")
    assert ran.code == 1 and "has no vision tower that is known here" in ran.err


@pytest.mark.parametrize("name", TOWERS)
def test_llama_cpp_sees_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.mtmd")
    model = made(tmp_path, name)
    side = 2 * 2 * TOWERS[name][2].get("patch_size", 14)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    expected = seen_by_transformers(model, name, pixels)
    tower = tmp_path / "mmproj.gguf"
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", "f32", "-o", tower, "-q")
    assert ran.code == 0, ran.err
    if name == "gemma4":  # whose tokens are of another length in older ones
        found = newer_sight(written(tmp_path), tower, pixels)
    else:
        found = seen_by_llama_cpp(written(tmp_path), tower, pixels, expected.shape[1])
    if name == "llama4":  # whose tokens llama.cpp gives column by column
        across = math.isqrt(len(found))
        found = found.reshape(across, across, -1).swapaxes(0, 1).reshape(found.shape)
    assert found.shape == expected.shape and expected.std() > 0.05
    assert np.abs(found - expected).max() < 0.01  # measured: 0.0004 (internvl) to 0.0048 (gemma4)


# Of what llama.cpp's converter (b11549) makes of these models: a hash of names, types, shapes and bytes.
CONVERTED = {"gemma4": "961cb41d87b348ab", "kimi-k2.5": "395924211f00e13f"}


@pytest.mark.parametrize("name", CONVERTED)
def test_tensors_are_those_of_the_converter(tmp_path: Path, name: str) -> None:
    """Byte for byte, in half precision; and the keys that tell how to see."""
    made(tmp_path, name)
    out = tmp_path / "mmproj.gguf"
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", "f16", "-o", out, "-q")
    assert ran.code == 0, ran.err
    found = hashlib.sha256()
    with GGUFFile(out) as file:
        for tensor in sorted(file.tensors.values(), key=lambda each: each.name):
            found.update(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode())
            found.update(file.read(tensor.name, 0, tensor.stored.rows).tobytes())
        kinds = {key: file.kv[key].value for key in file.kv if "projector" in key or "pixels" in key}
    assert kinds == KINDS[name]
    assert found.hexdigest()[:16] == CONVERTED[name]


KINDS: dict[str, dict[str, object]] = {
    "gemma4": {"clip.vision.projector_type": "gemma4v", "clip.vision.projector.scale_factor": 2},
    "kimi-k2.5": {
        "clip.projector_type": "kimik25", "clip.vision.projector.scale_factor": 2,
        "clip.vision.image_min_pixels": 1568, "clip.vision.image_max_pixels": 3211264,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma4", {"use_clipped_linears": True}, "use_clipped_linears is true"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma4", {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}, "rope_theta is 50.0"),
    ],
)
def test_towers_that_llama_cpp_does_not_compute_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    made(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", "f16", "-o", tmp_path / "m.gguf", "-q")
    assert ran.code == 1 and said in ran.err and not (tmp_path / "m.gguf").exists(), ran.err


def test_the_tower_of_kimi_k3_is_refused(tmp_path: Path) -> None:
    """It has no biases, and a norm after the projector."""
    import torch
    from safetensors.torch import load_file, save_file

    made(tmp_path, "kimi-k2.5")
    weights = load_file(tmp_path / STORED)
    kept = {name: weight for name, weight in weights.items() if ".bias" not in name or "gate" in name}
    kept = {name: weight for name, weight in kept.items() if "pre_norm" not in name}
    save_file({**kept, "mm_projector.post_norm.weight": torch.ones(64)}, tmp_path / STORED, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["norm_type"] = "rmsnorm"
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", "f16", "-o", tmp_path / "m.gguf", "-q")
    assert ran.code == 1 and "norms with biases" in ran.err, ran.err


# What transformers calls the modules of InternVL, and what they were called when it was first published.
AT_FIRST = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^(model\.)?multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^(model\.)?multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^(model\.)?multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^(model\.)?vision_tower\.", "vision_model."),
    (r"embeddings\.cls_token", "embeddings.class_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"position_embeddings", "position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_", "ls"),
)


def first_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of InternVL under the names of its first files, q, k and v of the tower in one."""
    import torch

    made: dict[str, Any] = {}
    for key, weight in weights.items():
        name = key
        for now, then in AT_FIRST:
            name = re.sub(now, then, name)
        made[name] = weight
    for key in [key for key in made if "attention.q_proj" in key]:
        parts = [made.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        made[key.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    return made


def test_internvl_as_it_was_first_published(tmp_path: Path) -> None:
    """The same files, but for the names of the model, from the names that its own code has."""
    from safetensors.torch import load_file, save_file

    made(tmp_path / "now", "internvl")
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    weights = first_names(load_file(tmp_path / "now" / STORED))
    save_file(weights, tmp_path / "then" / STORED, {"format": "pt"})
    config = json.loads((tmp_path / "now" / "config.json").read_text())
    config |= {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "auto_map": {}}
    config["llm_config"] = config.pop("text_config")
    config["vision_config"] |= {"qkv_bias": True, "image_size": 56, "patch_size": 14}
    (tmp_path / "then" / "config.json").write_text(json.dumps(config))
    for flags in ((), ("--mmproj",)):
        tensors = []
        for folder in ("now", "then"):
            out = tmp_path / f"{folder}.gguf"
            ran = qconvert(
                "to-gguf", tmp_path / folder, *flags, "--type", "f16", "-o", out, "-q", "--overwrite"
            )
            assert ran.code == 0, ran.err
            with GGUFFile(out) as file:
                tensors.append(
                    {
                        n: (t.type, t.shape, file.read(n, 0, t.stored.rows).tobytes())
                        for n, t in file.tensors.items()
                    }
                )
        assert tensors[0] == tensors[1] and len(tensors[0]) > 20
