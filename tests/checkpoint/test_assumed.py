"""Sizes from a config.json alone, and from config and index: those of the weights that they promise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint.assumed import without_weights
from qconvert.errors import QConvertError
from tests.support.commands import qconvert
from tests.support.models import tiny
from tests.support.vision_towers import TOWERS
from tests.support.vision_towers import made as made_with_tower

INDEX = "model.safetensors.index.json"


def emptied(model: Path, folder: Path, *, index: bool = False) -> Path:
    """A copy of a model folder without its weights; with an index of shards that are not there."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if index:
        checkpoint = json.loads(qconvert("inspect", model, "--json", "--tensors").out)
        names = [tensor["name"] for tensor in checkpoint["tensor_list"]]
        total = {"total_size": checkpoint["bytes"]}
        weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": weight_map}))
    return folder


def planned(*command: object) -> dict[str, Any]:
    ran = qconvert(*command, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    return dict(ran.json)


COMMANDS = (
    ("quantize", "--bits", 4, "--group-size", 32),
    ("quantize", "--bits", 8, "--rule", "embed=int8", "--fuse", "qkv"),
    ("convert", "--to", "mlx", "--scheme", "int4-asym-g64"),
    ("to-gguf", "--type", "q4_k_m"),
    ("to-gguf", "--type", "q8_0"),
)


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_dry_run_without_weights_has_the_sizes_of_one_with_them(
    tmp_path: Path, family: str, index: bool
) -> None:
    model = tiny(tmp_path / "here" / "m", family, tied=family == "qwen3")
    bare = emptied(model, tmp_path / "away" / "m", index=index)
    for command, *wish in COMMANDS:
        ours, theirs = planned(command, bare, *wish), planned(command, model, *wish)
        assert ours.pop("from") == (f"config.json and {INDEX}" if index else "config.json")
        assert ours == theirs, command


def test_a_config_that_is_named_itself_gives_outputs_the_name_of_its_folder(tmp_path: Path) -> None:
    bare = emptied(tiny(tmp_path / "here" / "m"), tmp_path / "away" / "m", index=False)
    for command, *wish in COMMANDS:
        named = planned(command, bare / "config.json", *wish)
        assert named["out"] == planned(command, bare, *wish)["out"]


def test_linears_stored_input_major_have_their_sizes_too(assets: Path, tmp_path: Path) -> None:
    for name in ("gpt2", "mixtral", "internlm2"):
        model = assets / "fixtures" / "zoo" / name
        config = json.loads((model / "config.json").read_text())
        bare = tmp_path / name
        bare.mkdir()
        (bare / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
        wish = ("--bits", 4, "--group-size", 32, "--dtype", "f32")
        ours, theirs = planned("quantize", bare, *wish), planned("quantize", model, *wish)
        assert ours["output"]["bytes"] == theirs["output"]["bytes"]
        assert ours["files"] == theirs["files"]


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("index", [False, True])
def test_a_vision_tower_is_counted(tmp_path: Path, name: str, index: bool) -> None:
    """Models that transformers has made: every array, and every byte."""
    made_with_tower(tmp_path / "here", name)
    bare = emptied(tmp_path / "here", tmp_path / "away", index=index)
    ours, theirs = (qconvert("inspect", folder, "--json").json for folder in (bare, tmp_path / "here"))
    assert (ours["bytes"], ours["parameters"]) == (theirs["bytes"], theirs["parameters"])
    assert not any("vision" in warning or "language" in warning for warning in ours["warnings"])
    wish = ("quantize", "--bits", 4, "--group-size", "channel")
    sizes = [planned(wish[0], folder, *wish[1:])["output"]["bytes"] for folder in (bare, tmp_path / "here")]
    assert sizes[0] == sizes[1]


def test_check_splits_a_model_by_its_config_alone(assets: Path, tmp_path: Path) -> None:
    configs = assets / "metadata" / "configs"
    alone = "note: weights: judged from config.json only: names and shapes are what it promises"
    for name, tp, said in (
        ("Qwen--Qwen3-30B-A3B-FP8", 8, "768 columns on 8 ranks are 96 each, not a multiple of 128"),
        ("Qwen--Qwen3-30B-A3B-FP8", 2, "OK: vllm should load this"),
        ("Qwen2.5-VL", 2, "OK: vllm should load this"),
    ):
        ran = qconvert("check", configs / f"{name}_config.json", "--for", "vllm", "--tp", tp)
        assert ran.code == (0 if said.startswith("OK") else 3) and said in ran.out and alone in ran.out
        assert "not a tensor of" not in ran.out
    made_with_tower(tmp_path / "whole", "qwen2.5-vl")
    ran = qconvert("check", tmp_path / "whole", "--for", "vllm")
    assert ran.code == 0 and "visual" not in ran.out and "alone" not in ran.out


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3.5-25B-REAP-A3B"])
def test_published_sizes_are_met_to_the_byte(assets: Path, tmp_path: Path, name: str) -> None:
    metadata = assets / "metadata"
    shutil.copyfile(metadata / "configs" / f"{name}_config.json", tmp_path / "config.json")
    shutil.copyfile(metadata / "index" / f"{name}.{INDEX}", tmp_path / INDEX)
    index = json.loads((tmp_path / INDEX).read_text())
    found = qconvert("inspect", tmp_path, "--json").json
    assert found["bytes"] == index["metadata"]["total_size"] and found["warnings"] == []
    assert planned("quantize", tmp_path, "--bits", 4)["output"]["parameters"] == found["parameters"]


def test_the_file_of_the_config_is_enough(assets: Path) -> None:
    config = assets / "metadata" / "configs" / "Qwen3-4B_config.json"
    found = planned("to-gguf", config, "--type", "q4_k_m")
    counts = {row["type"]: row["parameters"] for row in found["types"]}
    # The head and half of attn_v and ffn_down are q6_k: llama_tensor_get_type in llama-quant.cpp.
    assert counts["q6_k"] == 151_936 * 2560 + 18 * (1024 * 2560 + 2560 * 9728)
    assert found["bytes"] == counts["q6_k"] * 210 // 256 + counts["q4_k"] * 144 // 256 + 4 * counts["f32"]
    ran = qconvert("to-gguf", config, "--type", "q4_k_m", "--dry-run")
    assert "Warning: the tokenizer is not here" in ran.err
    assert ran.err.endswith("dry run: nothing was written; planned from config.json only\n")


def test_an_index_says_what_a_number_takes(tmp_path: Path) -> None:
    bare = emptied(tiny(tmp_path / "m", "qwen3"), tmp_path / "bare", index=True)
    index = json.loads((bare / INDEX).read_text())
    config = json.loads((bare / "config.json").read_text())
    total = index["metadata"]["total_size"]
    for claimed, counted, dtype, said in (
        ("bfloat16", total, "bf16", ""),
        ("bfloat16", 2 * total, "f32", "counts 4 bytes for each number: assumed to be f32"),
        (None, total, "bf16", "counts 2 bytes for each number: assumed to be bf16"),
        ("bfloat16", total + 2, "bf16", f"counts {total + 2:,} bytes, its tensors in bf16 have {total:,}"),
    ):
        index["metadata"]["total_size"] = counted
        (bare / INDEX).write_text(json.dumps(index))
        (bare / "config.json").write_text(json.dumps(config | {"torch_dtype": claimed}))
        found = qconvert("inspect", bare, "--json").json
        assert {form for row in found["rows"] for form in row["forms"]} == {dtype}
        assert said in " ".join(found["warnings"]) and bool(found["warnings"]) == bool(said)


def test_a_config_without_a_dtype_is_counted_as_transformers_loads_it(tmp_path: Path) -> None:
    bare = emptied(tiny(tmp_path / "m", "qwen3"), tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text())
    del config["torch_dtype"]
    (bare / "config.json").write_text(json.dumps(config))
    found = qconvert("inspect", bare, "--json").json
    assert found["bytes"] == 4 * found["parameters"]
    assert found["warnings"] == ["config.json names no dtype: counted as float32"]


def test_what_is_not_of_the_language_model_is_told_with_its_bytes(tmp_path: Path) -> None:
    bare = emptied(tiny(tmp_path / "m", "qwen3"), tmp_path / "bare", index=True)
    index = json.loads((bare / INDEX).read_text())
    before = index["metadata"]["total_size"]
    index["metadata"]["total_size"] += 12_345
    index["weight_map"] |= {f"visual.{n}.weight": "model-00001-of-00002.safetensors" for n in range(3)}
    (bare / INDEX).write_text(json.dumps(index))
    found = qconvert("inspect", bare, "--json").json
    assert found["bytes"] == before
    assert found["warnings"] == [
        f"{INDEX}: 3 of its tensors are not of the language model (visual.0.weight, ...), take 12,345 bytes, "
        "and are not counted here"
    ]


def test_an_index_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    bare = emptied(tiny(tmp_path / "m", "qwen3"), tmp_path / "bare", index=True)
    index = json.loads((bare / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (bare / INDEX).write_text(json.dumps(index))
    ran = qconvert("inspect", bare)
    assert ran.code == 1 and "model.layers.1.mlp.up_proj.weight: missing" in ran.err


def test_only_a_dry_run_does_without_weights(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen3")
    bare, indexed = emptied(model, tmp_path / "bare"), emptied(model, tmp_path / "indexed", index=True)
    ran = qconvert("quantize", bare, "--bits", 4, "-o", tmp_path / "out")
    assert ran.code == 1 and "no weights beside the config.json" in ran.err
    ran = qconvert("quantize", indexed, "--bits", 4, "-o", tmp_path / "out")
    assert ran.code == 1 and "(2 of 2 shards are missing)" in ran.err
    (indexed / "model-00001-of-00002.safetensors").symlink_to("nowhere")
    ran = qconvert("quantize", indexed, "--bits", 4, "--dry-run")
    assert ran.code == 1, "a broken download is no config alone"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "beside", ["adapter_config.json", "pytorch_model.bin", "model.gguf", "optimizer.safetensors"]
)
def test_a_folder_that_holds_something_else_is_not_a_config_alone(tmp_path: Path, beside: str) -> None:
    bare = emptied(tiny(tmp_path / "m", "qwen3"), tmp_path / "bare")
    (bare / beside).write_text("{}")
    assert without_weights(bare) is None and without_weights(bare / "config.json") is None
    with pytest.raises(QConvertError, match=r"holds|x\.safetensors: has 2 bytes"):
        from qconvert.checkpoint.open import open_checkpoint

        open_checkpoint(bare)
