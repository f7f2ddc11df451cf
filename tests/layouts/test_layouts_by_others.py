"""Holds what is read of other tools' layouts against the numbers that those tools compute.

The folders in tests/layouts/by_others were written by the tools (`python -m tests.layouts.foreign_layouts`).
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
from qconvert.quant.dequantize import numbers
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.layouts.foreign_layouts import ATTENTION, FOLDER, LINEARS, MLP, model
from tests.support.commands import made, qconvert

DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16, "float32": DType.F32}
# What `inspect` says of each.
FOLDERS = {
    "auto-round-awq": "auto-round (int4-asym-g32)",
    "auto-round-mixed": "auto-round (int4-g32, int8-g16)",
    "auto-round-mxfp4": "compressed-tensors (e2m1-g32)",
    "auto-round-w2-asym": "auto-round (int2-asym-g32)",
    "auto-round-w3": "auto-round (int3-g32)",
    "hqq-1": "hqq (zero1-g32)",
    "hqq-2-axis-0": "hqq (zero2-rows16)",
    "hqq-3": "hqq (zero3-g32)",
    "quark-fp8": "quark (e4m3-tensor)",
    "quark-fp8-rows": "quark (e4m3-channel)",
    "quark-int4": "quark (int4-g32)",
    "quark-int8": "quark (int8-channel)",
    "quark-mxfp4": "quark (e2m1-g32)",
    "quark-uint4": "quark (int4-asym-g32)",
    "hqq-4-whole": "hqq (zero4-g32)",
    "torchao-fp8": "torchao (e4m3-channel)",
    "torchao-fp8-blocks": "torchao (e4m3-g32x32)",
    "torchao-fp8-tensor": "torchao (e4m3-tensor)",
    "torchao-int4": "torchao (middle4-g32)",
    "torchao-intx": "torchao (int4-g32)",
    "torchao-intx-asym": "torchao (int4-asym-g32)",
    "hqq-4": "hqq (zero4-g32)",
    "hqq-4-axis-0": "hqq (zero4-rows64)",
    "hqq-8-float": "hqq (zero8-g32)",
    "bitnet": "bitnet (int2-channel)",
    "bitnet-auto": "bitnet (int2-channel)",
}
# Where the codes can go as they are, and by how many steps weights may move then.
KEPT = [
    ("auto-round-awq", "compressed-tensors", 0.0),
    ("auto-round-awq", "awq", 0.0),
    ("auto-round-awq", "gptq_v2", 0.0),
    ("auto-round-mixed", "compressed-tensors", 0.0),
    ("auto-round-mixed", "gptq", 0.0),
    ("auto-round-mixed", "auto-round", 0.0),
    ("auto-round-w2-asym", "gptq_v2", 0.0),
    ("auto-round-mxfp4", "compressed-tensors", 0.0),
    ("auto-round-w3", "mlx", 0.0),
    ("hqq-4", "mlx", 0.04),
    ("hqq-4-whole", "compressed-tensors", 0.0),
    ("hqq-4-whole", "gptq_v2", 0.0),
    ("torchao-fp8", "compressed-tensors", 0.0),
    ("torchao-fp8-tensor", "compressed-tensors", 0.0),
    ("torchao-fp8-blocks", "compressed-tensors", 0.0),
    ("torchao-int4", "mlx", 0.04),
    ("torchao-intx", "compressed-tensors", 0.0),
    ("torchao-intx", "mlx", 0.0),
    ("torchao-intx-asym", "compressed-tensors", 0.0),
    ("torchao-intx-asym", "gptq_v2", 0.01),
    ("quark-fp8", "compressed-tensors", 0.0),
    ("quark-fp8-rows", "compressed-tensors", 0.0),
    ("quark-int4", "compressed-tensors", 0.0),
    ("quark-int4", "auto-round", 0.04),
    ("quark-int8", "int-quantized", 0.0),
    ("quark-mxfp4", "compressed-tensors", 0.0),
    ("quark-mxfp4", "mlx", 0.0),
    ("quark-uint4", "compressed-tensors", 0.0),
    ("quark-uint4", "hqq", 0.0),
    ("quark-int4", "hqq", 0.0),
    ("auto-round-awq", "quark", 0.0),
    ("auto-round-mixed", "hqq", 0.0),
    ("bitnet", "hqq", 0.0),
    ("torchao-fp8", "quark", 0.0),
    ("torchao-fp8", "fbgemm_fp8", 0.0),
    ("torchao-fp8-tensor", "fbgemm_fp8", 0.0),
    ("torchao-int4", "hqq", 0.04),
    ("torchao-fp8", "torchao", 0.0),
    ("torchao-int4", "torchao", 0.0),
    ("torchao-intx", "torchao", 0.0),
    ("torchao-intx-asym", "torchao", 0.02),
    ("quark-fp8", "torchao", 0.0),
    ("auto-round-mixed", "torchao", 0.0),
    ("auto-round-awq", "torchao", 0.02),
    ("hqq-4-whole", "quark", 0.0),
    ("auto-round-mxfp4", "quark", 0.0),
    ("bitnet", "compressed-tensors", 0.0),
    ("bitnet", "mlx", 0.0),
    ("bitnet-auto", "gptq", 0.0),
]


def copy(name: str, folder: Path) -> Path:
    shutil.copytree(FOLDER / name, folder)
    return folder


def golden(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / "golden.json").read_text())["dequantized"]
    return entries


def edited(folder: Path, **settings: Any) -> Path:
    """The folder with these keys of quantization_config changed, None left out."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    own = config["quantization_config"] | settings
    config["quantization_config"] = {key: value for key, value in own.items() if value is not None}
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_numbers_are_those_of_the_tool_that_wrote_them(name: str) -> None:
    checkpoint = open_checkpoint(FOLDER / name)
    assert checkpoint.quantization == FOLDERS[name]
    entries = golden(FOLDER / name)
    assert len(entries) >= 6
    for tensor, entry in entries.items():
        found = checkpoint.tensors[tensor]
        assert list(found.shape) == entry["shape"]
        # Blocks that end within every kind of word, and within the parts that some tools fold together.
        blocks = [(row, min(row + 13, found.rows)) for row in range(0, found.rows, 13)]
        dtype = DTYPES[entry["dtype"]]
        rows = [numbers(checkpoint.reader.read(found, *block), dtype).rows_RI for block in blocks]
        assert hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest() == entry["sha256"], tensor


