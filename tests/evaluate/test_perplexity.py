"""Evaluations end to end, against transformers' own losses and by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from qconvert.errors import BadRecipe, CheckFailed
from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.perplexity import evaluate, run
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.formats.tokenizers.tokenized_text import Text, Tokens
from qconvert.report.page import to_markdown, to_terminal
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from qconvert.runtime.storage import DenseWeight
from tests.evaluate.test_corpora import write_tokenizer
from tests.support.decoder_models import StateDict, decoder_of, tiny, tokens

IDS = tokens(1, 75)[0]
MODELS = {label: tiny("qwen2", seed=seed) for seed, label in enumerate(("base", "other"))}


def as_tokens(ids: torch.Tensor, bos: int | None = None) -> Tokens:
    return Tokens(ids.numpy(), bos, Text("test", "x" * 300, "ab" * 32, 300), "cd" * 32)


def eval_model(label: str) -> EvalModel:
    return EvalModel(label, decoder_of(MODELS[label]), 1_000_000, 16.0)


def log_probabilities(label: str, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [MODELS[label](window[None]).logits[0].double().log_softmax(-1) for window in windows]


def losses(label: str, windows: list[torch.Tensor], scored: list[int]) -> torch.Tensor:
    parts = [
        -log_p[:-1].gather(1, window[1:, None])[first - 1 :, 0]
        for log_p, window, first in zip(log_probabilities(label, windows), windows, scored, strict=True)
    ]
    return torch.cat(parts)


def test_gptq_is_exp_of_the_token_mean() -> None:
    report = evaluate([eval_model("base")], None, as_tokens(IDS), protocol_named("gptq2048", 16))
    want = losses("base", [IDS[i : i + 16] for i in range(0, 64, 16)], [1] * 4)
    (model,) = report.models
    assert (report.protocol, report.chunks, report.scored_tokens) == ("gptq2048@16", 4, 60)
    assert model.perplexity.value == pytest.approx(math.exp(want.mean()), rel=1e-5)
    assert model.bits_per_byte == pytest.approx(float(want.mean()) / math.log(2) * 75 / 300, rel=1e-5)
    assert model.versus is None and report.reference is None


def test_hf_stride_scores_every_token_in_its_longest_context() -> None:
    report = evaluate([eval_model("base")], None, as_tokens(IDS[:41]), protocol_named("hf-stride", 16))
    want = losses("base", [IDS[i : min(i + 16, 41)] for i in range(0, 33, 8)], [1, 8, 8, 8, 8])
    assert report.scored_tokens == 40
    assert report.models[0].perplexity.value == pytest.approx(math.exp(want.mean()), rel=1e-5)


def test_llamacpp_begins_every_window_with_the_first_token_of_the_tokenizer() -> None:
    report = evaluate([eval_model("base")], None, as_tokens(IDS, bos=5), protocol_named("llamacpp512", 16))
    framed = torch.cat([torch.tensor([5]), IDS])
    windows = [torch.cat([torch.tensor([5]), framed[i + 1 : i + 16]]) for i in range(0, 64, 16)]
    want = losses("base", windows, [9] * 4)
    assert (report.scored_tokens, report.tokens) == (28, 75)
    assert report.models[0].perplexity.value == pytest.approx(math.exp(want.mean()), rel=1e-5)


def compared(**options: object) -> PerplexityReport:
    return evaluate(
        [eval_model("other")], eval_model("base"), as_tokens(IDS), protocol_named("gptq2048", 16), **options
    )


def test_comparison_with_the_reference() -> None:
    report = compared(batch_tokens=48)
    windows = [IDS[i : i + 16] for i in range(0, 64, 16)]
    base, other = (losses(label, windows, [1] * 4) for label in MODELS)
    pairs = zip(*(log_probabilities(label, windows) for label in MODELS), strict=True)
    kl = torch.cat([(p.exp() * (p - q)).sum(-1)[:-1] for p, q in pairs])
    versus = report.models[1].versus
    assert [model.label for model in report.models] == ["base", "other"]
    assert report.models[0].versus is None and versus is not None
    assert versus.perplexity_ratio.value == pytest.approx(math.exp((other - base).mean()), rel=1e-5)
    assert versus.kl.mean.value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert versus.kl.max == pytest.approx(float(kl.max()), rel=1e-4)
    delta_p = (-other).exp() - (-base).exp()
    assert versus.rms_delta_p.value == pytest.approx(float(delta_p.square().mean().sqrt()), rel=1e-4)


def test_figures_do_not_depend_on_the_batches() -> None:
    alone, together = (compared(batch_tokens=size).models[1] for size in (1, 64))
    assert alone.perplexity.value == pytest.approx(together.perplexity.value, rel=1e-6)


def test_noise_floor_is_the_reference_against_itself() -> None:
    floor = compared(noise_floor=True).noise_floor
    assert floor is not None and floor.top1_agreement.value == 1
    assert abs(floor.kl.mean.value) < 1e-6 and abs(floor.perplexity_ratio.value - 1) < 1e-6


def test_fewer_chunks_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    report = compared(max_chunks=3, batch_tokens=32, progress=lambda done, of: seen.append((done, of)))
    assert report.chunks == 3 and seen == [(2, 3), (3, 3)]


def test_one_chunk_is_told_to_be_too_few() -> None:
    report = compared(max_chunks=1)
    assert report.models[1].versus is not None and report.models[1].versus.kl.mean.se is None
    assert any("--context 4" in note for note in report.notes)


def test_views_of_a_report() -> None:
    report = compared(noise_floor=True)
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert record["report"] == "perplexity" and record["models"][1]["versus"]["kl"]["mean"]["value"] > 0
    for view in (to_terminal(report.page()), to_markdown(report.page())):
        for word in (
            "gptq2048@16",
            "60 tokens",
            "4 chunks",
            "cdcdcd",
            "float32",
            torch.__version__,
            "base, again",
        ):
            assert word in view
    assert "| other |" in to_markdown(report.page())


def test_a_model_of_nans_fails_the_check() -> None:
    broken = eval_model("base")
    nans = DenseWeight(torch.full((160, 48), math.nan))
    broken = replace(broken, decoder=replace(broken.decoder, head=nans))
    with pytest.raises(CheckFailed, match="base: a loss of nan"):
        evaluate([broken], None, as_tokens(IDS), protocol_named("gptq2048", 16))


def test_models_and_tokens_that_do_not_belong_together() -> None:
    rules = protocol_named("gptq2048", 16)
    small = EvalModel("small", decoder_of(tiny("qwen2", vocab_size=150)), 1, 16.0)
    with pytest.raises(BadRecipe, match="base has 160, small has 150"):
        evaluate([small], eval_model("base"), as_tokens(IDS), rules)
    with pytest.raises(BadRecipe, match="token 160 is beyond"):
        evaluate([eval_model("base")], None, as_tokens(torch.tensor([160] * 16)), rules)
    with pytest.raises(BadRecipe, match="no model"):
        evaluate([], None, as_tokens(IDS), rules)


def test_run_from_names(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b a b b a b b b a " * 5)
    report = run(
        [eval_model("base")],
        reference=None,
        tokenizer=write_tokenizer(tmp_path, bos=False),
        text=tmp_path / "text.txt",
        context=8,
    )
    assert (report.protocol, report.tokens, report.chunks, report.text) == ("gptq2048@8", 50, 6, "text.txt")


def test_stories260k_loss_is_its_golden(assets: Path) -> None:
    folder = assets / "models" / "stories260K-hf"
    golden = json.loads((folder / "expected.json").read_text())
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    decoder = load_decoder(config, StateDict(safetensors.torch.load_file(folder / "model.safetensors")))
    report = evaluate(
        [EvalModel("stories", decoder, 1_044_992, 32.0)],
        None,
        as_tokens(torch.from_numpy(np.asarray(golden["ppl_ids"]))),
        protocol_named("gptq2048", len(golden["ppl_ids"])),
    )
    assert math.log(report.models[0].perplexity.value) == pytest.approx(golden["nll_per_token"], abs=1e-5)
