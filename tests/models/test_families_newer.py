"""Families from OLMoE to Mamba-2 by the commands: quantized and back, fused and apart again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import made as made_folder
from tests.support.commands import qconvert
from tests.support.models import stored
from tests.support.newer_families import CONFIGS, made

# One of each family; what differs within it is not in its names.
FAMILIES = (
    "olmoe", "granite-moe", "granite-moe-shared", "granite4", "granite4-dense", "phi", "gpt-neox",
    "starcoder2", "stablelm", "exaone4", "hunyuan", "hunyuan-moe", "arcee", "ernie4.5-moe", "lfm2",
    "lfm2-moe", "falcon-h1", "mamba", "mamba2",
)  # fmt: skip
# What is fused in the class already, or has nothing to fuse.
FUSED = ("gpt-neox", "mamba", "mamba2")
# Files hold the experts of a layer as one.
STACKED = ("granite-moe", "granite-moe-shared", "granite4")


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_and_apart_again_is_the_same_model(tmp_path: Path, name: str) -> None:
    assert {each.split("-")[0] for each in CONFIGS} == {each.split("-")[0] for each in FAMILIES}
    source = tmp_path / "model"
    made(source, name)
    before = stored(source)
    ran = qconvert("fuse", source, "-o", tmp_path / "fused")
    if name in FUSED:
        assert ran.code == 1 and not (tmp_path / "fused").exists()
        return
    assert ran.code == 0, ran.err
    assert len(stored(tmp_path / "fused")) < len(before)
    apart = stored(made_folder("unfuse", tmp_path / "fused", "-o", tmp_path / "apart"))
    assert {n: apart[n] for n in before if n in apart} == {n: before[n] for n in before if n in apart}
    again = made_folder("fuse", tmp_path / "apart", "-o", tmp_path / "again")
    if name in STACKED:
        again = made_folder("fuse", again, "--only", "experts", "-o", tmp_path / "stacked")
    assert stored(again) == stored(tmp_path / "fused")


@pytest.mark.parametrize("name", FAMILIES)
def test_linears_are_quantized_and_come_back_near(tmp_path: Path, name: str) -> None:
    import torch
    from safetensors.torch import load_file

    source = tmp_path / "model"
    made(source, name)
    wish = ("--scheme", "int8-channel", "--min-max")
    quantized = made_folder("quantize", source, *wish, "-o", tmp_path / "q")
    back = made_folder("dequantize", quantized, "--dtype", "f32", "-o", tmp_path / "d")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    changed = [n for n in before if n in after and not torch.equal(before[n], after[n])]
    assert len(changed) >= 4 or name == "granite-moe"
    assert not any("norm" in n or "router" in n or "embed" in n for n in changed)
    for n in changed:
        step = before[n].abs().amax(-1, keepdim=True) / 127
        assert bool(((before[n] - after[n]).abs() <= 0.51 * step).all()), n
