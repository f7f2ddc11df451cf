"""FP8 with one scale for a whole weight: as Ministral 3 and Devstral 2 are published, and as AutoFP8 writes.

transformers' reader says what the numbers are; compressed-tensors, what is written of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.quant.dequantize import numbers
from tests.support.commands import made, qconvert
from tests.support.models import stored, tiny

Q = "model.layers.0.self_attn.q_proj"
NAMES = {"transformers": ("weight_scale_inv", "activation_scale"), "autofp8": ("weight_scale", "input_scale")}


def published(folder: Path, kind: str = "transformers", scheme: str = "static", *, one: bool = False) -> Path:
    """A model whose linears are FP8, its numbers in bfloat16 scalars (or, with `one`, float32 [1])."""
    source = tiny(folder / "m", num_hidden_layers=2)
    arrays, (scales, inputs) = {}, NAMES[kind]
    for name, array in load_file(source / "model.safetensors").items():
        base = name.removesuffix("weight")
        if not name.endswith("_proj.weight"):
            arrays[name] = array
            continue
        scale = (array.float().abs().max() / 448).to(torch.float32 if one else torch.bfloat16)
        arrays[name] = (array.float() / scale.float()).to(torch.float8_e4m3fn)
        arrays[base + scales] = scale.reshape(1) if one else scale
        if scheme == "static":
            arrays[base + inputs] = torch.tensor(0.0625).to(scale.dtype).reshape(arrays[base + scales].shape)
    save_file(arrays, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": scheme}
    if kind == "transformers":
        settings |= {"weight_block_size": None, "modules_to_not_convert": ["lm_head"], "dequantize": False}
    else:
        settings |= {"ignored_layers": ["lm_head"]}
    config["quantization_config"] = settings
    (source / "config.json").write_text(json.dumps(config))
    return source


def decoded(folder: Path, name: str = f"{Q}.weight") -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors[name]
    return numbers(checkpoint.reader.read(tensor, 0, tensor.rows), DType.F32).rows_RI


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("kind", NAMES)
def test_numbers_are_codes_times_the_scale(tmp_path: Path, kind: str, scheme: str) -> None:
    folder = published(tmp_path, kind, scheme, one=kind == "autofp8")
    arrays = load_file(folder / "model.safetensors")
    expected = arrays[f"{Q}.weight"].float() * arrays[f"{Q}.{NAMES[kind][0]}"].float()
    np.testing.assert_array_equal(decoded(folder), expected.numpy())
    ran = qconvert("inspect", folder, "--json")
    assert ran.json["quantization"] == "fp8 (e4m3-tensor)" and ran.json["unknown"] == []
    assert ran.json["products"] == [
        "W8A8 (inputs static fp8)" if scheme == "static" else "W8A8 (inputs fp8 per token)"
    ]


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = published(tmp_path, scheme="dynamic")
    settings = transformers.FineGrainedFP8Config(
        dequantize=True, weight_block_size=None, modules_to_not_convert=["lm_head"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings
    )
    theirs = {n: p.detach().float().numpy() for n, p in model.named_parameters()}
    for name in (f"{Q}.weight", "model.layers.1.mlp.down_proj.weight"):
        # their product is rounded once to the type of the scale
        np.testing.assert_allclose(theirs[name], decoded(folder, name), rtol=2**-8)


@pytest.mark.parametrize("kind", NAMES)
def test_codes_and_scales_of_inputs_go_to_compressed_tensors(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    folder = published(tmp_path, kind)
    out = made("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert torch.equal(before[f"{Q}.weight"].view(torch.uint8), after[f"{Q}.weight"].view(torch.uint8))
    assert float(after[f"{Q}.input_scale"]) == 0.0625
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert set(model.config.quantization_config.quantization_config.ignore) == {"lm_head"}
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_copy_has_the_same_settings_and_arrays(tmp_path: Path, kind: str, scheme: str) -> None:
    folder = published(tmp_path, kind, scheme, one=kind == "autofp8")
    same = made("untie", folder, "-o", tmp_path / "same")
    here, there = stored(folder), stored(same)
    coded = {n for n in here if n.endswith(("_proj.weight", NAMES[kind][0]))}
    assert {n: there[n] for n in coded} == {n: here[n] for n in coded}
    assert set(there) == {*here, "lm_head.weight"}
    before, after = (
        json.loads((each / "config.json").read_text())["quantization_config"] for each in (folder, same)
    )
    shared = ("quant_method", "activation_scheme", "weight_block_size", "ignored_layers")
    assert {k: after.get(k) for k in shared} == {k: before.get(k) for k in shared}
    np.testing.assert_array_equal(decoded(same), decoded(folder))


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = published(tmp_path)
    arrays = load_file(folder / "model.safetensors")
    arrays.pop(f"{Q}.activation_scale")
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    ran = qconvert("inspect", folder)
    assert ran.code == 1 and f"{Q}.activation_scale: missing, but activation_scheme is static" in ran.err