def test_no_folder_is_left_out() -> None:
    assert set(FOLDERS) == {path.parent.name for path in FOLDER.glob("*/golden.json")}


@pytest.mark.parametrize(("name", "layout", "most"), KEPT)
def test_codes_go_to_other_layouts_as_they_are(name: str, layout: str, most: float, tmp_path: Path) -> None:
    out = made("convert", FOLDER / name, "--to", layout, "-o", tmp_path / "out")
    entries = json.loads((out / "qconvert.json").read_text())["tensors"].values()
    certificates = [entry["certificate"] for entry in entries]
    assert {c["kind"] for c in certificates} <= ({"exact"} if most == 0 else {"exact", "measured"})
    assert max(float(c.get("max_steps", 0)) for c in certificates) <= most
    ran = qconvert("verify", out, "--against", FOLDER / name)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("name", FOLDERS)
def test_plain_numbers_inspect_and_check(name: str, tmp_path: Path) -> None:
    out = made("dequantize", FOLDER / name, "--dtype", "f32", "-o", tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    plain, source = open_checkpoint(out), open_checkpoint(FOLDER / name)
    assert set(plain.tensors) == set(source.tensors)
    tensor = f"{MLP}.up_proj.weight"
    sides = [numbers(c.reader.read(c.tensors[tensor], 0, 96), DType.F32).rows_RI for c in (plain, source)]
    assert sides[0].any() and np.array_equal(*sides)
    assert qconvert("inspect", FOLDER / name).code == 0
    ran = qconvert("check", FOLDER / name, "--for", "transformers", "--json")
    assert ran.code in (0, 3), ran.err


def logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    return decoder.logits(decoder.hidden(torch.arange(12)[None] * 5 % 64))


@pytest.mark.parametrize(
    "name",
    [
        "auto-round-mixed",
        "bitnet",
        "hqq-1",
        "hqq-2-axis-0",
        "hqq-4",
        "quark-uint4",
        "torchao-fp8-blocks",
        "torchao-int4",
        "torchao-intx-asym",
    ],
)
def test_our_decoder_computes_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    plain = made("dequantize", FOLDER / name, "--dtype", "f32", "-o", tmp_path / "out")
    ours, expected = logits(FOLDER / name), logits(plain)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


# What says how a weight was made, and not what it is.
HOW_MADE = ("optimize", "round_zero", "view_as_float")


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith(("hqq", "quark"))])
def test_what_is_written_again_are_the_bytes_of_the_tool(name: str, tmp_path: Path) -> None:
    """Every array as hqq and amd-quark wrote it, and the same settings."""
    layout = name.partition("-")[0]
    out = made("convert", FOLDER / name, "--to", layout, "-o", tmp_path / "out")
    kept = made("untie", FOLDER / name, "-o", tmp_path / "kept")
    theirs = load_file(FOLDER / name / "model.safetensors")
    for folder in (out, kept):
        ours = load_file(folder / "model.safetensors")
        assert set(ours) >= set(theirs) and set(ours) - set(theirs) <= {"lm_head.weight"}
        for array, stored in theirs.items():
            expected = stored
            if array.endswith(".W_q") and stored.is_floating_point():
                expected = stored.view(torch.uint8)
            if array.endswith("input_scale"):  # in float32 here
                expected = stored.float()
            if not array.endswith(HOW_MADE):
                assert ours[array].dtype == expected.dtype and torch.equal(ours[array], expected), array
        assert open_checkpoint(folder).quantization == FOLDERS[name]
        said, before = (
            json.loads((each / "config.json").read_text())["quantization_config"]
            for each in (folder, FOLDER / name)
        )
        if layout == "quark":
            assert said == before


