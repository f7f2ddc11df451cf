"""GGUF files of 1 to 3 bits: llama.cpp's quantizer writes the same, and what needs importances says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qconvert.formats.gguf.imatrix import read_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.plan.gguf.file_types import find_file_type
from tests.support.commands import Ran, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.llama_quantize import quantize_as_llama_cpp


def to_gguf(assets: Path, out: Path, *flags: object) -> Ran:
    return qconvert("to-gguf", assets / "models" / "tiny-qwen3", "-o", out, "-q", *flags)


@pytest.fixture(scope="module")
def plain(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-qwen3, whose rows are 256 and 768 elements, in 16 bits."""
    out = tmp_path_factory.mktemp("plain") / "bf16.gguf"
    ran = to_gguf(assets, out, "--type", "bf16")
    assert ran.code == 0, ran.err
    return out


# Those with an importance matrix that are not among the recorded files of test_to_gguf.py.
@pytest.mark.parametrize("file_type", ["iq1_s", "iq2_s", "iq2_m", "iq3_xs", "iq3_m"])
def test_every_tensor_is_llama_quantizes(assets: Path, tmp_path: Path, plain: Path, file_type: str) -> None:
    measured = assets / "fixtures" / "gguf" / "imatrix.gguf"
    imatrix = {name: np.array(means, np.float32) for name, means in read_imatrix(measured).means.items()}
    theirs = tmp_path / "theirs.gguf"
    quantize_as_llama_cpp(plain, theirs, find_file_type(file_type).number, imatrix=imatrix)
    ours = tmp_path / "ours.gguf"
    ran = to_gguf(assets, ours, "--type", file_type, "--imatrix", measured)
    assert ran.code == 0, ran.err
    with GGUFFile(ours) as found, GGUFFile(theirs) as expected:
        assert list(found.tensors) == list(expected.tensors)
        for name, tensor in expected.tensors.items():
            assert found.tensors[name] == tensor
            rows = expected.specs[name].rows
            assert np.array_equal(found.read(name, 0, rows), expected.read(name, 0, rows)), name


@pytest.mark.parametrize("file_type", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"])
def test_without_an_importance_matrix_nothing_is_written(
    assets: Path, tmp_path: Path, file_type: str
) -> None:
    ran = to_gguf(assets, tmp_path / "m.gguf", "--type", file_type)
    assert ran.code == 1 and "needs an importance matrix" in ran.err
    assert "`qconvert calibrate MODEL --imatrix FILE` measures one" in ran.err
    assert not list(tmp_path.iterdir())


def test_an_importance_matrix_of_some_tensors(assets: Path, tmp_path: Path) -> None:
    columns = {"blk.0.ffn_down.weight": (1, [1.0] * 768)}
    (tmp_path / "i.dat").write_bytes(imatrix_dat(columns))
    flags = ["--type", "iq3_s", "--imatrix", tmp_path / "i.dat"]
    ran = to_gguf(assets, tmp_path / "m.gguf", *flags, "--tensor-type", "attn_q=iq2_xxs")
    assert ran.code == 1 and not (tmp_path / "m.gguf").exists()
    assert "blk.0.attn_q.weight: iq2_xxs needs importances" in ran.err and "has none for it" in ran.err
    ran = to_gguf(assets, tmp_path / "m.gguf", *flags)
    assert ran.code == 0, ran.err


def test_file_types_are_listed() -> None:
    lines = qconvert("to-gguf", "--type", "list").out.splitlines()
    listed = {line.split()[0] for line in lines[1:]}
    assert listed >= {"iq1_s", "iq1_m", "iq2_xxs", "iq2_m", "iq3_xs", "q2_k_s", "q1_0", "q2_0", "nvfp4"}
