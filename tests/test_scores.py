"""An interrupted evaluation says so, and goes on to the figures of an uninterrupted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from qconvert.cli import evaluate as cli
from qconvert.errors import BadRecipe
from qconvert.evals.lockstep import Progress
from qconvert.evals.perplexity import evaluate
from qconvert.evals.protocols import protocol_named
from qconvert.evals.results import PerplexityReport
from tests.commands import qconvert
from tests.decoder_models import tiny
from tests.test_corpora import write_tokenizer
from tests.test_perplexity import IDS, as_tokens, eval_model

RULES = protocol_named("gptq2048", 16)


def stop_after(chunks: int) -> Progress:
    def progress(done: int, total: int) -> None:
        if done == chunks:
            raise KeyboardInterrupt

    return progress


def measure(
    scores: Path | None, *, chunks: int = 99, resume: bool = False, **options: object
) -> PerplexityReport:
    return evaluate(
        [eval_model("other")],
        eval_model("base"),
        as_tokens(IDS),
        RULES,
        batch_tokens=16,
        progress=stop_after(chunks),
        scores=scores,
        resume=resume,
        **options,  # type: ignore[arg-type]
    )


def figures(report: PerplexityReport) -> object:
    models = [asdict(model) | {"tokens_per_second": 0} for model in report.models]
    return models, report.noise_floor, report.chunks, report.notes


def test_it_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    scores = tmp_path / "deep" / "r.partial.npz"
    partial = measure(scores, chunks=3, noise_floor=True)
    assert (partial.partial, partial.chunks, partial.planned_chunks) == (True, 3, 4)
    assert partial.to_json()["partial"] is True and "interrupted after 3 of 4 chunks" in partial.notes
    assert scores.exists()
    whole = measure(scores, resume=True, noise_floor=True)
    assert figures(whole) == figures(measure(None, noise_floor=True))
    assert not whole.partial and not scores.exists()


def test_a_batch_that_not_all_models_have_seen_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.evals import lockstep

    calls = []

    def broken(tracks: object, *args: object) -> None:
        calls.append(args)
        original(tracks, *args)  # type: ignore[arg-type]
        if len(calls) == 2:
            raise KeyboardInterrupt

    original = lockstep._score_batch
    monkeypatch.setattr(lockstep, "_score_batch", broken)
    partial = measure(tmp_path / "s.npz")
    assert partial.chunks == 1 and partial.scored_tokens == 15


def test_nothing_done_or_nowhere_to_keep_it_is_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(None, chunks=2)
    assert not list(tmp_path.iterdir())


def test_scores_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    scores = tmp_path / "s.npz"
    with pytest.raises(BadRecipe, match="no scores to go on from"):
        measure(scores, resume=True)
    measure(scores, chunks=1)
    with pytest.raises(BadRecipe, match="of other models, another text"):
        measure(scores, resume=True, max_chunks=2)
    scores.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(BadRecipe, match="no scores"):
        measure(scores, resume=True)
    np.savez(scores, mark=np.array([object()], dtype=object))
    with pytest.raises(BadRecipe, match="no scores"):
        measure(scores, resume=True)


def test_the_command_leaves_a_partial_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2")
    folder = write_tokenizer(tmp_path, bos=False)
    safetensors.torch.save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "text.txt").write_text("a b a b b a b b b a " * 200)
    text = ("--text", folder / "text.txt", "--context", 512)
    options = ("eval", "perplexity", folder, *text, "-o", tmp_path / "r")

    @contextmanager
    def bar(quiet: bool) -> Iterator[Progress]:
        yield stop_after(1)

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_bar", bar)
        patch.setattr("qconvert.evals.lockstep.BATCH_TOKENS", {"cpu": 512})
        ran = qconvert(*options)
    assert ran.code == 130 and "--resume goes on" in ran.err
    assert json.loads((tmp_path / "r.json").read_text())["partial"] is True
    ran = qconvert(*options, "--resume")
    assert ran.code == 0 and json.loads((tmp_path / "r.json").read_text())["partial"] is False
    assert not (tmp_path / "r.partial.npz").exists()
    assert qconvert("eval", "perplexity", folder, "--resume").code == 1
