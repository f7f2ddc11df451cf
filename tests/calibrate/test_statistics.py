"""Statistics as inputs of units: one importance matrix for GGUF and for integers by groups."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.calibrate.moments import InputMoments, InputStatistics
from qconvert.calibrate.statistics_file import StoredStatistics, read_statistics, write_statistics
from qconvert.convert.runner import rows_statistics
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import AffineInt, ModelTensor, Unquantized
from qconvert.core.statistics import InputKey, StatisticsKey
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.huggingface.safetensors_file import read_header
from qconvert.formats.io import limits
from qconvert.formats.layouts.registry import traits_of
from qconvert.models import Architecture
from qconvert.ops import Dequantize, PadColumns, PermuteColumns, Quantize
from qconvert.plan.plan import Unit, whole
from tests.support.commands import failed, files_of, made, qconvert
from tests.support.gguf_models import imatrix_dat
from tests.support.models import stored, tiny, tiny_config

Q = "model.layers.0.self_attn.q_proj.weight"


class Counting:
    """Statistics that say which key they are of."""

    record: Json = {}  # noqa: RUF012

    def __contains__(self, key: object) -> bool:
        return True

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        return np.full(4, float(key.expert or 0), np.float32)

    def rounding(self, key: StatisticsKey) -> None:
        return None


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


def losses(plain: Path, weighed: Path, model: Path, importance_I: np.ndarray) -> list[float]:
    """Weighted squared errors of a q projection in two outputs."""
    from qconvert.checkpoint.facts import numbers_of
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.quant.casts import cast

    def rows(folder: Path) -> np.ndarray:
        checkpoint = open_checkpoint(folder)
        name = next(n for n in checkpoint.tensors if "layers.0.self_attn.q" in n and "norm" not in n)
        value = numbers_of(checkpoint.reader.read(checkpoint.tensors[name], 0, 256))
        return cast(value, DType.F32)[0].rows_RI

    return [float((importance_I * (rows(folder) - rows(model)) ** 2).sum()) for folder in (plain, weighed)]


def test_statistics_of_very_many_inputs_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131,101 arrays in one file, which safetensors reads too; a model's file may have fewer."""
    random = np.random.default_rng(0)
    inputs = {
        InputKey((role,), layer): InputMoments(random.random(4), random.random(4), layer)
        for layer in range(10_925)
        for role in ("attn.q", "attn.o", "mlp.up", "mlp.down")
    }
    record: Json = {"texts": ["a"], "window": 64, "files": []}
    stored = StoredStatistics(InputStatistics(inputs, np.arange(8)), {"name": "m"}, (record,))
    path = tmp_path / "statistics.safetensors"
    write_statistics(path, stored)
    began = time.process_time()
    found = read_statistics(path).statistics.inputs
    assert time.process_time() - began < 13
    assert found.keys() == inputs.keys()
    for key in list(inputs)[::5000]:
        assert found[key].count == inputs[key].count
        assert np.array_equal(found[key].squares_I, inputs[key].squares_I.astype(np.float32))
    with safe_open(path, framework="numpy") as file:
        assert len(file.keys()) == 3 * len(inputs) + 1 == 131_101
    with pytest.raises(CorruptCheckpoint, match=r"131,101 tensors \(limit 131,072 in one file\)"):
        read_header(path)
    few = StoredStatistics(InputStatistics(dict(islice(inputs.items(), 400)), np.arange(8)), {}, (record,))
    monkeypatch.setattr(limits, "STATISTICS_TENSORS", 1_200)
    with pytest.raises(BadRecipe, match=r"1,201 arrays \(limit 1,200 in one file\)"):
        write_statistics(tmp_path / "more.safetensors", few)
    assert not (tmp_path / "more.safetensors").exists()


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
    model = tiny(tmp_path / "m", dtype="f32")
    importance_I = np.random.default_rng(3).lognormal(0, 2, 256).astype(np.float32)
    file = imatrix(tmp_path / "i.dat", tiny_config("qwen3"), importance_I)
    how = ("--scheme", "int3-g32", *fuse)
    folders = [
        made("quantize", model, *how, "-o", tmp_path / "plain"),
        made("quantize", model, *how, "--imatrix", file, "-o", tmp_path / "weighed"),
    ]

    manifest = json.loads((folders[1] / "qconvert.json").read_text())
    weighed = {"file": "i.dat", "dataset": None, "chunks": 0, "tensors": 2 if fuse else 6}
    assert manifest["statistics"] == weighed
    assert f"Errors of {weighed['tensors']} tensors" in (folders[1] / "README.md").read_text()
    plain, weighted = losses(*folders, model, importance_I)
    assert weighted < 0.8 * plain


