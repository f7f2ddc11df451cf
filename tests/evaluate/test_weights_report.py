"""Weight-space errors against numpy, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from qconvert.checkpoint.open import open_checkpoint
from qconvert.evaluate.weights_report import WeightReport, compare_weights
from tests.support.commands import qconvert
from tests.support.decoder_models import tiny

NOISY = {"model.layers.0.self_attn.q_proj.weight": 0.1, "model.layers.2.mlp.down_proj.weight": 0.3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model, and the same with noise on two weights."""
    model = tiny("qwen2", tie_word_embeddings=True)
    state = {k: v.numpy() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    rng = np.random.default_rng(0)
    noisy = {
        name: (w + NOISY.get(name, 0) * rng.standard_normal(w.shape)).astype(np.float32)
        for name, w in state.items()
    }
    paths = []
    for name, tensors in (("a", state), ("b", noisy)):
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        paths.append(folder)
    return paths[0], paths[1]


@pytest.fixture(scope="module")
def report(folders: tuple[Path, Path]) -> WeightReport:
    return compare_weights(open_checkpoint(folders[0]), open_checkpoint(folders[1]), ("a", "b"))


def test_errors_are_those_of_numpy(folders: tuple[Path, Path], report: WeightReport) -> None:
    a, b = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in folders)
    assert [error.name for error in report.errors] == list(NOISY)
    assert report.equal == len(a) - 2
    for error in report.errors:
        gap = b[error.name].astype(float) - a[error.name]
        assert error.relative_rms == pytest.approx(
            np.linalg.norm(gap) / np.linalg.norm(a[error.name]), rel=1e-6
        )
        assert error.max_abs == pytest.approx(np.abs(gap).max(), rel=1e-6)
    assert [(error.role, error.layer) for error in report.errors] == [("attn.q", 0), ("mlp.down", 2)]


def test_the_page_names_the_worst_layer(report: WeightReport) -> None:
    grid, *_ = report.page().grids
    assert [row[0] for row in grid.rows] == ["attn.q", "mlp.down", "all"]
    assert grid.rows[-1][4] == "2"
    (figure,) = report.figures()
    assert "mlp.down, layer 2" in figure.svg


def test_equal_checkpoints_have_nothing_to_draw(folders: tuple[Path, Path]) -> None:
    report = compare_weights(open_checkpoint(folders[0]), open_checkpoint(folders[0]), ("a", "a"))
    assert report.errors == () and report.figures() == [] and report.page().grids[0].rows == ()


def test_the_command_writes_three_views(folders: tuple[Path, Path], tmp_path: Path) -> None:
    ran = qconvert("eval", "weights", *folders, "-o", tmp_path / "r", "--json")
    assert ran.code == 0 and ran.json["report"] == "weights" and len(ran.json["errors"]) == 2
    assert json.loads((tmp_path / "r.json").read_text())["equal"] == ran.json["equal"]
    assert "| mlp.down |" in (tmp_path / "r.md").read_text()
    assert "<svg" in (tmp_path / "r.html").read_text()
