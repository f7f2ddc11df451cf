"""Scales through fuse and unfuse: exact where rows and scales part together, refused otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import made, qconvert
from tests.models import GATE_UP, stored, tiny

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def encoded(folder: Path, scheme: str, *, equal: bool = False, **sizes: object) -> Path:
    """A model in a table of compressed-tensors; with `equal`, gate and up have the same largest number."""
    changes = {}
    if equal:
        random = np.random.default_rng(0)
        for layer in (0, 1):
            for part in (*GATE_UP, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                rows = 384 if "mlp" in part else 256 if "q_proj" in part else 128
                weight = random.uniform(-0.1, 0.1, (rows, 256)).astype(np.float32)
                weight[0, 0] = 0.125
                changes[f"model.layers.{layer}.{part}.weight"] = weight
    model = tiny(folder / "m", "qwen3", changes=changes, **sizes)  # type: ignore[arg-type]
    return made("convert", model, "--to", "compressed-tensors", "--scheme", scheme, "-o", folder / scheme)


@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-block", "mxfp4"])
def test_scales_of_rows_and_whole_blocks_go_along(scheme: str, tmp_path: Path) -> None:
    before = encoded(tmp_path, scheme)
    fused = made("fuse", before, "-o", tmp_path / "f")
    assert UP not in stored(fused)
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(before)
    assert set(qconvert("diff", before, fused, "--json").json["summary"]) == {"equal"}


@pytest.mark.parametrize(("scheme", "what"), [("fp8-tensor", "scale"), ("nvfp4", "global scale")])
def test_one_scale_for_a_tensor_is_kept_where_the_parts_agree(scheme: str, what: str, tmp_path: Path) -> None:
    same = encoded(tmp_path / "same", scheme, equal=True)
    fused = made("fuse", same, "-o", tmp_path / "f")
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(same)
    if scheme == "nvfp4":  # whose encoder gives linears that loaders stack one global scale
        return
    apart = encoded(tmp_path / "apart", scheme)
    ran = qconvert("fuse", apart, "--only", "gate_up", "-o", tmp_path / "g", "--max-memory", "1MB")
    assert ran.code == 1 and f"{UP}: has one {what} of 0.00" in ran.err and GATE in ran.err
    assert not (tmp_path / "g").exists()


def test_global_scales_that_differ_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = encoded(tmp_path, "nvfp4")
    arrays = load_file(folder / "model.safetensors")
    arrays[f"{UP}_global_scale"] *= 2
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    ran = qconvert("fuse", folder, "--only", "gate_up", "-o", tmp_path / "g")
    assert ran.code == 1 and f"{UP}: has one global scale of" in ran.err


def test_a_block_that_would_hold_rows_of_two_linears_is_refused(tmp_path: Path) -> None:
    folder = encoded(tmp_path, "fp8-block", intermediate_size=320)
    ran = qconvert("fuse", folder, "--only", "gate_up", "-o", tmp_path / "g")
    assert ran.code == 1 and "rows that would share a block of 128 have different scales" in ran.err
    checked = qconvert("check", folder, "--for", "vllm")
    assert checked.code == 3 and "no whole blocks of 128" in checked.out


def test_words_of_zero_points_that_two_linears_would_share_are_packed_anew(tmp_path: Path) -> None:
    """380 rows of 3-bit zeros end within a word."""
    model = tiny(tmp_path / "m", "qwen3", intermediate_size=380)
    before = made("quantize", model, "--scheme", "int3-asym-g64", "--keep", "mlp.down", "-o", tmp_path / "q")
    fused = made("fuse", before, "-o", tmp_path / "f")
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(before)
