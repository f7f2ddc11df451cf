"""New codes of other layouts: the bytes that their own tools write, and what fusing makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.layouts.test_convert_layouts import arrays_of, quantized
from tests.support.commands import made, qconvert
from tests.support.models import stored, tiny

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
IDS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "m", "qwen3", dtype="f16")


@pytest.mark.parametrize(
    ("layout", "scheme", "golden"),
    [
        ("bitsandbytes", ("--scheme", "fp4"), "cut-bnb-fp4"),
        ("fp8", (), "cut-fp8-block-hand"),
    ],
)
def test_new_codes_are_those_of_the_tool_to_the_byte(
    assets: Path, tmp_path: Path, layout: str, scheme: tuple[str, ...], golden: str
) -> None:
    folder = assets / "fixtures" / "quantized"
    out = made("convert", folder / "source-cut", "--to", layout, *scheme, "-o", tmp_path / "out")
    ours, theirs = stored(out), stored(folder / golden)
    assert set(ours) == set(theirs)
    for name, entry in theirs.items():
        assert ours[name] == entry, name


def test_nf4_codes_are_those_of_bitsandbytes(model: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    out = made("convert", model, "--to", "bitsandbytes", "-o", tmp_path / "out")
    weight = load_file(model / "model.safetensors")[f"{DOWN}.weight"]
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    arrays = load_file(out / "model.safetensors")
    assert torch.equal(arrays[f"{DOWN}.weight"], codes)
    assert torch.equal(arrays[f"{DOWN}.weight.absmax"], state.absmax)


def test_blocks_at_the_edge_and_blocks_of_zeros(tmp_path: Path) -> None:
    changes = {f"{Q}.weight": np.zeros((256, 256), np.float32)}
    model = tiny(tmp_path / "m", changes=changes, intermediate_size=200)
    out = made("convert", model, "--to", "fp8", "--max-memory", "1MB", "-o", tmp_path / "out")
    assert arrays_of(made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "p"), Q)["weight"].max() == 0
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_tensor(f"{DOWN}.weight_scale_inv").shape == (2, 2)
    assert qconvert("verify", out, "--against", model).code == 0
    ran = qconvert("convert", model, "--to", "bitsandbytes", "-o", tmp_path / "bnb")
    assert ran.code == 1 and "200 columns do not divide into blocks of 64" in ran.err


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("gptq", "int4-g64"),
        ("gptq_v2", "int3-asym-g32"),
        ("awq", "int4-asym-g64"),
        ("mlx", "int4-asym-g64"),
        ("bitsandbytes", "nf4"),
        ("int-quantized", "int8-asym-channel"),
    ],
)
def test_fusing_and_unfusing_restores_every_byte(
    model: Path, tmp_path: Path, layout: str, scheme: str
) -> None:
    folder = quantized(model, tmp_path, layout, scheme)
    fused = made("fuse", folder, "-o", tmp_path / "fused")
    assert stored(made("unfuse", fused, "-j", "3", "-o", tmp_path / "apart")) == stored(folder)
    apart = made("unfuse", made("dequantize", fused, "-o", tmp_path / "plain"), "-o", tmp_path / "numbers")
    assert stored(apart) == stored(made("dequantize", folder, "-o", tmp_path / "dense"))


def test_fp8_blocks_are_fused_only_where_no_block_would_mix_two_parts(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "whole")  # k and v have 128 rows each
    folder = made("convert", whole, "--to", "fp8", "-o", tmp_path / "fp8")
    fused = made("fuse", folder, "-o", tmp_path / "fused")
    assert stored(made("unfuse", fused, "-o", tmp_path / "apart")) == stored(folder)
    narrow = tiny(tmp_path / "narrow", num_key_value_heads=1)  # of 64 rows each
    folder = made("convert", narrow, "--to", "fp8", "-o", tmp_path / "fp8-narrow")
    ran = qconvert("fuse", folder, "-o", tmp_path / "mixed")
    assert ran.code == 1 and "share a block of 128" in ran.err


def test_quantize_takes_the_integers_of_a_layout_that_has_tables_too(model: Path, tmp_path: Path) -> None:
    words = ("--scheme", "int8-channel")
    out = made("quantize", model, *words, "--layout", "bitsandbytes", "-o", tmp_path / "quantized")
    other = made("convert", model, "--to", "bitsandbytes", *words, "-o", tmp_path / "converted")
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    ran = qconvert("quantize", model, "--bits", 4, "--layout", "bitsandbytes")
    assert ran.code == 2 and "it holds nf4, fp4, nf4-nested, fp4-nested and int8-channel" in ran.err
    ran = qconvert("quantize", model, "--layout", "modelopt", "--scheme", "NVFP4A16")
    assert ran.code == 2 and "or --scheme nvfp4, the codes of modelopt" in ran.err
