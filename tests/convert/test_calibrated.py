"""Codes chosen together on a text: less is lost, and layers are calibrated with what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from qconvert.calibrate.calibration import Calibration, Method
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.convert import calibrated
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import Result, RunOptions
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.ggml_types import GGMLType
from qconvert.core.schemes import parse_scheme
from qconvert.core.statistics import InputHessian, RowStatistics
from qconvert.core.values import DenseRows
from qconvert.errors import CheckFailed
from qconvert.evaluate.models import calibrated_on
from qconvert.ops import EncodeBlocks, Quantize
from qconvert.plan.passes.transcode import Target
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import GGUFTarget, Request
from qconvert.quant.dequantize import numbers
from qconvert.quant.hessian import eights_when_asked, factor
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.commands import qconvert
from tests.support.models import EMBED, tiny
from tests.support.savings import saving

VOCAB, WINDOW = 320, 64
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def correlated_words(seed: int = 0) -> np.ndarray:
    """Embeddings of few directions and some noise, so that the columns of a linear's input are correlated."""
    rng = np.random.default_rng(seed)
    few = rng.standard_normal((VOCAB, 24)) @ rng.standard_normal((24, 256))
    return (few * 0.2 + 0.2 * rng.standard_normal((VOCAB, 256))).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = correlated_words()
    return tiny(tmp_path_factory.mktemp("source") / "m", "qwen3", changes={EMBED: words}, **WIDE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose rows of q and k are permuted in GGUF."""
    words = correlated_words(1)
    return tiny(
        tmp_path_factory.mktemp("source") / "llama", "llama", tied=False, changes={EMBED: words}, **WIDE
    )


def text(windows: int = 24, seed: int = 0) -> np.ndarray:
    """Windows of words, some of them far more frequent than others."""
    ranks = np.random.default_rng(seed).zipf(1.3, (windows, WINDOW))
    return (ranks % VOCAB).astype(np.int64)


def request_of(kind: str, fuse: Sequence[str] = ()) -> Request:
    if kind.startswith("int"):
        return Request("quantize", Recipe(scheme=parse_scheme(kind), fuse=tuple(fuse)))
    if kind.startswith("gguf-"):
        return Request("to-gguf", target=GGUFTarget(kind.removeprefix("gguf-")))
    layout, _, scheme = kind.partition(":")
    if scheme.startswith("int"):
        return Request("quantize", Recipe(scheme=parse_scheme(scheme), layout=layout), target=Target(layout))
    return Request("convert", target=Target(layout, table=scheme))


def convert(
    source: Path, out: Path, request: Request, calibration: Calibration | None, **options: Any
) -> Result:
    job = prepare(open_model(str(source)), request, RunOptions(**options), calibration=calibration)
    return execute(job, out)


def output_of(folder: Path, kind: str) -> Path:
    return folder.with_suffix(".gguf") if kind.startswith("gguf-") else folder


def hidden(path: Path, tokens_BT: np.ndarray) -> torch.Tensor:
    """What the last layer of a model gives for a text, normalised."""
    checkpoint = open_checkpoint(path)
    decoder = load_decoder(DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint))
    return decoder.hidden(torch.from_numpy(tokens_BT)).double()


KINDS = (
    "int4-g128",
    "int3-asym-g64",
    "int8-channel",
    "gguf-q4_k_m",
    "gguf-q2_k",
    "gguf-q4_0",
    "gguf-iq4_xs",
    "gguf-iq3_s",
    "compressed-tensors:mxfp4",
    "compressed-tensors:nvfp4",
    "compressed-tensors:fp8-block",
    "bitsandbytes:nf4",
    "gptq:int4-g128",
    "awq:int4-g128",
    "mlx:int4-g64",
)


@pytest.mark.parametrize("kind", KINDS)
def test_less_is_lost_on_tokens_that_no_statistics_saw(kind: str, model: Path, tmp_path: Path) -> None:
    plain, together = (output_of(tmp_path / name, kind) for name in ("plain", "together"))
    convert(model, plain, request_of(kind), None)
    result = convert(model, together, request_of(kind), Calibration(text()))
    unseen = text(8, seed=9)
    wanted, *made = (hidden(path, unseen) for path in (model, plain, together))
    lost_plain, lost = (float((each - wanted).square().sum()) for each in made)
    assert lost < 0.75 * lost_plain, (lost, lost_plain)
    errors = result.outcome.output_errors
    assert len(errors) == 14 + kind.startswith("gguf-")  # where the embedding is the head
    assert all(error.made <= error.plain <= error.energy for error in errors.values())


@pytest.mark.parametrize(
    "kind", ["int4-g128", "int4-g128 fused", "gguf-q4_k_m", "gguf-iq2_xs", "compressed-tensors:nvfp4"]
)
def test_layers_read_what_the_output_holds(
    kind: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What took the place of the weights while later layers were calibrated is what a reader finds."""
    kept: dict[str, np.ndarray] = {}

    class Remembering(calibrated.ReplacedRows):
        def forget(self) -> None:
            kept.update(self._rows)
            super().forget()

    monkeypatch.setattr(calibrated, "ReplacedRows", Remembering)
    kind, _, fused = kind.partition(" ")
    out = output_of(tmp_path / "out", kind)
    request = request_of(kind, ("qkv", "gate_up") if fused else ())
    convert(llama, out, request, Calibration(text(6)))
    weights = CheckpointWeights(open_checkpoint(out))
    architecture = open_checkpoint(llama).architecture
    first = {name: rows for name, rows in kept.items() if ".layers.0." in name}
    assert len(first) == 7
    for name, rows_RI in first.items():
        parameter = architecture.parameters[name]
        found = weights.get(parameter.role, 0)
        if found is None:  # fused in the output
            whole = weights.get("attn.qkv" if "attn" in parameter.role else "mlp.gate_up", 0)
            assert whole is not None
            rows = {"attn.q": 0, "attn.k": 256, "attn.v": 384, "mlp.gate": 0, "mlp.up": 512}[parameter.role]
            stored = numbers(whole, DType.F32).rows_RI[rows : rows + len(rows_RI)]
        else:
            stored = numbers(found, DType.F32).rows_RI
        assert np.array_equal(stored, rows_RI), name


def test_a_tied_embedding_is_rounded_as_the_head_that_it_is(model: Path, llama: Path, tmp_path: Path) -> None:
    for source, tied in ((model, True), (llama, False)):
        out = tmp_path / f"{tied}.gguf"
        result = convert(source, out, request_of("gguf-q4_0"), Calibration(text()))
        errors = result.outcome.output_errors
        assert ("token_embd.weight" in errors) is tied and ("output.weight" in errors) is not tied
        head = errors["token_embd.weight" if tied else "output.weight"]
        assert head.made < 0.9 * head.plain


@pytest.mark.parametrize("kind", ["int4-g128", "gguf-q4_k_m", "gguf-iq1_s"])
def test_threads_and_rows_change_no_byte(kind: str, model: Path, tmp_path: Path) -> None:
    outs = [output_of(tmp_path / name, kind) for name in ("one", "two")]
    for out, jobs, how in zip(outs, (1, 3), ({}, {"rows_bytes": 1_000_000}), strict=True):
        options, calibration = RunOptions(jobs=jobs), Calibration(text(6))
        job = prepare(open_model(str(model)), request_of(kind), options, calibration=calibration)
        execute(saving(job, **how), out)
    one, two = (out if out.is_file() else out / "model.safetensors" for out in outs)
    assert one.read_bytes() == two.read_bytes()


def test_a_quantized_source_is_calibrated_as_it_is_read(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "q8.gguf", request_of("gguf-q8_0"), None)
    target = GGUFTarget("q4_0", allow_requantize=True)
    result = convert(
        tmp_path / "q8.gguf", tmp_path / "q4.gguf", Request("to-gguf", target=target), Calibration(text(6))
    )
    assert len(result.outcome.output_errors) == 15


def test_two_processes_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """Whatever the order of sets, which is another in each: that of this process is not that of seed 1."""
    (tmp_path / "words.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 400)
    how = ("quantize", model, "--bits", 4, "--method", "feedback", "--text", tmp_path / "words.txt")
    how += ("--tokens", "1k", "--window", 64, "-q", "-o")
    here, there = tmp_path / "here", tmp_path / "there"
    ran = qconvert(*how, here)
    assert ran.code == 0, ran.err
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    words = [sys.executable, "-m", "qconvert", *map(str, (*how, there))]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
    assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()


def test_inputs_of_the_original_model_are_another_calibration(model: Path, tmp_path: Path) -> None:
    calibration = Calibration(text())
    made = [
        convert(model, tmp_path / name, request_of("int4-g128"), each)
        for name, each in (("shifted", calibration), ("original", replace(calibration, shift=False)))
    ]
    assert [each.record["calibration"]["inputs"] for each in made] == ["quantized", "original"]
    unseen = text(8, seed=9)
    wanted = hidden(model, unseen)
    lost = [float((hidden(each.path, unseen) - wanted).square().sum()) for each in made]
    assert lost[0] < lost[1]


def test_the_manifest_says_what_was_read_and_what_it_won(model: Path, tmp_path: Path) -> None:
    calibration = Calibration(text(), {"files": [{"name": "novel.txt", "sha256": "ab" * 32, "bytes": 5}]})
    convert(model, tmp_path / "out", request_of("int4-g128"), calibration)
    said = json.loads((tmp_path / "out" / "qconvert.json").read_text())
    found = said["calibration"]
    assert (found["method"], found["tokens"], found["tensors"]) == ("feedback", 24 * WINDOW, 14)
    assert 0 < found["output_error"]["written"] < found["output_error"]["nearest"] < 1
    linear = said["tensors"]["model.layers.0.mlp.down_proj.weight"]["output_error"]
    assert 0 < linear["written"] < linear["nearest"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "error feedback on 1,536 tokens of `novel.txt`" in card


def test_a_gguf_says_what_it_was_calibrated_on(model: Path, tmp_path: Path) -> None:
    calibration = Calibration(text(6), {"files": [{"name": "novel.txt", "sha256": "ab" * 32, "bytes": 5}]})
    convert(model, tmp_path / "out.gguf", request_of("gguf-q4_0"), calibration)
    field = gguf.GGUFReader(tmp_path / "out.gguf").fields["qconvert.calibration"]
    said = json.loads(field.contents())
    assert said["method"] == "feedback" and said["text"]["files"][0]["name"] == "novel.txt"
    convert(model, tmp_path / "out", request_of("int4-g128"), calibration)
    assert calibrated_on(tmp_path / "out.gguf") == calibrated_on(tmp_path / "out") == {"ab" * 32}


def test_rows_of_lattices_stay_alone_where_others_make_up_for_one_another(
    model: Path, tmp_path: Path
) -> None:
    """Of a mixture, two-sided: codes of scalars make up for other rows, those of lattices for columns."""
    request, unseen = request_of("gguf-iq2_xs"), text(8, seed=9)
    wanted, lost = hidden(model, unseen), {}
    for method in ("feedback", "two-sided"):
        out = tmp_path / f"{method}.gguf"
        convert(model, out, request, Calibration(text(16), method=method))
        lost[method] = float((hidden(out, unseen) - wanted).square().sum())
    assert 0 < lost["two-sided"] < 1.1 * lost["feedback"]
    assert lost["two-sided"] != lost["feedback"]


def test_every_expert_is_rounded_with_a_hessian(tmp_path: Path) -> None:
    """Those that no token chose, with what all experts read."""
    from tests.layouts.test_experts import BIG, saved

    source = saved("qwen3-moe", tmp_path / "m", **BIG)
    vocab = open_checkpoint(source).architecture.parameters["model.embed_tokens.weight"].shape[0]
    few = (text(3) % vocab)[:, :16]
    result = convert(source, tmp_path / "out", request_of("int4-g32"), Calibration(few))
    errors = result.outcome.output_errors
    experts = [name for name in errors if ".experts." in name]
    assert len(experts) >= 6
    assert all(errors[name].energy > 0 and errors[name].made <= errors[name].plain for name in experts)


@pytest.mark.parametrize("method", ["feedback", "two-sided"])
def test_latent_attention_is_rounded_too(method: Method, tmp_path: Path) -> None:
    from tests.runtime.test_decoder_families import LATENT, saved
    from tests.support.decoder_models import tiny

    source = saved(tiny("deepseek_v3", deviation=0.1, **LATENT), tmp_path / "m")
    few = (text(3) % 160)[:, :16]
    calibration = Calibration(few, method=method, gradient_tokens=few.size)
    result = convert(source, tmp_path / "out", request_of("int4-g2"), calibration)
    errors = result.outcome.output_errors
    roles = {name.split("self_attn.")[1] for name in errors if "self_attn." in name}
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert roles == {f"{name}.weight" for name in names}
    made, plain = (sum(getattr(each, kind) for each in errors.values()) for kind in ("made", "plain"))
    assert made < plain or method == "two-sided"  # which makes another error small


def hessian_of(x_NI: np.ndarray, held_NI: np.ndarray) -> InputHessian:
    h_II = (x_NI.T @ x_NI / len(x_NI)).astype(np.float32)
    order_I, factor_II, damping = factor(h_II)
    eights = eights_when_asked(h_II, damping)
    return InputHessian(h_II, order_I, factor_II, None, held_NI, held_NI, eights)


@pytest.mark.parametrize(
    "op",
    [
        Quantize(AffineInt(4, 64, True, DType.BF16), search=True),
        EncodeBlocks(GGMLType["Q4_K"].encoding),
        EncodeBlocks(GGMLType["IQ2_XXS"].encoding),
    ],
    ids=["int4", "q4_k", "iq2_xxs"],
)
def test_no_row_gets_worse_on_tokens_held_out(op: Any) -> None:
    """Where the held-out inputs have nothing to do with the others, rows keep their plain codes."""
    rng = np.random.default_rng(3)
    mix = rng.standard_normal((8, 256))
    x_NI = (rng.standard_normal((512, 8)) @ mix).astype(np.float32)
    held_NI = rng.standard_normal((256, 256)).astype(np.float32)
    w_RI = rng.standard_normal((48, 256)).astype(np.float32)
    given = hessian_of(x_NI, held_NI)
    moments_I = np.ascontiguousarray(given.hessian_II.diagonal())
    rows = DenseRows(w_RI, DType.F32)
    plain, _ = op.apply(rows, (RowStatistics(0, 48, moments_I),))
    made, finding = op.apply(rows, (RowStatistics(0, 48, moments_I, given),))
    losses = [
        np.square((w_RI - numbers(each, DType.F32).rows_RI) @ held_NI.T).sum(axis=1) for each in (plain, made)
    ]
    assert (losses[1] <= losses[0] * (1 + 1e-5)).all()
    assert finding.output_error.kept > 0


def test_one_command(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text(
        "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, i))\n" * 150
    )
    ran = qconvert(
        "quantize", "embedded", "--bits", 4, "--method", "gptq", "--text", words, "--tokens", "2k",
        "--window", 64, "-o", tmp_path / "out",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    said = json.loads((tmp_path / "out" / "qconvert.json").read_text())["calibration"]
    assert said["method"] == "feedback" and said["text"]["files"][0]["name"] == "words.txt"
    assert said["tokens"] <= 2048


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        (("--text", "x.txt"), "--text: --method nearest reads no text", 2),
        (("--tokens", "all"), "--tokens: --method nearest reads no text", 2),
        (("--method", "feedback", "--text", "absent.txt"), "absent.txt", 1),
        (("--method", "feedback", "--tokens", "1"), "1 tokens: fewer than", 1),
        (("--method", "feedback", "--window", "100000"), "--window 100000: the model has", 1),
        (("--method", "feedback", "--calibration", "stats"), "measures its own statistics", 1),
        (("--inputs", "original"), "--inputs: --method nearest reads no text", 2),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    flags: tuple[str, ...], says: str, code: int, tmp_path: Path
) -> None:
    ran = qconvert("quantize", "embedded", "--bits", 4, *flags, "-o", tmp_path / "out")
    assert ran.code == code and ran.err.startswith("Error: ") and says in ran.err
    assert not (tmp_path / "out").exists()


def test_an_input_that_is_no_number_is_refused(model: Path, tmp_path: Path) -> None:
    norm = {"model.layers.0.input_layernorm.weight": np.full(256, 3e38, np.float32)}
    source = tiny(tmp_path / "m", "qwen3", changes={EMBED: correlated_words(), **norm}, dtype="f32", **WIDE)
    with pytest.raises(CheckFailed, match="holds NaN or infinity on the calibration text"):
        convert(source, tmp_path / "out", request_of("int4-g128"), Calibration(text(4)))
    assert not (tmp_path / "out").exists()