KINDS = [
    ("hqq", "int4-g32"),
    ("hqq", "int3-asym-g32"),
    ("hqq", "int8-channel"),
    ("quark", "int4-g32"),
    ("quark", "int4-asym-channel"),
    ("quark", "int8-channel"),
    ("quark", "fp8-channel"),
    ("quark", "fp8-tensor"),
    ("quark", "mxfp4"),
]


@pytest.mark.parametrize(("layout", "scheme"), KINDS)
def test_transformers_loads_what_is_written_for_hqq_and_quark(
    layout: str, scheme: str, tmp_path: Path
) -> None:
    """transformers 4 with hqq, 5 with amd-quark: every weight is the number that qconvert decodes."""
    pytest.importorskip(layout, reason="has the linears that transformers loads")
    import transformers

    if layout == "hqq" and int(transformers.__version__.split(".")[0]) > 4:
        pytest.skip("transformers 5 does not load HQQ")
    out = made("convert", model(tmp_path / "m"), "--to", layout, "--scheme", scheme, "-o", tmp_path / "out")
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    expected = load_file(plain / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for base in LINEARS:
        linear = loaded.get_submodule(base)
        kind = torch.bfloat16 if layout == "hqq" else torch.float32  # HQQ's scales are the model's
        found = linear.dequantize() if layout == "hqq" else linear._get_qweight(linear.weight)
        assert torch.equal(found.to(kind).float(), expected[f"{base}.weight"]), base
    assert loaded(torch.arange(12)[None] * 5 % 64).logits.isfinite().all()


@pytest.mark.parametrize("name", ["auto-round-mixed", "auto-round-w2-asym", "auto-round-awq"])
def test_transformers_computes_with_what_is_written_for_auto_round(tmp_path: Path, name: str) -> None:
    pytest.importorskip("auto_round", reason="loads AutoRound's layout in transformers")
    from transformers import AutoModelForCausalLM

    source = FOLDER / name
    out = made("convert", source, "--to", "auto-round", "-o", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16, device_map="cpu")
    assert "QuantLinear" in type(model.model.layers[0].mlp.down_proj).__name__
    found = model(torch.arange(12)[None] * 5 % 64).logits.float()
    torch.testing.assert_close(found, logits(source), rtol=0, atol=0.02)


def test_what_is_on_no_grid_of_others_is_quantized_again_when_asked(tmp_path: Path) -> None:
    for name, layout in (("hqq-1", "mlx"), ("hqq-4-axis-0", "gptq"), ("hqq-2-axis-0", "compressed-tensors")):
        asked = ("convert", FOLDER / name, "--to", layout, "-o", tmp_path / name)
        ran = qconvert(*asked)
        assert ran.code == 1 and "--allow-requantize" in ran.err
        assert "of one bit" in ran.err or "that rows share" in ran.err or "of 1 bits" in ran.err
        assert qconvert(*asked, "--allow-requantize").code == 0


def test_activations_are_those_that_the_settings_say() -> None:
    said = {
        "auto-round-mxfp4": ["W4A4 (inputs fp4 per group of 32)"],
        "auto-round-mixed": ["W4A16", "W8A16"],
        "bitnet": ["W2A8 (inputs int8 per token)"],
        "hqq-4": ["W4A16"],
        "quark-fp8": ["W8A8 (inputs static fp8)"],
        "quark-fp8-rows": ["W8A8 (inputs fp8 per token)"],
        "quark-int8": ["W8A8 (inputs int8 per token)"],
        "torchao-fp8": ["W8A8 (inputs fp8 per token)"],
        "torchao-fp8-tensor": ["W8A16"],
    }
    for name, products in said.items():
        assert [str(each) for each in open_checkpoint(FOLDER / name).products] == products


def test_auto_round_by_its_old_name_and_with_wrong_claims(tmp_path: Path) -> None:
    old = edited(copy("auto-round-mixed", tmp_path / "old"), quant_method="intel/auto-round")
    assert open_checkpoint(old).quantization == FOLDERS["auto-round-mixed"]
    wrong = edited(old, extra_config={f"{MLP}.down_proj": {"bits": 4}})
    ran = qconvert("convert", wrong, "--to", "gptq", "-o", tmp_path / "out")
    assert ran.code == 1 and "down_proj.qweight: codes of 8 bits, but quantization_config says" in ran.err
    other = edited(copy("auto-round-w3", tmp_path / "fp"), packing_format="auto_round:fp8_static")
    ran = qconvert("convert", other, "--to", "gptq", "-o", tmp_path / "out")
    assert ran.code == 1 and "packing_format 'auto_round:fp8_static'" in ran.err and "Hint: " in ran.err
    short = edited(copy("auto-round-w3", tmp_path / "short"), packing_format="auto_round:gptq")
    assert open_checkpoint(short).quantization == FOLDERS["auto-round-w3"]
    zeros = edited(copy("auto-round-w3", tmp_path / "zeros"), packing_format="auto_round")
    ran = qconvert("convert", zeros, "--to", "gptq", "-o", tmp_path / "out")
    assert ran.code == 1 and "qzeros: holds a zero of 3" in ran.err and not (tmp_path / "out").exists()


def test_zero_points_are_written_as_auto_round_writes_them(tmp_path: Path) -> None:
    """As they are, zeros too, in the packing `auto_round`; its own folder again has the same arrays."""
    source = FOLDER / "auto-round-w2-asym"
    for layout in ("auto-round", "gptq_v2"):
        first = made("convert", source, "--to", layout, "-o", tmp_path / layout)
        out = made("convert", first, "--to", "auto-round", "-o", tmp_path / f"from-{layout}")
        settings = json.loads((out / "config.json").read_text())["quantization_config"]
        assert settings["packing_format"] == "auto_round" and settings["sym"] is False
        theirs, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
        words = [array for array in theirs if array.endswith(("qweight", "qzeros", "scales"))]
        assert len(words) == 21 and all(torch.equal(ours[array], theirs[array]) for array in words)
    out = made("convert", FOLDER / "auto-round-awq", "--to", "auto-round", "-o", tmp_path / "awq")
    assert open_checkpoint(out).quantization == FOLDERS["auto-round-awq"]
    assert qconvert("check", out, "--for", "transformers").code == 0


def test_auto_round_is_written_with_the_bits_of_every_module(tmp_path: Path) -> None:
    out = made("convert", FOLDER / "auto-round-mixed", "--to", "auto-round", "-o", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "auto-round" and settings["bits"] == 4
    assert settings["extra_config"] == {
        f"{MLP}.down_proj": {"bits": 8, "group_size": 16, "sym": True, "data_type": "int"},
        f"{ATTENTION}.v_proj": {"bits": 16},
    }
    assert open_checkpoint(out).quantization == FOLDERS["auto-round-mixed"]


def exllama(folder: Path, version: int) -> Path:
    """A folder with arrays of the shapes that ExLlama writes, and no meaning."""
    shutil.copytree(FOLDER / "bitnet", folder)
    arrays = load_file(folder / "model.safetensors")
    for base in LINEARS:
        rows, width = (size * k for size, k in zip(arrays.pop(f"{base}.weight").shape, (4, 1), strict=True))
        arrays.pop(f"{base}.weight_scale")
        if version == 3:
            arrays[f"{base}.trellis"] = torch.zeros(width // 16, rows // 16, 16 * 4, dtype=torch.int16)
            arrays |= {f"{base}.suh": torch.ones(width).half(), f"{base}.svh": torch.ones(rows).half()}
        else:
            arrays[f"{base}.q_weight"] = torch.zeros(width * 5 // 32, rows, dtype=torch.int32)
            arrays[f"{base}.q_invperm"] = torch.arange(width).short()
            arrays[f"{base}.q_scale"] = torch.zeros(width // 32, rows // 8, dtype=torch.int32)
            arrays[f"{base}.q_scale_max"] = torch.ones(width // 32).half()
            arrays[f"{base}.q_groups"] = torch.zeros(width // 16, dtype=torch.int16)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return edited(folder, quant_method=f"exl{version}", bits=4.0, linear_class=None)


@pytest.mark.parametrize(("version", "label"), [(2, "exl2-5.0"), (3, "exl3-4.0")])
def test_exllama_is_inspected_and_nothing_else(version: int, label: str, tmp_path: Path) -> None:
    folder = exllama(tmp_path / "m", version)
    ran = qconvert("inspect", folder, "--json")
    assert ran.code == 0 and ran.json["quantization"] == f"exl{version} ({label})"
    rows = {row["role"]: row for row in ran.json["rows"]}
    assert rows["mlp.down"]["forms"] == [label] and rows["mlp.down"]["shapes"] == [[64, 96]]
    assert 4.0 < rows["mlp.down"]["bits_per_weight"] < 6.5 and not ran.json["unknown"]
    assert ran.json["bytes"] == sum(
        array.nbytes for array in load_file(folder / "model.safetensors").values()
    )
    out = tmp_path / "out"
    for asked in (
        ("convert", folder, "--to", "mlx", "-o", out),
        ("dequantize", folder, "-o", out),
        ("quantize", folder, "--scheme", "int4-g32", "-o", out),
        ("to-gguf", folder, "--type", "q8_0", "-o", tmp_path / "out.gguf"),
        ("check", folder, "--for", "vllm"),
        ("verify", folder),
    ):
        ran = qconvert(*asked)
        assert ran.code == 1 and f"exl{version} weights can be inspected, not decoded" in ran.err
        assert "start from the 16-bit model" in ran.err and not out.exists(), asked


def test_bitnet_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    normed = edited(copy("bitnet", tmp_path / "n"), use_rms_norm=True)
    ran = qconvert("convert", normed, "--to", "mlx", "-o", tmp_path / "out")
    assert ran.code == 1 and "normalizes the inputs of every linear" in ran.err
    online = edited(copy("bitnet", tmp_path / "o"), quantization_mode="online")
    ran = qconvert("convert", online, "--to", "mlx", "-o", tmp_path / "out")
    assert ran.code == 1 and "online" in ran.err and "Hint: " in ran.err
    assert qconvert("convert", online, "--to", "bitnet", "-o", tmp_path / "out").code == 2
    assert len(LINEARS) == 7
