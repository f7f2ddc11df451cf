"""The run on a GPU: models of real sizes, records that outlive it, and all of it dry on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")

from evals.bench import Bench, load, markdown
from evals.random_models import (
    BF16,
    GROUP,
    INT4,
    INT4_HEAD8,
    INT8,
    MODELS,
    TINY,
    Maker,
    config_of,
    dense,
    kv_bytes,
    linear_shapes,
    make_decoder,
    named_shapes,
    read_flops,
    weight_bytes,
)
from evals.speed import main
from evals.speed_gpu import SECTIONS
from evals.synthetic import SHAPES
from qconvert.runtime.config import DecoderConfig
from tests.project.test_imports import ROOT, run_python
from tests.runtime.test_cuda_on_device import twin as plain_twin

CPU = torch.device("cpu")


def config(model: str) -> DecoderConfig:
    return DecoderConfig.from_hf(config_of(model))


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("qwen2.5-0.5b", "Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-7b", "Qwen2.5-7B-Instruct"),
        ("qwen3-0.6b", "Qwen--Qwen3-0.6B"),
        ("qwen3-8b", "Qwen--Qwen3-8B"),
    ],
)
def test_shapes_are_those_of_the_models(model: str, file: str, assets: Path) -> None:
    real = json.loads((assets / "metadata/configs" / f"{file}_config.json").read_text())
    shape = {key: value for key, value in SHAPES[model].items() if key != "torch_dtype"}
    assert {key: real.get(key) for key in shape} == shape


def test_products_of_a_step() -> None:
    assert linear_shapes(config("qwen2.5-7b")) == {
        "qkv": (4608, 3584),
        "o": (3584, 3584),
        "gate_up": (37888, 3584),
        "down": (3584, 18944),
        "head": (152064, 3584),
    }
    assert linear_shapes(config("qwen3-0.6b"))["qkv"] == (4096, 1024)  # heads wider than the model
    assert linear_shapes(config("qwen3-0.6b"))["o"] == (1024, 2048)
    assert len(named_shapes(MODELS)) == 25, "no two of the models share a shape"


def test_sizes_of_the_models() -> None:
    """Parameters of the linears and of the head, in millions; bytes of a token's keys and values."""
    known = {"qwen2.5-0.5b": (357.8, 136.1, 12288), "qwen2.5-1.5b": (1310, 233.4, 28672),
             "qwen2.5-7b": (6525, 545.0, 57344), "qwen3-0.6b": (440.4, 155.6, 114688),
             "qwen3-8b": (6946, 622.3, 147456)}  # fmt: skip
    for model, (linears, head, kv) in known.items():
        c = config(model)
        millions = {name: math.prod(shape) / 1e6 for name, shape in linear_shapes(c).items()}
        assert millions.pop("head") == pytest.approx(head, rel=1e-3)
        assert c.layers * sum(millions.values()) == pytest.approx(linears, rel=1e-3)
        assert kv_bytes(c, 1) == kv and kv_bytes(c, 2048) == 2048 * kv


def test_operations_of_reading() -> None:
    """GFLOP per token in windows of 2048: 2 per weight, and attention over 1024 positions on average."""
    for model, known in {"qwen2.5-7b": 14.6, "qwen3-8b": 15.7, "qwen2.5-1.5b": 3.26}.items():
        assert read_flops(config(model), 1, 2048) / 1e9 == pytest.approx(known, rel=0.01)
    c = config("qwen2.5-7b")
    assert read_flops(c, 10, 2048) == pytest.approx(10 * read_flops(c, 1, 2048))


@pytest.mark.parametrize("encoding", ["int4", "int8", "bf16"])
def test_random_weights_are_like_a_models(encoding: str) -> None:
    out, width = 200, 384
    first, second = Maker(CPU).weights(encoding, out, width, copies=2)
    w = dense(first, torch.float32)
    assert w.shape == (out, width) == first.shape
    assert float(w.std()) == pytest.approx(0.02, rel=0.1) and abs(float(w.mean())) < 0.004
    assert not torch.equal(w, dense(second, torch.float32))
    assert torch.equal(w, dense(Maker(CPU).weights(encoding, out, width, copies=2)[0], torch.float32))
    padded = 256 if encoding != "bf16" else out  # rows are padded to whole tiles
    codes = {"int4": 0.5, "int8": 1.0, "bf16": 2.0}[encoding] * padded * width
    scales = 0 if encoding == "bf16" else 2 * padded * width // GROUP
    assert first.nbytes == codes + scales


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen3-8b"])
def test_random_models_compute(model: str) -> None:
    decoders = {
        recipe: make_decoder(config_of(model, tiny=True), recipe, Maker(CPU))
        for recipe in (INT4, INT4_HEAD8, INT8, BF16)
    }
    hidden, mlp, vocab = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
    linears = 256 * hidden + hidden * 128 + 3 * mlp * hidden  # 2 heads and 1 of keys and values, of 64
    quantized = linears + 2 * linears // GROUP
    head8 = vocab * (hidden + 4)
    assert weight_bytes(decoders[BF16]) == 2 * (linears + vocab * hidden)
    assert weight_bytes(decoders[INT4]) == quantized - linears // 2 + 2 * vocab * hidden
    assert weight_bytes(decoders[INT4_HEAD8]) == quantized - linears // 2 + head8
    assert weight_bytes(decoders[INT8]) == quantized + head8
    text_1T = torch.tensor([[3, 1, 4, 1, 5]])
    for decoder in decoders.values():
        twin = plain_twin(decoder, torch.float32)
        logits = twin.logits(twin.hidden(text_1T))
        assert logits.shape == (1, 5, vocab) and bool(logits.isfinite().all()) and float(logits.std()) > 0.1
    assert (decoders[BF16].head is decoders[BF16].embed) == config(model).tied
    assert (decoders[BF16].layers[0].attention.q_norm is None) == (model != "qwen3-8b")


