"""GGUF files of 1 to 3 bits: llama.cpp's quantizer writes the same, and what needs importances says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from qconvert.formats.gguf.imatrix import read_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.plan.gguf.file_types import find_file_type
from tests.support.commands import Ran, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.llama_blocks import SLOW_TABLES, assert_blocks_of_llama_cpp, file_of_kinds
from tests.support.llama_quantize import quantize_as_llama_cpp

# Of a layer of tiny-qwen3, half of its weights. (Its rows of three blocks are in test_to_gguf.py.)
WIDTH = 256
SHARE = {"mlp.gate_proj": (slice(WIDTH), slice(None)), "mlp.up_proj": (slice(WIDTH), slice(None)),
         "mlp.down_proj": (slice(None), slice(WIDTH)), "self_attn.k_proj": (slice(64), slice(None)),
         "self_attn.v_proj": (slice(64), slice(None))}  # fmt: skip


def to_gguf(model: Path, out: Path, *flags: object) -> Ran:
    return qconvert("to-gguf", model, "-o", out, "-q", *flags)


@pytest.fixture(scope="module")
def model(assets: Path) -> Path:
    return assets / "models" / "tiny-qwen3"


@dataclass(frozen=True)
class Narrow:
    """A model whose layers are parts of a real one's, in bf16 as a GGUF too, and its importances."""

    folder: Path
    plain: Path
    measured: Path
    imatrix: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def narrow(model: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    """All eight layers of tiny-qwen3: the first, the last and those between have types of their own."""
    folder = tmp_path_factory.mktemp("narrow")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    sizes = {"intermediate_size": WIDTH, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | sizes))
    weights = load_file(model / "model.safetensors")
    for name, rows_RI in weights.items():
        part = SHARE.get(name.removesuffix(".weight").split(".", 3)[-1])
        weights[name] = rows_RI if part is None else rows_RI[part].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    means = read_imatrix(assets / "fixtures" / "gguf" / "imatrix.gguf").means
    imatrix = {name: np.array(means_I, np.float32)[:WIDTH] for name, means_I in means.items()}
    found = Narrow(folder, folder / "bf16.gguf", folder / "i.dat", imatrix)
    found.measured.write_bytes(
        imatrix_dat({name: (1, list(map(float, each))) for name, each in imatrix.items()})
    )
    ran = to_gguf(folder, found.plain, "--type", "bf16")
    assert ran.code == 0, ran.err
    return found


# Those with an importance matrix that are not among the recorded files of test_to_gguf.py.
@pytest.mark.parametrize("file_type", ["iq1_s", "iq2_s", "iq2_m", "iq3_xs", "iq3_m"])
def test_every_tensor_is_llama_quantizes(tmp_path: Path, narrow: Narrow, file_type: str) -> None:
    theirs = tmp_path / "theirs.gguf"
    quantize_as_llama_cpp(narrow.plain, theirs, find_file_type(file_type).number, imatrix=narrow.imatrix)
    ours = tmp_path / "ours.gguf"
    ran = to_gguf(narrow.folder, ours, "--type", file_type, "--imatrix", narrow.measured)
    assert ran.code == 0, ran.err
    with GGUFFile(ours) as found, GGUFFile(theirs) as expected:
        assert list(found.tensors) == list(expected.tensors)
        for name, tensor in expected.tensors.items():
            assert found.tensors[name] == tensor
            rows = expected.specs[name].rows
            assert np.array_equal(found.read(name, 0, rows), expected.read(name, 0, rows)), name


@pytest.mark.parametrize("name", sorted(SLOW_TABLES))
def test_blocks_of_every_kind_of_numbers_are_llama_quantizes(tmp_path: Path, name: str) -> None:
    """Here, where files need llama.cpp's tables too, which take it seconds in every process."""
    assert_blocks_of_llama_cpp(name, file_of_kinds(tmp_path / "source.gguf"), weighted=True)


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
