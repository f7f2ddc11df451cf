"""`to-gguf --mmproj`: the file of a vision tower that llama.cpp loads beside the language model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.commands import qconvert
from tests.gguf_families import add_tokenizer, scatter, written
from tests.gguf_models import SIZES, transformers_model

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
}  # fmt: skip


def made(folder: Path, name: str) -> Any:
    """A random model that sees, saved by transformers in float32, with a tokenizer and a preprocessor."""
    import transformers
    from safetensors.torch import load_file, save_file

    model_type, text, tower = TOWERS[name]
    inner = {**SIZES, **text}
    more = {"mm_tokens_per_image": 4} if name == "gemma3" else {}
    config = transformers.AutoConfig.for_model(model_type, text_config=inner, vision_config=tower, **more)
    model = scatter(transformers.AutoModelForImageTextToText.from_config(config), 0.08).eval()
    model.save_pretrained(folder)
    weights = {re.sub(*AS_PUBLISHED, name): weight for name, weight in load_file(folder / STORED).items()}
    save_file(weights, folder / STORED, {"format": "pt"})
    add_tokenizer(folder)
    settings = {"image_mean": MEAN, "image_std": STD, "image_seq_length": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


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
    if name != "gemma3":
        given = patches(picture_CHW, model.config.vision_config.patch_size)
    with torch.no_grad():
        found = model.model.get_image_features(**given)
    pooled = found.pooler_output
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
    found = seen_by_llama_cpp(written(tmp_path), tower, pixels, expected.shape[1])
    assert found.shape == expected.shape and expected.std() > 0.1
    assert np.abs(found - expected).max() < 0.005  # measured: 0.0006 (gemma3) to 0.0011 (qwen3-vl)
