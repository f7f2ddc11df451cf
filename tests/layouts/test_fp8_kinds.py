"""FP8 in blocks with power-of-two scales (ue8m0), FBGEMM's FP8 per row, and the cache scales beside FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook, ModelTensor
from qconvert.formats.layouts import registry
from qconvert.quant.dequantize import numbers
from tests.support.commands import made, qconvert
from tests.support.foreign import weights
from tests.support.models import stored, tiny

Q = "model.layers.0.self_attn.q_proj"


def rewritten(folder: Path, settings: dict[str, Any], change: Any) -> Path:
    """A folder with other quantization settings, and with arrays that are changed one by one."""
    arrays = {}
    for name, array in load_file(folder / "model.safetensors").items():
        arrays |= change(name, array)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "qconvert.json").unlink()
    return folder


def powers_of_two(folder: Path, dtype: torch.dtype) -> Path:
    """As DeepSeek stores V3.1 (float32) and V4 (float8_e8m0fnu): scales rounded up to powers of two."""
    out = made("convert", tiny(folder / "m", num_hidden_layers=1), "--to", "fp8", "-o", folder / "q")

    def change(name: str, array: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith("_scale_inv"):
            array = torch.exp2(torch.ceil(torch.log2(array.float()))).to(dtype)
        return {name: array}

    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    return rewritten(out, settings | {"scale_fmt": "ue8m0"}, change)


def fbgemm(folder: Path) -> Path:
    """As transformers saves `FbgemmFp8Linear`: rows, their scales [N, 1] in float32."""
    plain = tiny(folder / "m", num_hidden_layers=1)
    out = made("convert", plain, "--to", "compressed-tensors", "--scheme", "fp8", "-o", folder / "q")
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": None}
    return rewritten(out, settings, lambda n, a: {n: a.float() if n.endswith("_scale") else a})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu], ids=str)
def test_scales_of_powers_of_two(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = powers_of_two(tmp_path, dtype)
    arrays, checkpoint = load_file(folder / "model.safetensors"), open_checkpoint(folder)
    scale = arrays[f"{Q}.weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (arrays[f"{Q}.weight"].float() * scale).numpy()
    tensor = checkpoint.tensors[f"{Q}.weight"]
    np.testing.assert_array_equal(
        numbers(checkpoint.reader.read(tensor, 0, 256), DType.F32).rows_RI, expected
    )
    inputs = CheckpointWeights(checkpoint).inputs("attn.q", 0)
    assert (
        inputs is not None and inputs.scheme.scale_dtype is DType.F8_E8M0 and inputs.scheme.group_size == 128
    )
    same = made("untie", folder, "-o", tmp_path / "same")
    assert {k: v for k, v in stored(same).items() if k != "lm_head.weight"} == stored(folder)
    again = made("convert", folder, "--to", "fp8", "-o", tmp_path / "again")
    for other in (same, again):
        settings = json.loads((other / "config.json").read_text())["quantization_config"]
        assert settings["scale_fmt"] == "ue8m0"
    for layout in ("compressed-tensors", "modelopt", "fp8"):
        out = made("convert", folder, "--to", layout, "-o", tmp_path / layout)
        np.testing.assert_array_equal(weights(out)[f"{Q}.weight"][0], expected)
        back = made("convert", out, "--to", "fp8", "-o", tmp_path / f"{layout}-back")
        np.testing.assert_array_equal(weights(back)[f"{Q}.weight"][0], expected)
    kinds = json.loads((tmp_path / "modelopt" / "qconvert.json").read_text())["tensors"]
    assert {entry["certificate"]["kind"] for entry in kinds.values()} == {"exact"}


def test_transformers_computes_the_same_numbers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = powers_of_two(tmp_path, torch.float8_e8m0fnu)
    arrays = load_file(folder / "model.safetensors")
    given = {"weight": [arrays[f"{Q}.weight"]], "weight_scale_inv": [arrays[f"{Q}.weight_scale_inv"]]}

    class Config:
        weight_block_size = (128, 128)

    class Quantizer:
        quantization_config = Config()

    found = Fp8Dequantize(Quantizer()).convert(given, full_layer_name=f"{Q}.weight")
    (theirs,) = (a for a in found.values())
    theirs = theirs[0] if isinstance(theirs, list) else theirs
    plain = made("dequantize", folder, "--dtype", "bf16", "-o", tmp_path / "plain")
    ours = load_file(plain / "model.safetensors")[f"{Q}.weight"]
    assert torch.equal(theirs.to(torch.bfloat16), ours)


def test_rows_of_fbgemm(tmp_path: Path) -> None:
    folder = fbgemm(tmp_path)
    arrays = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization == "fbgemm_fp8 (e4m3-channel)"
    assert [str(each) for each in checkpoint.products] == ["W8A8 (inputs fp8 per token up to 1200)"]
    expected = (arrays[f"{Q}.weight"].float() * arrays[f"{Q}.weight_scale"]).numpy()
    out = made("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    assert stored(out) == stored(folder)
    np.testing.assert_array_equal(weights(out)[f"{Q}.weight"][0], expected)
    other = made("convert", folder, "--to", "modelopt", "-o", tmp_path / "mo")
    np.testing.assert_array_equal(weights(other)[f"{Q}.weight"][0], expected)
    ran = qconvert("convert", folder, "--to", "fp8", "-o", tmp_path / "f")
    assert ran.code == 1 and "is not FP8 in blocks of 128 by 128" in ran.err
    assert qconvert("check", folder, "--for", "transformers").code in (0, 3)


def test_the_bound_of_fbgemm_s_inputs_is_kept_or_named(tmp_path: Path) -> None:
    folder = fbgemm(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["activation_scale_ub"] = 512.0
    (folder / "config.json").write_text(json.dumps(config))
    ran = qconvert("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    assert ran.code == 0 and "inputs are cut to 512; no loader of this layout cuts them" in ran.err
    same = made("convert", folder, "--to", "fbgemm_fp8", "-o", tmp_path / "same")
    assert stored(same) == stored(folder)
    assert json.loads((same / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 512.0,
        "modules_to_not_convert": ["lm_head"],
    }
    back = made("convert", tmp_path / "ct", "--to", "fbgemm_fp8", "-o", tmp_path / "back")
    assert stored(back) == stored(folder)
    settings = json.loads((back / "config.json").read_text())["quantization_config"]
    assert settings["activation_scale_ub"] == 1200.0


@pytest.mark.parametrize("wrong", ["1200", -1, 0, True, None, [1200.0], 10**400, float("nan")])
def test_a_bound_that_is_none_is_none(wrong: Any, tmp_path: Path) -> None:
    tensor = ModelTensor("x.weight", (8, 8), Codebook("e4m3", None, DType.F32, DType.BF16))
    config = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": wrong}}
    scheme = registry.activations(config, tensor)
    assert scheme is not None and scheme.most is None


def test_transformers_linears_of_fbgemm_take_what_is_written(tmp_path: Path) -> None:
    """The class of the layout; its kernels need a GPU, its numbers are codes times scales of rows."""
    from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear

    plain = tiny(tmp_path / "m", num_hidden_layers=1)
    out = made("convert", plain, "--to", "fbgemm_fp8", "-o", tmp_path / "out")
    arrays = load_file(out / "model.safetensors")
    own = {name.removeprefix(f"{Q}."): array for name, array in arrays.items() if name.startswith(f"{Q}.")}
    linear = FbgemmFp8Linear(own["weight"].shape[1], own["weight"].shape[0], bias=False)
    linear.load_state_dict(own, strict=True)
    assert linear.weight.dtype is torch.float8_e4m3fn and linear.weight_scale.dtype is torch.float32
    before = load_file(plain / "model.safetensors")[f"{Q}.weight"].float()
    found = linear.weight.float() * linear.weight_scale
    assert ((found - before).abs() <= before.abs().amax(1, keepdim=True) / 28 * 1.01).all()
    assert torch.equal(linear.weight_scale, before.abs().amax(1, keepdim=True) / 448)
    ran = qconvert("check", out, "--for", "vllm", "--json")
    assert "--allow-deprecated-quantization" in ran.out


def test_cache_scales_beside_blocks_go_along(tmp_path: Path) -> None:
    folder = powers_of_two(tmp_path, torch.float32)
    arrays, layer = load_file(folder / "model.safetensors"), "model.layers.0.self_attn"
    arrays |= {f"{layer}.{which}_scale": torch.tensor([0.125 + (which == "v")]) for which in "kv"}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    out = made("convert", folder, "--to", "modelopt", "-o", tmp_path / "mo")
    found = load_file(out / "model.safetensors")
    assert (float(found[f"{layer}.k_proj.k_scale"]), float(found[f"{layer}.v_proj.v_scale"])) == (
        0.125,
        1.125,
    )
    file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert (file["quant_algo"], file["kv_cache_quant_algo"]) == ("FP8_PB_WO", "FP8")
    ran = qconvert(
        "convert", folder, "--to", "gguf", "--scheme", "q8_0", "--allow-requantize", "-o", tmp_path / "g.gguf"
    )
    assert ran.code == 0 and f"{layer}.k_scale and 1 more scales" in ran.err


def test_real_settings_files_name_the_method(tmp_path: Path, assets: Path) -> None:
    found = 0
    for file in sorted((assets / "metadata" / "configs").glob("*_hf_quant_config.json")):
        settings = json.loads(file.read_text())
        assert registry.claimed_method({"quantization_config": settings}) == "modelopt", file.name
        found += 1
    assert found >= 20
