"""GGUF files of 1 to 3 bits: llama.cpp's quantizer writes the same, and what needs importances says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.llama_low_bits import FILES, NarrowModel, digest_of_file, narrow_model, to_gguf


@pytest.fixture(scope="module")
def model(assets: Path) -> Path:
    return assets / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def narrow(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> NarrowModel:
    return narrow_model(tmp_path_factory.mktemp("narrow"), assets)


@pytest.mark.parametrize("file_type", FILES)
def test_every_tensor_is_llama_quantizes(tmp_path: Path, narrow: NarrowModel, file_type: str) -> None:
    ours = tmp_path / "ours.gguf"
    ran = to_gguf(narrow.folder, ours, "--type", file_type, "--imatrix", narrow.measured)
    assert ran.code == 0, ran.err
    assert digest_of_file(ours) == FILES[file_type]


@pytest.mark.parametrize("file_type", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"])
def test_without_an_importance_matrix_nothing_is_written(model: Path, tmp_path: Path, file_type: str) -> None:
    ran = to_gguf(model, tmp_path / "m.gguf", "--type", file_type)
    assert ran.code == 1 and "needs an importance matrix" in ran.err
    assert "`qconvert calibrate MODEL --imatrix FILE` measures one" in ran.err
    assert not list(tmp_path.iterdir())


def test_an_importance_matrix_of_some_tensors(model: Path, tmp_path: Path) -> None:
    columns = {"blk.0.ffn_down.weight": (1, [1.0] * 768)}
    (tmp_path / "i.dat").write_bytes(imatrix_dat(columns))
    flags = ["--type", "iq3_s", "--imatrix", tmp_path / "i.dat"]
    ran = to_gguf(model, tmp_path / "m.gguf", *flags, "--tensor-type", "attn_q=iq2_xxs")
    assert ran.code == 1 and not (tmp_path / "m.gguf").exists()
    assert "blk.0.attn_q.weight: iq2_xxs needs importances" in ran.err and "has none for it" in ran.err
    ran = to_gguf(model, tmp_path / "m.gguf", *flags)
    assert ran.code == 0, ran.err


def test_file_types_are_listed() -> None:
    lines = qconvert("to-gguf", "--type", "list").out.splitlines()
    listed = {line.split()[0] for line in lines[1:]}
    assert listed >= {"iq1_s", "iq1_m", "iq2_xxs", "iq2_m", "iq3_xs", "q2_k_s", "q1_0", "q2_0", "nvfp4"}
