"""Holds what is written for torchao against its own files, and against what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qconvert.formats.io import limits
from tests.layouts.foreign_layouts import FOLDER, LINEARS, int4_numbers, model
from tests.layouts.test_layouts_by_others import logits
from tests.support.commands import made, qconvert
from tests.support.gguf_families import random_model
from tests.support.gguf_models import MOE_SIZES


@pytest.mark.parametrize("name", ["torchao-fp8-tensor", "torchao-int4"])
def test_what_is_written_again_are_the_arrays_and_metadata_of_torchao(name: str, tmp_path: Path) -> None:
    out = made("convert", FOLDER / name, "--to", "torchao", "-o", tmp_path / "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, FOLDER / name))
    assert set(ours) == set(theirs) and all(torch.equal(ours[array], theirs[array]) for array in theirs)
    said, before = (safe_open(f / "model.safetensors", "pt").metadata() for f in (out, FOLDER / name))
    assert said.pop("format") == "pt" and set(said) == set(before)
    names = (json.loads(each.pop("tensor_names")) for each in (said, before))
    assert len({frozenset(each) for each in names}) == 1
    assert {key: json.loads(said[key]) for key in said} == {key: json.loads(before[key]) for key in before}


def test_torchao_holds_no_stacks_of_experts(tmp_path: Path) -> None:
    random_model(tmp_path / "m", "Qwen3Moe", head_dim=32, **MOE_SIZES)
    out = made("convert", tmp_path / "m", "--to", "torchao", "--scheme", "int4-g32", "-o", tmp_path / "out")
    ran = qconvert("fuse", out, "--only", "experts", "-o", tmp_path / "stacked")
    assert ran.code == 1 and "a stack of 4 experts" in ran.err and not (tmp_path / "stacked").exists()


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("int4-g32", "Int4Tensor"),
        ("int4-asym-g32", "Int4Tensor"),
        ("int4-channel", "IntxUnpackedToInt8Tensor"),
        ("int3-asym-g32", "IntxUnpackedToInt8Tensor"),
        ("int8-channel", "IntxUnpackedToInt8Tensor"),
        ("fp8-channel", "Float8Tensor"),
        ("fp8-tensor", "Float8Tensor"),
    ],
)
def test_transformers_loads_what_is_written_for_torchao(scheme: str, kind: str, tmp_path: Path) -> None:
    """In several files; packed int4 is multiplied on GPUs alone, and so its numbers are compared."""
    pytest.importorskip("torchao", reason="has the classes that transformers loads")
    from transformers import AutoModelForCausalLM

    mixed = () if "fp8" in scheme else ("--rule", "down_proj=int8-g32")
    asked = ("--scheme", scheme, *mixed, "--shard-size", "20KB")
    out = made("quantize", model(tmp_path / "m"), "--layout", "torchao", *asked, "-o", tmp_path / "out")
    assert len(list(out.glob("*.safetensors"))) > 1
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    expected = load_file(plain / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for base in LINEARS:
        weight = loaded.get_submodule(base).weight
        own = kind if not mixed or "down_proj" not in base else "IntxUnpackedToInt8Tensor"
        assert type(weight).__name__ == own and weight.dtype is torch.bfloat16
        found = int4_numbers(weight) if own == "Int4Tensor" else weight.dequantize()
        torch.testing.assert_close(found.float(), expected[f"{base}.weight"], rtol=2**-8, atol=0)
    if kind != "Int4Tensor":
        found = loaded(torch.arange(12)[None] * 5 % 64).logits.float()
        torch.testing.assert_close(found, logits(out), rtol=0, atol=0.03)


def test_what_two_schemes_leave_out_is_the_one_of_most_linears(tmp_path: Path) -> None:
    """vLLM looks up the names of its stacks, `qkv_proj`, which no file has."""
    asked = ("--scheme", "int8-channel", "--rule", "down_proj=int4-channel")
    out = made("quantize", model(tmp_path / "m"), "--layout", "torchao", *asked, "-o", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    kinds = {
        name: each["_data"]["weight_dtype"]["_data"]
        for name, each in settings["_data"]["fqn_to_config"].items()
    }
    assert kinds.pop("_default") == "int8"
    assert kinds == {base: "int4" if "down_proj" in base else "int8" for base in LINEARS}


def test_more_tensors_than_headers_are_read_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of every file names all of them: 20,000 linears of an expert's size are 9 MB in each."""
    source, words = model(tmp_path / "m"), ("--layout", "torchao", "--scheme", "int8-channel", "--dry-run")
    monkeypatch.setattr(limits, "METADATA_KEYS", 14)
    ran = qconvert("quantize", source, *words)
    assert ran.code == 1 and " 15 metadata in " in ran.err and "write another layout" in ran.err
    monkeypatch.setattr(limits, "METADATA_KEYS", 15)
    assert qconvert("quantize", source, *words).code == 0