@pytest.mark.parametrize(
    "how",
    [
        ("convert", "--to", "compressed-tensors", "--scheme", "mxfp4"),
        ("convert", "--to", "compressed-tensors", "--scheme", "nvfp4"),
        ("convert", "--to", "compressed-tensors", "--scheme", "fp8-channel"),
        ("convert", "--to", "fp8"),
        ("convert", "--to", "mlx", "--scheme", "nvfp4"),
        ("convert", "--to", "mlx", "--scheme", "mxfp4"),
        ("convert", "--to", "mlx", "--scheme", "int4-asym-g64"),
        ("convert", "--to", "gptq", "--scheme", "int4-g128"),
        ("convert", "--to", "bitsandbytes", "--scheme", "nf4"),
        ("convert", "--to", "bitsandbytes", "--scheme", "fp4-nested"),
        ("quantize", "--layout", "mlx", "--bits", "4", "--group-size", "64", "--asym"),
        ("quantize", "--layout", "awq", "--bits", "4", "--asym"),
    ],
    ids=lambda how: "-".join(part.strip("-") for part in how),
)
def test_every_layout_weighs_new_codes(tmp_path: Path, how: tuple[str, ...]) -> None:
    model = tiny(tmp_path / "m", dtype="bf16")
    importance_I = np.random.default_rng(3).lognormal(0, 2, 256).astype(np.float32)
    file = imatrix(tmp_path / "i.dat", tiny_config("qwen3"), importance_I)
    command, *options = how
    plain = made(command, model, *options, "-o", tmp_path / "plain")
    weighed = made(command, model, *options, "--imatrix", file, "-o", tmp_path / "weighed")
    assert json.loads((weighed / "qconvert.json").read_text())["statistics"]["tensors"] == 6
    before, after = losses(plain, weighed, model, importance_I)
    assert after < 0.97 * before
    kept = "model.layers.0.mlp.down_proj.weight"  # nothing was measured for it
    assert stored_bytes(plain, kept) == stored_bytes(weighed, kept)


def stored_bytes(folder: Path, name: str) -> dict[str, bytes]:
    """The arrays of a weight, but for its numbers that depend on others."""
    prefix = name.removesuffix("weight")
    return {key: data for key, (_, _, data) in stored(folder).items() if key.startswith(prefix)}


def test_columns_take_their_importance_along() -> None:
    """Where a layout moves columns, or pads them, before they get codes."""
    moments_I = np.array([1, 2, 3, 4], np.float32)

    class Source(Counting):
        def second_moments(self, key: StatisticsKey) -> np.ndarray:
            return moments_I

    plain = ModelTensor("w", (2, 4), Unquantized(DType.F32))
    int4 = AffineInt(4, 2, True, DType.F32, act_order=True)
    key = (StatisticsKey("mlp.down", 0),)
    encode = Quantize(AffineInt(4, 2, True, DType.F32), True)
    padded = Unit((whole(plain),), (), plain, key).then(PadColumns(6)).then(encode)
    moved = Unit((whole(plain),), (), replace(plain, encoding=int4), key)
    moved = moved.then(PermuteColumns((3, 1, 0, 2))).then(Dequantize(DType.F32)).then(encode)
    for unit, wanted in ((padded, [1, 2, 3, 4, 0, 0]), (moved, [4, 2, 1, 3])):
        (found,) = rows_statistics(unit, 0, 2, Source())
        np.testing.assert_array_equal(found.second_moments_I, wanted)


def test_padded_columns_weigh_nothing(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m")
    shape = tiny_config("qwen3")
    entries = {
        f"blk.{layer}.ffn_down.weight": (1, [1.0] * int(str(shape["intermediate_size"])))
        for layer in range(2)
    }
    file = tmp_path / "i.dat"
    file.write_bytes(imatrix_dat(entries))
    how = ("quantize", model, "--bits", 4, "--group-size", 64, "--pad-to-tp", 5)
    plain, weighed = (
        made(*how, *more, "-o", tmp_path / name)
        for name, more in (("plain", ()), ("weighed", ("--imatrix", file)))
    )
    assert files_of(plain)["model.safetensors"] == files_of(weighed)["model.safetensors"]
    assert json.loads((weighed / "qconvert.json").read_text())["statistics"]["tensors"] == 2


def test_statistics_that_weigh_nothing_are_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m")
    file = imatrix(tmp_path / "i.dat", tiny_config("qwen3"))
    how = ("--imatrix", file, "-o", tmp_path / "out")
    held = traits_of("compressed-tensors").described
    ran = qconvert("convert", model, "--to", "compressed-tensors", "--scheme", "fp8-tensor", *how)
    failed(
        ran,
        "--calibration: fp8-tensor has one scale for all, which is not searched",
        f"leave it out; compressed-tensors holds {held}",
        code=2,
    )
    ran = qconvert("convert", model, "--to", "bf16", *how)
    failed(ran, "--calibration: is not for --to bf16", "leave it out", code=2)
    quantized = made("quantize", model, "--bits", 4, "-o", tmp_path / "q")
    ran = qconvert("convert", quantized, "--to", "gptq", *how)
    failed(
        ran,
        "no weight gets new codes, whose errors statistics could weigh",
        "leave them out, or name a scheme for a 16-bit model",
    )
    (tmp_path / "none.dat").write_bytes(imatrix_dat({"token_embd.weight": (1, [1.0])}))
    ran = qconvert("quantize", model, "--bits", 4, "--imatrix", tmp_path / "none.dat", "-o", tmp_path / "out")
    failed(ran, "the statistics have none of the weights that are quantized", "give those of this model")


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
