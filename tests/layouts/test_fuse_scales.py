"""Scales through fuse and unfuse: exact where rows and scales part together, refused otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import made, qconvert
from tests.support.models import stored, tiny

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def encoded(folder: Path, scheme: str, **sizes: object) -> Path:
    """A model in a table of compressed-tensors."""
    model = tiny(folder / "m", "qwen3", **sizes)  # type: ignore[arg-type]
    return made("convert", model, "--to", "compressed-tensors", "--scheme", scheme, "-o", folder / scheme)


@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-block", "mxfp4"])
def test_scales_of_rows_and_whole_blocks_go_along(scheme: str, tmp_path: Path) -> None:
    before = encoded(tmp_path, scheme)
    fused = made("fuse", before, "-o", tmp_path / "f")
    assert UP not in stored(fused)
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(before)
    assert set(qconvert("diff", before, fused, "--json").json["summary"]) == {"equal"}


@pytest.mark.parametrize("scheme", ["fp8-tensor", "nvfp4"])
def test_linears_that_loaders_stack_have_one_scale_for_a_tensor(scheme: str, tmp_path: Path) -> None:
    apart = encoded(tmp_path, scheme)
    fused = made("fuse", apart, "-o", tmp_path / "f")
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(apart)


@pytest.mark.parametrize(("scheme", "what"), [("fp8-tensor", "scale"), ("nvfp4", "global scale")])
def test_scales_of_a_tensor_that_differ_are_refused(scheme: str, what: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = encoded(tmp_path, scheme)
    arrays = load_file(folder / "model.safetensors")
    arrays[f"{UP}_{what.replace(' ', '_')}"] *= 2
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    ran = qconvert("fuse", folder, "--only", "gate_up", "-o", tmp_path / "g", "--max-memory", "1MB")
    assert ran.code == 1 and f"{UP}: has one {what} of" in ran.err and GATE in ran.err
    assert not (tmp_path / "g").exists()


def test_a_block_that_would_hold_rows_of_two_linears_is_refused(tmp_path: Path) -> None:
    folder = encoded(tmp_path, "fp8-block", intermediate_size=320)
    ran = qconvert("fuse", folder, "--only", "gate_up", "-o", tmp_path / "g")
    assert ran.code == 1 and "rows that would share a block of 128 have different scales" in ran.err
    checked = qconvert("check", folder, "--for", "vllm")
    assert checked.code == 3 and "do not divide into blocks of 128" in checked.out


def test_words_of_zero_points_that_two_linears_would_share_are_packed_anew(tmp_path: Path) -> None:
    """380 rows of 3-bit zeros end within a word."""
    model = tiny(tmp_path / "m", "qwen3", intermediate_size=380)
    before = made("quantize", model, "--scheme", "int3-asym-g64", "--keep", "mlp.down", "-o", tmp_path / "q")
    fused = made("fuse", before, "-o", tmp_path / "f")
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(before)
