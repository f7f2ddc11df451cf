"""Rows that are one group of the size of all others keep that size, so that loaders see one setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qconvert.checkpoint.open import open_checkpoint
from tests.support.commands import made, qconvert
from tests.support.models import tiny

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """down_proj has rows of 128 columns, all other linears rows of 256."""
    return tiny(tmp_path_factory.mktemp("m"), "qwen2", dtype="f16", hidden_size=256, intermediate_size=128)


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("compressed-tensors", "int4-g128"), ("gptq", "int4-g128"), ("awq", "int4-asym-g128"),
     ("auto-round", "int4-g128")],
)  # fmt: skip
def test_one_setting_is_written_and_read_back(model: Path, layout: str, scheme: str, tmp_path: Path) -> None:
    out = made("quantize", model, "--layout", layout, "--scheme", scheme, "-o", tmp_path / "out")
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    if layout == "compressed-tensors":
        assert [g["targets"] for g in settings["config_groups"].values()] == [["Linear"]]
    else:
        assert settings["group_size"] == 128
        assert not settings.get("dynamic") and not settings.get("extra_config")
    labels = {tensor.encoding.label for tensor in open_checkpoint(out).tensors.values()}
    assert labels == {scheme, "f16"}
    assert qconvert("verify", out).code == 0
    assert qconvert("check", out, "--for", "transformers").code == 0


def test_a_scale_for_every_row_stays_one(model: Path, tmp_path: Path) -> None:
    out = made("quantize", model, "--bits", 4, "--rule", "mlp.down=int4-channel", "-o", tmp_path / "out")
    assert open_checkpoint(out).tensors[DOWN].encoding.label == "int4-channel"
    assert qconvert("verify", out).code == 0


def test_other_layouts_take_the_codes_over(model: Path, tmp_path: Path) -> None:
    out = made("quantize", model, "--bits", 4, "-o", tmp_path / "out")
    for layout in ("gptq", "awq", "mlx", "auto-round"):
        there = made("convert", out, "--to", layout, "-o", tmp_path / layout)
        certificates = json.loads((there / "qconvert.json").read_text())["tensors"]
        assert certificates[DOWN]["certificate"]["kind"] == "exact"