def bench_at(path: Path, seconds: float = 60.0) -> Bench:
    return Bench(CPU, time.monotonic() + seconds, path, dry=True, section="kernels")


def test_a_record_is_there_at_once_and_an_error_costs_one(tmp_path: Path) -> None:
    bench = bench_at(tmp_path / "gpu.jsonl")

    def broken() -> None:
        bench.add(us=math.nan, rows=1, of_copy=0.123456)
        raise RuntimeError("out of memory\nand much more text")

    bench.attempt("int4 down", broken)
    with bench.path.open("a") as file:  # the line that a killed process was writing
        file.write('{"section": "kern')
    assert load(bench.path) == [
        {"section": "kernels", "us": None, "rows": 1, "of_copy": 0.1235},
        {"section": "kernels", "note": "int4 down: RuntimeError: out of memory"},
    ]


def test_nothing_starts_after_the_end(tmp_path: Path) -> None:
    bench, ran = bench_at(tmp_path / "gpu.jsonl", seconds=-1), list[int]()
    bench.attempt("int4 down", lambda: ran.append(1))
    assert not ran and load(bench.path) == [{"section": "kernels", "note": "int4 down: no time left"}]


def test_a_table_for_every_kind_of_record() -> None:
    records = [
        {"section": "decode", "model": "m", "tokens_per_s": 600.0, "launches": None},
        {"section": "decode", "note": "left out"},
        {"section": "reading", "model": "m", "TFLOPs": 500.0},
    ]
    page = markdown(records)
    assert (
        "## decode\n\n| model | tokens per s | launches |\n|---|---|---|\n| m | 600.0 |  |\n\n- left out"
        in page
    )
    assert page.index("## decode") < page.index("## reading")


def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = CliRunner().invoke(main, ["gpu", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 1 and "finds no CUDA device" in ran.output and not (tmp_path / "out").exists()


COUNT_LAUNCHES = """
import torch, triton.runtime.interpreter as interpreter
from qconvert.runtime.cuda.decode_step import open_step, read_greedily
from evals.random_models import BF16, Maker, config_of, make_decoder
decoder = make_decoder(config_of("qwen3-8b", tiny=True), BF16, Maker(torch.device("cpu")))
count, call = [0], interpreter.GridExecutor.__call__
def counted(self, *args, **kwargs):
    count[0] += 1
    return call(self, *args, **kwargs)
interpreter.GridExecutor.__call__ = counted
step = open_step(decoder, decoder.cache(1, 2), greedy=True)
before = count[0]
read_greedily(step, torch.tensor([1]), 1)
print(count[0] - before)
"""


def test_the_floor_counts_the_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of triton; the others are torch's: two for the embedding, the position, the likeliest."""
    pytest.importorskip("triton")
    from evals.gpu_sections import LAYER_LAUNCHES, OTHER_LAUNCHES

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    launches = int(run_python("-c", COUNT_LAUNCHES).stdout)
    assert launches == LAYER_LAUNCHES * TINY["num_hidden_layers"] + OTHER_LAUNCHES - 4


def test_everything_runs_dry(tmp_path: Path) -> None:
    """The script itself, on a CPU: every section to its end, its kernels in triton's interpreter."""
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    earlier = [{"section": "decode", "note": "replaced"}, {"section": "another", "note": "kept"}]
    path = tmp_path / "gpu-dry-run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in earlier))
    script = ["bash", str(ROOT / "evals/results/run_gpu.sh"), "--dry-run", "--minutes", "60"]
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    records = load(path)
    assert list(dict.fromkeys(each["section"] for each in records)) == ["another", "ceilings", *SECTIONS]
    notes = [each["note"] for each in records if "note" in each]
    assert set(notes) <= {"kept", "transformers: not installed", "bitsandbytes: not installed"}
    assert [each["checks"] for each in records if "checks" in each] == ["passed"]
    products = [each for each in records if "us" in each and "product" in each]
    assert {each["via"] for each in products} >= {
        "qconvert int4",
        "qconvert int8",
        "F.linear bf16",
        "torch int4 int4",
    }
    assert all(each["error"] < 1e-2 and each["us"] > 0 for each in products)
    assert {each["context"] for each in records if "of_floor" in each} == {0, 5}
    assert path.with_suffix(".md").read_text() in ran.stdout
