"""Linears stored input-major (GPT-2's Conv1D): logical rows are outputs, files keep the class's order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from qconvert.checkpoint.open import open_checkpoint
from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS

C_ATTN = "transformer.h.1.attn.c_attn.weight"


@pytest.fixture(params=["gpt2", "openai-gpt"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**ROWS[request.param].config)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_logical_linear_has_a_row_for_each_output(model: Path) -> None:
    assert open_checkpoint(model).tensors[C_ATTN].shape == (96, 32)
    assert weights(model)[C_ATTN].shape == (32, 96)


def test_quantized_linears_have_groups_along_their_input_and_come_back(model: Path, tmp_path: Path) -> None:
    quantized = made("quantize", model, "--scheme", "int8-g32", "--min-max", "-o", tmp_path / "q")
    assert weights(quantized)[f"{C_ATTN}_scale"].shape == (96, 1)
    assert weights(quantized)[f"{C_ATTN}_shape"].tolist() == [96, 32]
    back = weights(made("dequantize", quantized, "--dtype", "f32", "-o", tmp_path / "d"))
    for name, before in weights(model).items():
        step = before.abs().amax(0, keepdim=True) / 127 if "h." in name and name.endswith(".weight") else 0
        assert bool(((back[name] - before).abs() <= step * 0.51).all()), name


def test_transformers_would_not_load_them_and_the_command_says_so(model: Path, tmp_path: Path) -> None:
    ran = qconvert("quantize", model, "--bits", 8, "--group-size", 32, "-o", tmp_path / "q")
    assert ran.code == 0 and "packs only nn.Linear" in ran.err


def test_qkv_comes_apart_by_columns_and_goes_together_again(model: Path, tmp_path: Path) -> None:
    apart = made("unfuse", model, "-o", tmp_path / "apart")
    parts = [weights(apart)[C_ATTN.replace("c_attn", f"{x}_proj")] for x in "qkv"]
    assert torch.equal(torch.cat(parts, 1), weights(model)[C_ATTN])
    together = weights(made("fuse-qkv", apart, "-o", tmp_path / "together"))
    assert together.keys() == weights(model).keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in weights(model).items())


def test_bare_names_and_mask_buffers_of_the_first_release(model: Path, tmp_path: Path) -> None:
    """The files on the Hub leave out the prefix and store the causal mask."""
    from safetensors.torch import save_file

    tensors = {name.removeprefix("transformer."): tensor for name, tensor in weights(model).items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(2)}
    save_file(tensors, model / "model.safetensors")
    checkpoint = open_checkpoint(model)
    binding = checkpoint.bind()
    assert binding.dropped == ("h.0.attn.bias", "h.1.attn.bias") and binding.unknown == ()
    assert checkpoint.tensors["h.1.attn.c_attn.weight"].shape == (96, 32)
