"""What `qconvert convert` writes, loaded by the software it is for, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.quant.dequantize import numbers
from tests.support.commands import made
from tests.support.models import tiny

IDS = torch.randint(0, 320, (1, 24), generator=torch.Generator().manual_seed(0))
WHOLE = transformers.CompressedTensorsConfig(dequantize=True)
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def silence() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity_warning()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "m", "qwen3")


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = network(IDS % network.config.vocab_size).logits.float()
    return found


def decoded(folder: Path, name: str, dtype: DType) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors[name]
    rows_RI: np.ndarray = numbers(checkpoint.reader.read(tensor, 0, tensor.rows), dtype).rows_RI
    return rows_RI


def widened(halves_RI: np.ndarray) -> np.ndarray:
    """bfloat16 numbers as float32, in which -0 equals 0: bitsandbytes has both, depending on the CPU."""
    return (halves_RI.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("source", ["gptq", "awq", "mlx"])
def test_transformers_runs_what_came_from_another_layout(model: Path, tmp_path: Path, source: str) -> None:
    first = made("convert", model, "--to", source, "--scheme", "int4-g64", "-o", tmp_path / source)
    out = made("convert", first, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    # MLX's zeros make an asymmetric grid, which transformers dequantizes to bfloat16 on loading.
    how, dtype = ({"quantization_config": WHOLE}, "bf16") if source == "mlx" else ({}, "f32")
    plain = made("dequantize", out, "--dtype", dtype, "-o", tmp_path / "plain")
    assert (logits(loaded(out, **how)) - logits(loaded(plain))).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("folder", "layout"), [("cut-bnb-int8", "int-quantized"), ("cut-ct-fp8-block", "compressed-tensors")]
)
def test_transformers_decodes_bytes_of_8_bits_as_we_do(
    assets: Path, tmp_path: Path, folder: str, layout: str
) -> None:
    out = made("convert", assets / "fixtures" / "quantized" / folder, "--to", layout, "-o", tmp_path / "o")
    network = loaded(out, torch.bfloat16, quantization_config=WHOLE)
    name = "model.layers.1.mlp.up_proj.weight"
    theirs = network.get_parameter(name).detach().view(torch.uint16).numpy()
    np.testing.assert_array_equal(theirs, decoded(out, name, DType.BF16))


@pytest.mark.parametrize("folder", ["cut-bnb-nf4-dq", "cut-bnb-fp4", "cut-ct-w8a8-int8"])
def test_bitsandbytes_decodes_as_we_do(assets: Path, tmp_path: Path, folder: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    source = assets / "fixtures" / "quantized" / folder
    out = made("convert", source, "--to", "bitsandbytes", "-o", tmp_path / "bnb")
    network = loaded(out, torch.bfloat16)
    module = network.model.layers[1].mlp.down_proj
    name = "model.layers.1.mlp.down_proj.weight"
    if folder == "cut-ct-w8a8-int8":
        theirs = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).numpy()
        np.testing.assert_array_equal(theirs, decoded(out, name, DType.F32))
    else:
        dense = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        np.testing.assert_array_equal(dense.float().numpy(), widened(decoded(out, name, DType.BF16)))
        plain = made("dequantize", out, "--dtype", "bf16", "-o", tmp_path / "plain")
        expected = logits(loaded(plain, torch.bfloat16))
        assert (logits(network) - expected).abs().max() < 0.02 * expected.abs().max()


def test_transformers_runs_fp8_blocks(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "cut-ct-fp8-block"
    out = made("convert", source, "--to", "fp8", "-o", tmp_path / "fp8")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    network = loaded(out, torch.bfloat16, quantization_config=config)
    name = "model.layers.0.self_attn.o_proj.weight"
    theirs = network.get_parameter(name).detach().to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(theirs, decoded(out, name, DType.BF16))


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("gptq", "int4-g128"), ("awq", "int4-asym-g64"), ("compressed-tensors", "int8-channel")],
)
def test_mlx_runs_what_came_from_another_layout(
    model: Path, tmp_path: Path, layout: str, scheme: str
) -> None:
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    first = made("convert", model, "--to", layout, "--scheme", scheme, "-o", tmp_path / layout)
    out = made("convert", first, "--to", "mlx", "-o", tmp_path / "mlx")
    network, _ = load_model(out)
    linear = network.model.layers[1].mlp.down_proj
    theirs = mx.dequantize(
        linear.weight, linear.scales, linear.biases, group_size=linear.group_size, bits=linear.bits
    )
    dtype = DType.F16 if theirs.dtype == mx.float16 else DType.BF16
    ours = decoded(out, "model.layers.1.mlp.down_proj.weight", dtype)
    np.testing.assert_array_equal(np.array(theirs.view(mx.uint16)), ours.view(np.uint16))
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    found = torch.from_numpy(np.array(network(mx.array(IDS.numpy())).astype(mx.float32)))
    assert (found - logits(loaded(plain))).abs().max() < 0.5
