"""The figures of a GPU run: sizes against known models, floors and fractions by hand, targets met or not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from evals.gpu.models import (
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
    dense_twin,
    kv_bytes,
    linear_shapes,
    make_decoder,
    named_shapes,
    read_flops,
    weight_bytes,
)
from evals.gpu.report import ahead_until, floor_seconds, markdown
from evals.gpu.rows import OURS, Ceiling, Check, Crossing, Decoding, Product, Reading, Row
from evals.gpu.targets import Target, targets
from evals.synthetic import SHAPES
from qconvert.runtime.config import DecoderConfig

CPU = torch.device("cpu")
CEILINGS = (Ceiling("copy", 4e12, "bytes/s"), Ceiling("matmul", 8e14, "FLOP/s"), Ceiling("launch", 1e-6, "s"))


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
        twin = dense_twin(decoder, torch.float32)
        logits = twin.logits(twin.hidden(text_1T))
        assert logits.shape == (1, 5, vocab) and bool(logits.isfinite().all()) and float(logits.std()) > 0.1
    assert (decoders[BF16].head is decoders[BF16].embed) == config(model).tied
    assert (decoders[BF16].layers[0].attention.q_norm is None) == (model != "qwen3-8b")


def product(encoding: str, splits: int | None, seconds: float, via: str = OURS, rows: int = 1) -> Product:
    return Product(via, encoding, 37888, 3584, rows, splits, seconds, 70_000_000, True)


def decoded(encoding: str, rate: float, via: str = OURS, model: str = "qwen2.5-7b") -> Decoding:
    return Decoding(model, via, encoding, 0, 1 / rate, 4_000_000_000, 0, 258 if via == OURS else None)


def section(page: str, title: str) -> str:
    return page.split(f"## {title}")[1].split("\n## ", maxsplit=1)[0]


def line(text: str, *starts: str) -> list[str]:
    """The cells of the first line of a table that begins with these."""
    for each in text.splitlines():
        cells = [cell.strip() for cell in each.strip("|").split("|")]
        if tuple(cells[: len(starts)]) == starts:
            return cells
    raise AssertionError(f"{starts} not in\n{text}")


def test_decoding_against_its_floor() -> None:
    row = decoded("int4, 16-bit head", 500)
    assert floor_seconds(row, CEILINGS) == pytest.approx(1e-3 + 258e-6)
    assert floor_seconds(decoded("bf16", 100, "transformers eager"), CEILINGS) == pytest.approx(1e-3)
    assert floor_seconds(row, ()) is None
    cells = line(section(markdown((*CEILINGS, row), ()), "Decoding"), "qwen2.5-7b, int4, 16-bit head")
    assert cells[2:] == ["0", "500.0", "2000", "4.00 GB", "258", "1258", "0.63"]
    markdown((row, product("int4", 1, 1e-5)), ())  # no ceilings: no fractions, no error


def test_the_fewest_splits_that_are_as_fast() -> None:
    """Splits cost their reader: 8 of them read 1.2 MB, 0.3 us at 4 TB/s."""
    rows = [product("int4", 1, 30e-6), product("int4", 2, 20e-6), product("int4", 4, 19.9e-6)]
    rows += [product("int4", 8, 19.6e-6), product("bf16", None, 80e-6, "F.linear")]
    kernels = section(markdown((*CEILINGS, *rows), ()), "Matmul kernels")
    gate_up = ("qwen2.5-7b gate_up", "37888 x 3584")
    cells = line(kernels, *gate_up, "int4", OURS)
    assert cells[4:] == ["1: 30.00, 2: 20.00, 4: 19.90, 8: 19.60", "2", "20.00", "3500", "0.87", "yes"]
    assert line(kernels, *gate_up, "bf16", "F.linear")[4:6] == ["", ""]
    scope: dict[str, dict[tuple[str, int, int], int]] = {}
    exec(kernels.split("```python")[1].split("```")[0], scope)
    assert scope["SPLITS"] == {("int4-mma", 37888, 3584): 2}


def test_where_dequantizing_wins() -> None:
    def sweep(*pairs: tuple[int, float | None, float]) -> list[Crossing]:
        return [Crossing("int4", 37888, 3584, *pair) for pair in pairs]

    rows = sweep((1, 1.0, 9.0), (16, 2.0, 9.0), (64, 9.0, 9.0), (128, 20.0, 10.0), (256, 9.0, 11.0))
    assert ahead_until(rows) == 64, "ahead again later is not ahead"
    assert ahead_until(rows[::-1]) == 64 and ahead_until(sweep((1, 2.0, 1.0))) == 0
    assert ahead_until(sweep((1, 1.0, 2.0), (512, None, 3.0))) == 1
    other = [Crossing("int4", 3584, 3584, 1, 1.0, 2.0), Crossing("int4", 3584, 3584, 16, 3.0, 2.0)]
    assert "# int4-mma: 1\n" in section(markdown((*rows, *other), ()), "Few rows")


def target(rows: Sequence[Row], what: str) -> Target:
    return next(each for each in targets(rows) if each.what == what)


def test_targets_met_and_not() -> None:
    none = targets(())
    assert len(none) == 10 and all(each.measured is None and each.met is None for each in none)
    rows = (*CEILINGS, decoded("int4, 16-bit head", 640), decoded("bf16", 254.0))
    assert target(rows, "qwen2.5-7b int4, 16-bit head, batch 1").met is True
    assert target(rows, "qwen2.5-7b bf16, batch 1").met is False
    rows = (
        *CEILINGS,
        product("int4", 1, 30e-6),
        product("int4", 2, 23e-6),
        product("int4", 4, 1e-9, rows=16),
    )
    gate_up = target(rows, "int4 matmul, gate_up of qwen2.5-7b")
    assert gate_up.measured == pytest.approx(70e6 / 23e-6 / 4e12) and gate_up.met is True


def test_targets_of_reading() -> None:
    part = Reading("qwen3-8b", OURS, "bf16", 299_078 // 10, 0.9, 0.9 * 4.6e14, whole=False)
    whole = Reading("qwen3-8b", OURS, "bf16", 299_008, 10.5, 10.5 * 4.0e14, whole=True)
    assert target((*CEILINGS, part), "wikitext-2 by qwen3-8b bf16").measured == pytest.approx(9.0, rel=1e-3)
    both = (*CEILINGS, whole, part)
    assert target(both, "wikitext-2 by qwen3-8b bf16").measured == 10.5
    assert target(both, "wikitext-2 by qwen3-8b bf16").met is False
    fraction = target(both, "perplexity of qwen3-8b bf16")
    assert fraction.measured == pytest.approx(4.6 / 8) and fraction.met is True
    cells = line(section(markdown(both, ()), "Reading"), "qwen3-8b, bf16", OURS, "299,008")
    assert cells[3:] == ["28,477", "400.0", "0.50", "10.50", "measured"]


def test_every_peer_is_a_target() -> None:
    rows = (
        decoded("bf16", 240),
        decoded("int4, 16-bit head", 600),
        decoded("bf16", 250, "transformers CUDA graph"),
        decoded("nf4, 16-bit head", 90, "bitsandbytes eager"),
        product("int4", 2, 20e-6),
        product("int4", None, 21e-6, "torch int4"),
    )
    found = {each.what: each for each in targets(rows) if "ahead of" in each.what}
    assert [(what, each.met) for what, each in found.items()] == [
        ("qwen2.5-7b after 0 tokens: bf16 ahead of transformers CUDA graph", False),
        ("qwen2.5-7b after 0 tokens: int4, 16-bit head ahead of bitsandbytes eager", True),
        ("gate_up of qwen2.5-7b, 1 row: int4 ahead of torch int4", True),
    ]


def test_failures_are_in_capitals() -> None:
    checks = (
        Check("product int4", "fine", 1e-6, 1e-3, True),
        Check("product int4", "one row", math.nan, 1e-3, True),
        Check("step bf16", "again", 1e-3, 2e-3, False),
    )
    text = section(markdown(checks, ()), "Correctness")
    assert "**PRODUCT INT4 FAILED**: one row, error nan" in text
    assert "**STEP BF16 FAILED**: again, error 1.00e-03, limit 2.0e-03, NOT THE SAME BITS AGAIN" in text
    assert line(text, "product int4")[1:] == ["2", "nan", "1.0e-03", "one row", "NO"]
