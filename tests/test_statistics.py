"""Statistics as inputs of units: one importance matrix for GGUF and for integers by groups."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.convert.runner import rows_statistics
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.statistics import StatisticsKey
from qconvert.models import Architecture
from qconvert.plan.plan import Unit, whole
from tests.commands import failed, files_of, made, qconvert
from tests.gguf_models import imatrix_dat
from tests.models import tiny, tiny_config

Q = "model.layers.0.self_attn.q_proj.weight"


class Counting:
    """Statistics that say which key they are of."""

    record: Json = {}  # noqa: RUF012

    def __contains__(self, key: object) -> bool:
        return True

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        return np.full(4, float(key.expert or 0), np.float32)


def test_rows_of_a_stack_of_experts_get_the_statistics_of_their_expert() -> None:
    stack = ModelTensor("w", (3, 5, 4), Unquantized(DType.F32))
    keys = tuple(StatisticsKey("mlp.experts.up", 0, expert) for expert in range(3))
    unit = Unit((whole(stack),), (), stack, keys)
    found = rows_statistics(unit, 3, 12, Counting())
    assert [(s.first, s.last, s.second_moments_I[0]) for s in found] == [(0, 2, 0), (2, 7, 1), (7, 9, 2)]
    assert rows_statistics(unit, 5, 10, Counting())[0].first == 0


def imatrix(path: Path, config: dict[str, object], value: np.ndarray | None = None) -> Path:
    """An importance matrix of a tiny model: `value` for the inputs of every q, k and v, else ones."""
    widths = {"attn_q": 256, "attn_k": 256, "attn_v": 256}
    entries = {
        f"blk.{layer}.{name}.weight": np.ones(width, np.float32) if value is None else value
        for layer in range(2)
        for name, width in widths.items()
    }
    path.write_bytes(imatrix_dat({name: (1, values.tolist()) for name, values in entries.items()}))
    return path


def test_keys_are_roles_and_layers(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    value = np.arange(256, dtype=np.float32)
    found = open_imatrix(imatrix(tmp_path / "i.dat", config, value), Architecture.of(config))
    key = StatisticsKey("attn.q", 1)
    assert key in found and StatisticsKey("attn.q", 2) not in found
    assert np.array_equal(found.second_moments(key), value)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-channel", "int3-asym-g64"])
def test_equal_importance_changes_no_byte(tmp_path: Path, scheme: str) -> None:
    model = tiny(tmp_path / "m")
    even = imatrix(tmp_path / "i.dat", tiny_config("qwen3"))
    plain = made("quantize", model, "--scheme", scheme, "-o", tmp_path / "plain")
    weighed = made("quantize", model, "--scheme", scheme, "--imatrix", even, "-o", tmp_path / "weighed")
    assert files_of(plain)["model.safetensors"] == files_of(weighed)["model.safetensors"]


@pytest.mark.parametrize("fuse", [(), ("--fuse", "qkv")])
def test_errors_are_weighed_by_the_importance_of_their_column(tmp_path: Path, fuse: tuple[str, ...]) -> None:
    from qconvert.checkpoint.facts import numbers_of
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.quant.casts import cast

    model = tiny(tmp_path / "m", dtype="f32")
    importance_I = np.random.default_rng(3).lognormal(0, 2, 256).astype(np.float32)
    file = imatrix(tmp_path / "i.dat", tiny_config("qwen3"), importance_I)
    how = ("--scheme", "int3-g32", *fuse)
    folders = [
        made("quantize", model, *how, "-o", tmp_path / "plain"),
        made("quantize", model, *how, "--imatrix", file, "-o", tmp_path / "weighed"),
    ]

    def rows(folder: Path) -> np.ndarray:
        checkpoint = open_checkpoint(folder)
        name = next(n for n in checkpoint.tensors if "layers.0.self_attn.q" in n and "norm" not in n)
        value = numbers_of(checkpoint.reader.read(checkpoint.tensors[name], 0, 256))
        return cast(value, DType.F32)[0].rows_RI

    manifest = json.loads((folders[1] / "qconvert.json").read_text())
    weighed = {"file": "i.dat", "dataset": None, "chunks": 0, "tensors": 2 if fuse else 6}
    assert manifest["statistics"] == weighed
    assert f"Errors of {weighed['tensors']} tensors" in (folders[1] / "README.md").read_text()
    losses = [float((importance_I * (rows(folder) - rows(model)) ** 2).sum()) for folder in folders]
    assert losses[1] < 0.8 * losses[0]


def test_what_weighs_nothing_is_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m")
    file = imatrix(tmp_path / "i.dat", tiny_config("qwen3"), np.ones(128, np.float32))
    ran = qconvert("quantize", model, "--bits", 4, "--imatrix", file, "-o", tmp_path / "out")
    failed(
        ran,
        "blk.0.attn_q.weight: the importance matrix has 128 columns for it, the model 256",
        "give one that llama-imatrix measured on this model",
    )
    ran = qconvert("quantize", model, "--bits", 4, "--min-max", "--imatrix", file)
    failed(ran, "--calibration: --min-max does not weigh errors", "leave out one of the two", code=2)
