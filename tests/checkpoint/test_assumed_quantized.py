"""Sizes of quantized models from a config.json alone: those of the arrays that other tools wrote."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path

import pytest

from qconvert.checkpoint.assumed import without_weights
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.core.encodings import Quantized
from tests.support.commands import qconvert

INDEX = "model.safetensors.index.json"
# Every layout whose encodings a config tells, as its own tool wrote it.
WRITTEN_BY_OTHERS = (
    "awq-w4-asym-g128", "bnb-nf4", "ct-w4a16-sym-g128", "cut-awq-w4-sym-g128", "cut-bnb-fp4", "cut-bnb-int8",
    "cut-bnb-nf4-dq", "cut-ct-fp8-block", "cut-ct-gptq-w4a16-sym-g128", "cut-ct-mf-mxfp4", "cut-ct-mf-nvfp4",
    "cut-ct-mixed-w4g128-w8ch", "cut-ct-w3a16-g32", "cut-ct-w4a16-asym-g128", "cut-ct-w4a16-sym-g32",
    "cut-ct-w8a16-channel", "cut-ct-w8a8-int8", "cut-fp8-block-hand", "cut-gptq-w2-sym-g32",
    "cut-gptq-w3-sym-g128", "cut-gptq-w4-asym-g128", "cut-gptq-w8-sym-g128", "cut-gptqm-w4-asym-g128-v1",
    "cut-gptqm-w4-asym-g128-v2", "cut-gptqm-w4-sym-g128", "cut-gptqm-w4-sym-g128-descact",
    "cut-mlx-mixed-4-6", "cut-mlx-mxfp4", "cut-mlx-q3-g64", "cut-mlx-q6-g32", "cut-mlx-q8-g64",
    "gptoss-mxfp4", "gptq-w4-sym-g128", "mlx-q4-g64",
)  # fmt: skip


def alone(model: Path, folder: Path, *, index: bool = False) -> Checkpoint:
    """The model of a copy without weights; with an index of them."""
    folder.mkdir()
    shutil.copyfile(model / "config.json", folder / "config.json")
    if index:
        specs = open_checkpoint(model).files.specs
        total = {"total_size": sum(spec.nbytes for spec in specs.values())}
        weight_map = dict.fromkeys(specs, "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": weight_map}))
    found = without_weights(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("name", WRITTEN_BY_OTHERS)
def test_a_config_tells_the_arrays_that_a_tool_wrote(
    assets: Path, tmp_path: Path, name: str, index: bool
) -> None:
    model = assets / "fixtures" / "quantized" / name
    told, there = alone(model, tmp_path / "bare", index=index), open_checkpoint(model)
    assert encodings(told) == encodings(there)
    ours, theirs = told.files.specs, there.files.specs
    assert ours.keys() == theirs.keys()
    for array, spec in ours.items():
        # A number in bitsandbytes' JSON takes as many bytes as it has digits.
        room = 16 if ".quant_state." in array else 0
        assert abs(spec.nbytes - theirs[array].nbytes) <= room, array
    assert told.products == there.products
    assert told.files.warnings[1:] == there.files.warnings[1:]


def encodings(checkpoint: Checkpoint) -> dict[str, object]:
    """Shapes of all tensors, and encodings of the quantized; plain ones may be of the other 16-bit type."""
    found = checkpoint.tensors.values()
    return {t.name: (t.shape, t.encoding if isinstance(t.encoding, Quantized) else None) for t in found}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("cut-fp8-block-hand", ("dequantize",)),
        ("cut-fp8-block-hand", ("convert", "--to", "compressed-tensors")),
        ("gptq-w4-sym-g128", ("convert", "--to", "mlx")),
        ("ct-w4a16-sym-g128", ("to-gguf", "--type", "q4_k_m", "--allow-requantize")),
        ("bnb-nf4", ("to-gguf", "--type", "q8_0", "--allow-requantize")),
        ("gptoss-mxfp4", ("convert", "--to", "compressed-tensors")),
    ],
)
def test_a_dry_run_has_the_sizes_of_one_with_the_weights(
    assets: Path, tmp_path: Path, name: str, command: tuple[str, ...]
) -> None:
    model, bare = assets / "fixtures" / "quantized" / name, tmp_path / name
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    found = []
    for each in (bare, model):
        ran = qconvert(command[0], each, *command[1:], "--dry-run", "--json", "-o", tmp_path / "out.gguf")
        assert ran.code == 0, ran.out
        found.append(ran.json.get("output") or ran.json)
    assert found[0]["bytes"] == found[1]["bytes"] and found[0]["parameters"] == found[1]["parameters"]


def test_published_sizes_of_quantized_models(assets: Path, tmp_path: Path) -> None:
    metadata = assets / "metadata"
    config = metadata / "configs" / "openai--gpt-oss-20b_config.json"
    told = qconvert("inspect", config, "--json").json["bytes"]
    shutil.copyfile(config, tmp_path / "config.json")
    shutil.copyfile(metadata / "index" / f"gpt-oss-20b.{INDEX}", tmp_path / INDEX)
    total = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    found = qconvert("inspect", tmp_path, "--json").json
    assert found["bytes"] == told == total and found["warnings"] == []


@pytest.mark.parametrize(
    ("name", "role", "form"),
    [
        # Experts of four bits beside FP8 (`expert_dtype`), names under `language_model`, settings in
        # `text_config`, and lists of what is left plain with `*`.
        ("deepseek-ai--DeepSeek-V4-Flash", "mlp.experts.gate", ["e2m1-g32"]),
        ("deepseek-ai--DeepSeek-V4-Flash", "mlp.shared.gate", ["e4m3-g128x128"]),
        ("nvidia--DeepSeek-V4-Flash-NVFP4", "mlp.experts.gate", ["e2m1-g16-multiplied"]),
        ("nvidia--DeepSeek-V4-Flash-NVFP4", "attn.q_b", ["e4m3-g128x128"]),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", "delta.qkv", ["bf16"]),
        ("nvidia--Qwen3.6-35B-A3B-NVFP4", "mlp.experts.up", ["e2m1-g16-multiplied"]),
        ("nvidia--Qwen3.6-35B-A3B-NVFP4", "delta.qkv", ["e4m3-tensor"]),
        ("Kimi-K2.5", "mlp.experts.down", ["int4-g32"]),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", "mlp.down", ["e4m3-tensor"]),
        ("Kimi-K2.5", "mlp.shared.down", ["bf16"]),
        ("Qwen--Qwen3-30B-A3B-FP8", "mlp.router", ["bf16"]),
        ("MiniMax-M2.1", "mlp.experts.gate", ["e4m3-g128x128"]),
    ],
)
def test_settings_of_published_models_name_the_right_modules(
    assets: Path, name: str, role: str, form: list[str]
) -> None:
    rows = inspected(assets / "metadata" / "configs" / f"{name}_config.json")
    assert next(row["forms"] for row in rows if row["role"] == role) == form


@lru_cache
def inspected(config: Path) -> list[dict[str, object]]:
    """What is said of the roles of a model; several tests look at the largest."""
    rows: list[dict[str, object]] = qconvert("inspect", config, "--json").json["rows"]
    return rows


def test_what_a_config_does_not_tell_is_said(assets: Path) -> None:
    config = assets / "metadata" / "configs" / "deepseek-ai--DeepSeek-V3_config.json"
    ran = qconvert("inspect", config)
    assert "does not name the type of the FP8 scales: counted as float32" in ran.err
    config = assets / "metadata" / "configs" / "GLM-4.7-EXL3-3.84bpw_config.json"
    assert qconvert("inspect", config, "--json").json["bytes"] == 0
    ran = qconvert("dequantize", config, "--dry-run")
    assert ran.code == 1 and "says exl3, and the sizes of its weights are only in their headers" in ran.err
    assert "Hint: give the whole model folder" in ran.err


def test_an_index_that_lacks_a_quantized_weight_is_refused(assets: Path, tmp_path: Path) -> None:
    model = assets / "fixtures" / "quantized" / "cut-gptq-w4-asym-g128"
    alone(model, tmp_path / "bare", index=True)
    index = json.loads((tmp_path / "bare" / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.scales"]
    (tmp_path / "bare" / INDEX).write_text(json.dumps(index))
    ran = qconvert("inspect", tmp_path / "bare")
    assert ran.code == 1 and "model.layers.1.mlp.up_proj.weight: missing in" in ran.err
