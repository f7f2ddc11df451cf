"""`llamacpp512` against llama.cpp: what llama-perplexity printed, and its logits over the same chunks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.evaluate.corpora import load_text
from qconvert.evaluate.models import open_model
from qconvert.evaluate.perplexity import run
from qconvert.formats.tokenizers.tokenized_text import tokenize
from tests.support.commands import qconvert
from tests.support.gguf_models import llama_cpp_logits, log_probabilities

CHUNKS, CONTEXT, FIRST = 2, 128, 64
"""Windows small enough to read their logits through a slow binding: as llama-perplexity -c 128."""


def test_perplexity_and_divergence_are_those_that_llama_perplexity_printed(assets: Path) -> None:
    """Of the base model and of Q4_K_M, over the recording's 31 chunks.

    llama.cpp rounds activations to 8 bits where weights are blocks, which adds to the divergence; ours
    is of the weights alone. Measured: +0.006 %, +0.05 %, 0.00236 against 0.00278.
    """
    folder = assets / "fixtures" / "gguf"
    golden = json.loads((folder / "golden.json").read_text())
    recorded = golden["files"]["Q4_K_M"]
    source = assets / "models" / "tiny-qwen3"
    report = run(
        [open_model(open_checkpoint(folder / "tiny-qwen3-Q4_K_M.gguf"), "Q4_K_M")],
        reference=open_model(open_checkpoint(source), "base"),
        tokenizer=source,
        text=folder / "ppl-60k.txt",
        protocol="llamacpp512",
    )
    base, model = report.models
    assert (report.chunks, report.scored_tokens) == (31, 31 * 255)
    assert base.perplexity.value == pytest.approx(golden["base_ppl"], rel=1e-3)
    assert model.perplexity.value == pytest.approx(recorded["ppl"], rel=1e-3)
    assert model.versus is not None
    assert 0.7 * recorded["kld_mean"] < model.versus.kl.mean.value < recorded["kld_mean"]
    assert 100 * model.versus.top1_agreement.value == pytest.approx(recorded["same_top_p"], abs=0.5)


def test_perplexity_of_our_f32_file_is_that_of_llama_cpps_logits(assets: Path, tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    source, text = assets / "models" / "tiny-qwen3", assets / "fixtures" / "gguf" / "ppl-60k.txt"
    out = tmp_path / "f32.gguf"
    assert qconvert("to-gguf", source, "--type", "f32", "-o", out, "-q").code == 0
    ids = tokenize(load_text(text), source).ids_N
    losses = []
    for start in range(0, CHUNKS * CONTEXT, CONTEXT):
        window = ids[start : start + CONTEXT]
        log_p_TV = log_probabilities(llama_cpp_logits(out, window.tolist(), rows=4096))
        scored = np.arange(FIRST, CONTEXT - 1)
        losses.append(-log_p_TV[scored, window[scored + 1]])
    report = run(
        [open_model(open_checkpoint(out), "ours")],
        reference=None,
        tokenizer=source,
        text=text,
        protocol="llamacpp512",
        context=CONTEXT,
        max_chunks=CHUNKS,
    )
    want = float(np.exp(np.concatenate(losses).mean()))
    assert report.models[0].perplexity.value == pytest.approx(want, rel=1e-3)
