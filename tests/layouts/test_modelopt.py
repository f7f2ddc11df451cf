"""NVIDIA ModelOpt's layout: files of its exporter, its numbers and bytes; to compressed-tensors and back.

The folders of tests/modelopt are made by tests/layouts/modelopt_files.py with ModelOpt 0.47.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.dequantize import numbers
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.layouts.modelopt_files import FOLDER, configs, source
from tests.support.commands import made, qconvert
from tests.support.foreign import weights
from tests.support.models import stored

NAMES = ("fp8-blocks", "fp8-kv", "fp8-rows", "int4-awq", "mixed", "mxfp8", "nvfp4")
FORMS = {
    "fp8-blocks": "e4m3-g128x128",
    "fp8-kv": "e4m3-tensor",
    "fp8-rows": "e4m3-channel",
    "int4-awq": "int4-g32",
    "mixed": "e2m1-g16-multiplied, e4m3-tensor",
    "mxfp8": "e4m3-g32",
    "nvfp4": "e2m1-g16-multiplied",
}
ATTENTION = "model.layers.0.self_attn"
O_PROJ, GATE = f"{ATTENTION}.o_proj", "model.layers.0.mlp.gate_proj"


def copied(name: str, to: Path, **changes: Any) -> Path:
    """A folder of the exporter's, with other tensors: None leaves one out."""
    shutil.copytree(FOLDER / name, to)
    if changes:
        arrays = load_file(to / "model.safetensors")
        for key, array in changes.items():
            arrays.pop(key, None)
            if array is not None:
                arrays[key] = array
        save_file(arrays, to / "model.safetensors", {"format": "pt"})
    return to


