"""DeepSeek-V4's own files: FP8 blocks, FP4 experts with E8M0 scales, int64 tables, names of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import qconvert
from tests.support.family_configs import SAVED
from tests.support.models import stored

ROW = SAVED["deepseek-v4"]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
BLOCK, MX = 128, 32
KEPT = re.compile(r"norm|gate\.weight|weights_proj|compressor|^embed|^head|attn_sink|hc_|\.bias$|ape$")
EXPERT = "layers.2.ffn.experts.1.w1"


def blocks_of(scales: torch.Tensor, rows: int, columns: int, shape: tuple[int, int]) -> torch.Tensor:
    """The scale of every weight, of scales for blocks of `shape`."""
    wide = scales.float().repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)
    return wide[:rows, :columns]


def in_blocks(weight: torch.Tensor, shape: tuple[int, int], largest: float) -> torch.Tensor:
    """A scale for each block, a power of two, so that no number is larger than `largest`."""
    rows, columns = (-(-side // each) for side, each in zip(weight.shape, shape, strict=True))
    padded = torch.zeros(rows * shape[0], columns * shape[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    most = padded.reshape(rows, shape[0], columns, shape[1]).abs().amax((1, 3)).clamp(min=2.0**-100)
    return torch.exp2(torch.ceil(torch.log2(most / largest))).to(torch.float8_e8m0fnu)


def as_published(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arrays that DeepSeek's files hold of a weight."""
    if name.endswith("tid2eid"):
        return {name: weight.to(torch.int64)}
    if KEPT.search(name) or weight.dim() != 2:
        return {name: weight.to(torch.bfloat16 if weight.dim() == 2 else torch.float32)}
    base = name.removesuffix("weight")
    if ".experts." not in name:
        scales = in_blocks(weight, (BLOCK, BLOCK), 448.0)
        codes = weight / blocks_of(scales, *weight.shape, (BLOCK, BLOCK))
        return {name: codes.to(torch.float8_e4m3fn), f"{base}scale": scales}
    scales = in_blocks(weight, (1, MX), 6.0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = weight / blocks_of(scales, *weight.shape, (1, MX))
    codes = (numbers.abs()[..., None] - table).abs().argmin(-1) + 8 * (numbers < 0)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return {name: packed, f"{base}scale": scales}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("v4"))


def published(out: Path) -> Path:
    """A random model of transformers' class, saved, renamed and packed as the published files are."""
    import transformers

    config = {**ROW.config, **WIDE, "compress_ratios": [0, 4, 128]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(out)
    arrays: dict[str, torch.Tensor] = {}
    for saved, weight in load_file(out / "model.safetensors").items():
        name = saved
        for pattern, text in ROW.published:
            name = re.sub(pattern, text, name)
        arrays |= as_published(name, weight)
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    settings = {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    stated = {**config, "expert_dtype": "fp4", "quantization_config": settings, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(stated))
    return out


def theirs(arrays: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """What transformers makes of a weight."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = arrays[f"{module}.scale"]
    found: torch.Tensor = Fp8Dequantize(None)._dequantize_one(
        arrays[f"{module}.weight"], scales, torch.bfloat16
    )
    return found


def run(*arguments: object) -> Any:
    ran = qconvert(*arguments)
    assert ran.code == 0, ran.err
    return ran


def test_the_fixture_is_as_published(folder: Path) -> None:
    kinds = {name: array.dtype for name, array in load_file(folder / "model.safetensors").items()}
    assert kinds["layers.0.ffn.gate.tid2eid"] == torch.int64
    assert kinds[f"{EXPERT}.weight"] == torch.int8
    assert kinds[f"{EXPERT}.scale"] == torch.float8_e8m0fnu
    assert kinds["layers.0.attn.wq_a.weight"] == torch.float8_e4m3fn


def test_inspect_names_what_it_holds(folder: Path) -> None:
    said = json.loads(run("inspect", folder, "--json").out)
    assert said["family"] == "DeepSeek-V4" and said["unknown"] == []


def test_numbers_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    run("dequantize", folder, "--dtype", "bf16", "-o", tmp_path / "plain", "-q")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for module in (EXPERT, "layers.0.ffn.experts.3.w2", "layers.2.ffn.shared_experts.w1"):
        assert torch.equal(plain[f"{module}.weight"], theirs(arrays, module)), module
    table = "layers.0.ffn.gate.tid2eid"
    assert plain[table].dtype == torch.int64 and torch.equal(plain[table], arrays[table])
    assert not any(name.endswith(".scale") for name in plain)


def test_stacks_of_experts_there_and_back_are_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    run("fuse", folder, "--only", "experts", "-o", tmp_path / "stacked", "-q")
    made = load_file(tmp_path / "stacked" / "model.safetensors")
    stack = "layers.2.ffn.experts.gate_up_proj"
    assert made[stack].dtype == torch.int8 and made[f"{stack}_scale_inv"].dtype == torch.float8_e8m0fnu
    run("unfuse", tmp_path / "stacked", "-o", tmp_path / "same", "-q")
    assert stored(tmp_path / "same") == stored(folder)
    ours, given = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "same", folder))
    assert ours["quantization_config"].items() >= given["quantization_config"].items()


def test_experts_go_over_to_mxfp4_exactly(folder: Path, tmp_path: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    out = tmp_path / "ct"
    run("convert", folder, "--to", "compressed-tensors", "-o", out, "-q")
    made = load_file(out / "model.safetensors")
    assert torch.equal(made[f"{EXPERT}.weight_packed"].view(torch.int8), arrays[f"{EXPERT}.weight"])
    assert torch.equal(made[f"{EXPERT}.weight_scale"], arrays[f"{EXPERT}.scale"].view(torch.uint8))
    kinds = json.loads((out / "qconvert.json").read_text())["tensors"]
    assert kinds[f"{EXPERT}.weight"]["certificate"]["kind"] == "exact"
