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
from tests.support.gguf_families import written
from tests.support.gguf_models import transformers_model
from tests.support.newer_llama_cpp import newer_sight
from tests.support.vision_towers import STORED, TOWERS, made, seen_by_llama_cpp, seen_by_transformers


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
    if name.startswith("gemma4"):  # whose tokens are of another length in older ones
        found = newer_sight(written(tmp_path), tower, pixels)
    else:
        found = seen_by_llama_cpp(written(tmp_path), tower, pixels, expected.shape[1])
    if name == "llama4":  # whose tokens llama.cpp gives column by column
        across = math.isqrt(len(found))
        found = found.reshape(across, across, -1).swapaxes(0, 1).reshape(found.shape)
    assert found.shape == expected.shape and expected.std() > 0.05
    assert (
        np.abs(found - expected).max() < 0.01
    )  # measured: 0.0004 (internvl) to 0.0048 (gemma4); 0.5 were Kimi-VL's q and k not turned


# Of what llama.cpp's converter (b11549, Kimi's 0c1e57098) makes of these models: a hash of names, types,
# shapes and bytes.
CONVERTED = {
    "gemma4": "961cb41d87b348ab",
    "gemma4-clipped": "e2f206b4a2fb76a4",
    "kimi-k2.5": "2ccc3c3cc46963bf",
    "kimi-vl": "79e73080b4866096",
}


@pytest.mark.parametrize("name", CONVERTED)
def test_tensors_are_those_of_the_converter(tmp_path: Path, name: str) -> None:
    """Byte for byte, in half precision; and the keys that tell how to see.

    But for the rows of Kimi-VL's q and k, which that leaves in turns, as no graph of llama.cpp reads them.
    """
    made(tmp_path, name)
    out = tmp_path / "mmproj.gguf"
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "--type", "f16", "-o", out, "-q")
    assert ran.code == 0, ran.err
    found = hashlib.sha256()
    with GGUFFile(out) as file:
        for tensor in sorted(file.tensors.values(), key=lambda each: each.name):
            found.update(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode())
            rows = np.asarray(file.read(tensor.name, 0, tensor.stored.rows))
            if name == "kimi-vl" and re.search("attn_[qk]", tensor.name):
                rows = rows.reshape(2, 2, 4, 2, -1).swapaxes(1, 2)  # heads, axes, pairs, their two rows
            found.update(rows.tobytes())
        kinds = {key: file.kv[key].value for key in file.kv if "projector" in key or "pixels" in key}
    assert kinds == KINDS[name]
    assert found.hexdigest()[:16] == CONVERTED[name]


KINDS: dict[str, dict[str, object]] = {
    "gemma4-clipped": {"clip.vision.projector_type": "gemma4v", "clip.vision.projector.scale_factor": 2},
    "gemma4": {"clip.vision.projector_type": "gemma4v", "clip.vision.projector.scale_factor": 2},
    "kimi-k2.5": {
        "clip.projector_type": "kimik25", "clip.vision.projector.scale_factor": 2,
        "clip.vision.image_min_pixels": 1568, "clip.vision.image_max_pixels": 3211264,
    },
    "kimi-vl": {"clip.projector_type": "kimivl", "clip.vision.projector.scale_factor": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma4", {"use_clipped_linears": True}, "q_proj.input_max: missing"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma4", {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}, "rope_theta is 50.0"),
        ("kimi-vl", {"merge_kernel_size": [4, 1]}, "merge_kernel_size is [4, 1]"),
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


def test_a_tower_for_sound_is_left_out_and_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    made(tmp_path, "gemma4")
    heard = {"model.audio_tower.output_proj.weight": torch.ones(64, 16)}
    save_file(load_file(tmp_path / STORED) | heard, tmp_path / STORED, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"audio_config": {"hidden_size": 16}}))
    ran = qconvert("to-gguf", tmp_path, "--mmproj", "-o", tmp_path / "m.gguf", "-q")
    assert ran.code == 0 and "the tower for sound is left out" in ran.err, ran.err
    ran = qconvert("to-gguf", tmp_path, "--type", "f16", "-o", tmp_path / "l.gguf")
    assert ran.code == 0 and "audio: 1 tensor is left out" in ran.err, ran.err


def test_bounds_may_be_infinite_but_are_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made(tmp_path, "gemma4-clipped")
    command = ("quantize", tmp_path, "--bits", "8", "--group-size", "32", "-o", tmp_path / "int8", "-q")
    assert qconvert(*command).code == 0
    weights = load_file(tmp_path / STORED)
    name = next(name for name, weight in weights.items() if "put_max" in name and weight.isinf())
    assert load_file(tmp_path / "int8" / STORED)[name].isinf()
    save_file(weights | {name: weights[name] * 0}, tmp_path / STORED, {"format": "pt"})
    ran = qconvert(*command, "--overwrite")
    assert ran.code == 1 and f"{name}: NaN or Inf" in ran.err, ran.err


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