def said(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_that_modelopt_reads(name: str) -> None:
    checkpoint = open_checkpoint(FOLDER / name)
    assert checkpoint.quantization == f"modelopt ({FORMS[name]})"
    expected = json.loads((FOLDER / name / "dequantized.json").read_text())
    assert len(expected) == (0 if name == "int4-awq" else 7)
    for weight, digest in expected.items():
        tensor = checkpoint.tensors[weight]
        value = checkpoint.reader.read(tensor, 0, tensor.rows)
        plain = numbers(value, DType.F32).rows_RI
        assert hashlib.sha256(np.ascontiguousarray(plain + 0).tobytes()).hexdigest() == digest, weight
        part = numbers(checkpoint.reader.read(tensor, 5, 23), DType.F32).rows_RI
        np.testing.assert_array_equal(part, plain[5:23])


def test_integers_are_two_rows_to_a_byte_and_columns_are_scaled_where_inputs_are() -> None:
    arrays = load_file(FOLDER / "int4-awq" / "model.safetensors")
    checkpoint = open_checkpoint(FOLDER / "int4-awq")
    for base in (O_PROJ, GATE):
        bytes_BI = arrays[f"{base}.weight"].to(torch.int16)
        codes = torch.stack([bytes_BI & 15, bytes_BI >> 4], dim=1).flatten(0, 1)
        codes = torch.where(codes > 7, codes - 16, codes).float()
        expected = codes * arrays[f"{base}.weight_scale"].repeat_interleave(32, dim=1)
        if (scale := arrays.get(f"{base}.pre_quant_scale")) is not None:
            expected = expected * scale.float()
        tensor = checkpoint.tensors[f"{base}.weight"]
        value = checkpoint.reader.read(tensor, 3, 17)
        assert isinstance(value, DenseRows) == (base == O_PROJ)
        np.testing.assert_array_equal(numbers(value, DType.F32).rows_RI, expected[3:17].numpy())
    ran = qconvert("inspect", FOLDER / "int4-awq")
    down = O_PROJ.replace("self_attn.o", "mlp.down")
    assert f"{down}.weight and 1 more: int4-g32, and inputs are scaled before" in ran.out + ran.err


@pytest.mark.parametrize(
    ("name", "scheme"), [("fp8-rows", "fp8"), ("fp8-blocks", "fp8-block"), ("nvfp4", "nvfp4")]
)
def test_new_codes_are_the_bytes_of_modelopts_exporter(name: str, scheme: str, tmp_path: Path) -> None:
    plain = source(tmp_path / "m", name)
    out = made("convert", plain, "--to", "modelopt", "--scheme", scheme, "-o", tmp_path / "q")
    ours, theirs = stored(out), stored(FOLDER / name)
    inputs = {key for key in theirs if key.endswith("input_scale")}
    assert set(ours) == set(theirs) - inputs and len(inputs) == (7 if name == "nvfp4" else 0)
    different = [key for key in ours if ours[key] != theirs[key]]
    assert different == []
    again = made("quantize", plain, "--layout", "modelopt", "--scheme", scheme, "-o", tmp_path / "again")
    assert stored(again) == ours


@pytest.mark.parametrize("name", ["fp8-kv", "fp8-rows", "fp8-blocks", "nvfp4", "mixed"])
def test_to_compressed_tensors_and_back(name: str, tmp_path: Path) -> None:
    before = stored(FOLDER / name)
    between = made("convert", FOLDER / name, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    back = made("convert", between, "--to", "modelopt", "-o", tmp_path / "back")
    after = stored(back)
    assert set(after) == set(before)
    inverse = [key for key in before if key.endswith("weight_scale_2") or _of_nvfp4_inputs(key, before)]
    assert [key for key in before if key not in inverse and before[key] != after[key]] == []
    for key in inverse:  # one over one over it
        a, b = (float(load_file(f / "model.safetensors")[key]) for f in (FOLDER / name, back))
        assert abs(a - b) <= 2**-23 * abs(a)
    ours, theirs = said(back), said(FOLDER / name)
    assert ours.pop("group_size", 16) == 16 and set(theirs.pop("ignore")) >= set(ours.pop("ignore")) - {
        "lm_head"
    }
    theirs["quant_algo"] = theirs["quant_algo"].upper()
    assert ours == theirs
    files = [json.loads((f / "hf_quant_config.json").read_text()) for f in (FOLDER / name, back)]
    for file in files:
        file["quantization"].pop("exclude_modules", None)
        file["quantization"]["quant_algo"] = file["quantization"]["quant_algo"].upper()
    assert files[0] == files[1]
    numbers_of = weights(between)
    for key, (plain, _) in weights(FOLDER / name).items():
        exact = name not in ("nvfp4", "mixed")
        np.testing.assert_allclose(numbers_of[key][0], plain, rtol=0 if exact else 2e-7, atol=0)


def _of_nvfp4_inputs(key: str, arrays: Any) -> bool:
    return key.endswith("input_scale") and key.replace("input_scale", "weight_scale_2") in arrays


def test_what_loaders_compute_is_the_same_on_both_sides(tmp_path: Path) -> None:
    for name, labels in (
        ("fp8-kv", "static fp8"),
        ("nvfp4", "fp4 per group of 16"),
        ("fp8-rows", "fp8 per token"),
    ):
        out = made("convert", FOLDER / name, "--to", "compressed-tensors", "-o", tmp_path / name)
        found = []
        for folder in (FOLDER / name, out):
            checkpoint = open_checkpoint(folder)
            inputs = CheckpointWeights(checkpoint).inputs("attn.o", 0)
            assert inputs is not None and inputs.scheme.label == labels
            found.append(inputs)
        assert found[0].scheme.computed == found[1].scheme.computed
        assert found[0].scale == pytest.approx(found[1].scale, rel=2e-7)


def test_the_decoder_runs_it_as_it_runs_compressed_tensors(tmp_path: Path) -> None:
    for name in ("fp8-kv", "nvfp4"):
        out = made("convert", FOLDER / name, "--to", "compressed-tensors", "-o", tmp_path / name)
        ours, theirs = (_logits(folder) for folder in (FOLDER / name, out))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def _logits(folder: Path) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    return np.asarray(decoder.logits(decoder.hidden(torch.arange(24)[None])))


def test_scales_of_the_cache_are_carried_or_named(tmp_path: Path) -> None:
    before = load_file(FOLDER / "fp8-kv" / "model.safetensors")
    between = made("convert", FOLDER / "fp8-kv", "--to", "compressed-tensors", "-o", tmp_path / "ct")
    after = load_file(between / "model.safetensors")
    for which in "kv":
        assert after[f"{ATTENTION}.{which}_scale"] == before[f"{ATTENTION}.{which}_proj.{which}_scale"]
    scheme = said(between)["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "tensor")
    ran = qconvert("convert", between, "--to", "bf16", "-o", tmp_path / "plain")
    named = f"{ATTENTION}.k_scale and 1 more scales: of keys and values in a cache, left out"
    assert ran.code == 0 and named in ran.err
    record = json.loads((tmp_path / "plain" / "qconvert.json").read_text())
    assert any(named in line for line in record["warnings"])
    assert named in (tmp_path / "plain" / "README.md").read_text()
    assert not any(key.endswith("k_scale") for key in stored(tmp_path / "plain"))


def test_without_a_scale_of_inputs_each_row_gets_the_scale_of_the_tensor(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "nvfp4")
    coded = made(
        "convert", model, "--to", "compressed-tensors", "--scheme", "fp8-tensor", "-o", tmp_path / "ct"
    )
    out = made("convert", coded, "--to", "modelopt", "-o", tmp_path / "q")
    assert said(out)["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    ours, theirs = weights(out), weights(coded)
    for key, (plain, _) in theirs.items():
        np.testing.assert_array_equal(ours[key][0], plain)
    nvfp4 = made("convert", model, "--to", "compressed-tensors", "--scheme", "nvfp4", "-o", tmp_path / "n")
    assert (
        said(made("convert", nvfp4, "--to", "modelopt", "-o", tmp_path / "w"))["quant_algo"] == "W4A16_NVFP4"
    )


def test_the_file_beside_config_json_is_enough(tmp_path: Path) -> None:
    for name in ("fp8-kv", "mixed"):
        folder = copied(name, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        config.pop("quantization_config")
        (folder / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder)
        assert checkpoint.quantization == f"modelopt ({FORMS[name]})"
        assert checkpoint.products == open_checkpoint(FOLDER / name).products
        out = made("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / f"{name}-ct")
        assert (said(out)["kv_cache_scheme"] is None) == (name == "mixed")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    lacking = copied("nvfp4", tmp_path / "a", **{f"{O_PROJ}.input_scale": None})
    ran = qconvert("inspect", lacking)
    assert ran.code == 1 and f"{O_PROJ}.input_scale: missing, but quant_algo is NVFP4" in ran.err
    lacking = copied("nvfp4", tmp_path / "b", **{f"{O_PROJ}.weight_scale_2": None})
    assert f"{O_PROJ}.weight_scale_2: missing" in qconvert("inspect", lacking).err
    wrong = copied("fp8-blocks", tmp_path / "c", **{f"{O_PROJ}.weight_scale": torch.ones(3, 1, 2, 1)})
    ran = qconvert("inspect", wrong)
    assert ran.code == 1 and "f32 [3, 1, 2, 1] fits no f8_e4m3 weight of [128, 256]" in ran.err
    svd = copied("nvfp4", tmp_path / "d", **{f"{O_PROJ}.svdquant_lora_a": torch.ones(2, 64)})
    assert "svdquant_lora_a: is not read here" in qconvert("inspect", svd).err


def test_check_knows_who_loads_what() -> None:
    errors = {}
    for name in NAMES:
        for loader in ("vllm", "sglang", "transformers"):
            problems = qconvert("check", FOLDER / name, "--for", loader, "--json").json["problems"]
            errors[name, loader] = [p["fact"] for p in problems if p["severity"] == "error"]
    assert all(errors[name, "transformers"] for name in NAMES)
    assert {name for name in NAMES if errors[name, "vllm"]} == {"int4-awq"}
    assert {name for name in NAMES if errors[name, "sglang"]} == {
        "fp8-rows",
        "fp8-blocks",
        "mxfp8",
        "int4-awq",
    }


def test_the_script_names_these_folders() -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt makes the files")
    assert sorted(configs()) == sorted(NAMES) == sorted(each.name for each in FOLDER.iterdir())


def test_settings_without_a_method_are_known_by_their_algorithm(tmp_path: Path) -> None:
    """ModelOpt 0.31 wrote no `quant_method` (Qwen3-32B-FP8-Static-PerTensor), and a file beside it."""
    folder = copied("fp8-kv", tmp_path / "old")
    expected = qconvert("inspect", folder, "--json").json
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"].pop("quant_method") == "modelopt"
    (folder / "config.json").write_text(json.dumps(config))
    assert qconvert("inspect", folder, "--json").json["rows"] == expected["rows"]
    assert said(made("untie", folder, "-o", tmp_path / "out"))["quant_method"] == "modelopt"
    plain = made("dequantize", folder, "-o", tmp_path / "plain")
    assert stored(plain) == stored(made("dequantize", FOLDER / "fp8-kv", "-o", tmp_path / "expected"))
