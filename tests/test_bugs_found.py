"""Behaviours that contradict what the package says of itself; each test fails until that is mended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import qconvert as library
from qconvert.errors import BadRecipe
from qconvert.evaluate.scores import load_scores
from tests.commands import made, qconvert
from tests.models import tiny

Q = "model.layers.0.self_attn.q_proj.weight"


def test_a_rename_that_fails_takes_the_other_parts_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF in parts: the first part is named last; the others stay, and the next run refuses the name."""
    source = tiny(here.parent / "m", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    request = library.Request("to-gguf", target=library.GGUFTarget("f16"))
    job = library.prepare(library.open_model(str(source)), request, library.RunOptions(shard_size=50_000))
    link, rename = os.link, Path.rename

    def linked(a: Path, b: Path) -> None:
        if "-00001-of-" in str(b):
            raise OSError(5, "Input/output error", str(b))
        link(a, b)

    def renamed(self: Path, target: Path) -> Path:
        if "-00001-of-" in str(target):
            raise OSError(5, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(library.QConvertError):  # it is a bare OSError, which a folder's container wraps
        library.execute(job, here / "m.gguf")
    assert list(here.iterdir()) == []


def test_an_empty_file_of_scores_is_told(tmp_path: Path) -> None:
    """numpy raises EOFError, which the command calls unexpected, a bug of its own."""
    (tmp_path / "s.npz").write_bytes(b"")
    with pytest.raises(BadRecipe, match="no scores to go on from"):
        load_scores(tmp_path / "s.npz", [], "mark")


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
def test_one_infinite_number_does_not_cost_the_whole_tensor(scheme: str, here: Path) -> None:
    """With --allow-nonfinite every number of the tensor becomes NaN, and the verdict is "verified"."""
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    weight[0, 0] = np.inf
    tiny(here / "m", num_hidden_layers=1, changes={Q: weight})
    how = ("--to", "compressed-tensors", "--scheme", scheme, "--allow-nonfinite")
    out = made("convert", "m", *how, "-o", "out")
    plain = made("dequantize", out, "--allow-nonfinite", "--dtype", "f32", "-o", "plain")
    assert np.isfinite(load_file(plain / "model.safetensors")[Q][1:]).all()


def test_quiet_check_prints_what_is_in_the_way_alone(models: Path) -> None:
    """Its help says so; notes about padding, which are in nobody's way, are printed all the same."""
    ran = qconvert("check", models / "plain", "--for", "vllm", "-q")
    assert (ran.code, ran.out) == (0, "")
