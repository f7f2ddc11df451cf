"""An interrupted evaluation says so, and goes on to the figures of an uninterrupted one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from qconvert.cli import eval as cli
from qconvert.cli import eval_weights
from qconvert.errors import BadRecipe
from qconvert.evaluate.lockstep import Progress
from qconvert.evaluate.perplexity import evaluate
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from tests.evaluate.test_corpora import write_tokenizer
from tests.evaluate.test_perplexity import IDS, as_tokens, eval_model
from tests.support.commands import qconvert
from tests.support.decoder_models import tiny

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
    from qconvert.evaluate import lockstep

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
    measure(scores, chunks=1)
    with pytest.raises(BadRecipe, match="of other models, another text"):
        measure(scores, resume=True, max_chunks=2)
    scores.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(BadRecipe, match="no scores"):
        measure(scores, resume=True)
    np.savez(scores, mark=np.array([object()], dtype=object))
    with pytest.raises(BadRecipe, match="no scores"):
        measure(scores, resume=True)


def written(folder: Path, seed: int = 0) -> Path:
    """A random model with a tokenizer of two words, and a text of them."""
    folder.mkdir(exist_ok=True)
    model = tiny("qwen2", seed=seed)
    write_tokenizer(folder, bos=False)
    safetensors.torch.save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "text.txt").write_text("a b a b b a b b b a " * 200)
    return folder


def test_a_failed_check_is_part_of_the_one_json_object(tmp_path: Path) -> None:
    base, other = written(tmp_path / "base", seed=1), written(tmp_path / "other")
    options = ("eval", "perplexity", other, "--text", base / "text.txt", "--context", 64, "--chunks", 2)
    compared = (*options, "--reference", base, "--dtype", "bf16")
    ran = qconvert(*compared, "--fail-above", 100, "--json")
    assert ran.code == 0 and "error" not in ran.json
    assert "bfloat16, quantized weights" in ran.json["models"][0]["arithmetic"]
    worse = ran.json["models"][1]["versus"]["perplexity_ratio"]["value"] - 1
    assert worse > 0
    ran = qconvert(*compared, "--fail-above", worse / 2, "--json")
    assert ran.code == 3 and ran.json["error"]["fact"].startswith("other: perplexity is")
    ran = qconvert(*compared, "--fail-above", worse / 2)
    assert ran.code == 3 and "other: perplexity is" in ran.err and "Perplexity on" in ran.out
    third = written(tmp_path / "third", seed=2)
    ran = qconvert(*options[:3], third, *options[3:], "--reference", base, "--fail-above", "0%")
    assert ran.code == 3 and "other: perplexity is" in ran.err and "; third: perplexity is" in ran.err
    kl = qconvert(*compared, "--json").json["models"][1]["versus"]["kl"]["mean"]["value"]
    ran = qconvert(*compared, "--fail-above-kl", kl * 0.99, "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (3, "check_failed")
    assert ran.json["error"]["fact"].startswith("other: the mean KL divergence is")
    assert qconvert(*compared, "--fail-above-kl", kl * 1.01, "--fail-above", 100, "-q").code == 0
    stem = ("-o", tmp_path / "r")
    assert qconvert(*compared, *stem).code == 0
    ran = qconvert(*compared, *stem, "--resume", "--fail-above", worse / 2)
    assert ran.code == 3 and "other: perplexity is" in ran.err and "already complete" in ran.err
    assert qconvert(*compared, *stem, "--resume", "--fail-above", 100, "-q").err == ""
    for limit in ("--fail-above", "--fail-above-kl"):
        ran = qconvert(*options, limit, 0)
        assert ran.code == 2 and f"{limit}: there is no reference to compare with" in ran.err and not ran.out


def test_models_whose_tokenizers_cut_the_text_differently_are_not_compared(tmp_path: Path) -> None:
    base, other = written(tmp_path / "base"), written(tmp_path / "other", seed=1)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"a": 1', '"a": 2').replace('"b": 2', '"b": 1'))
    ran = qconvert("eval", "perplexity", other, "--reference", base, "--text", base / "text.txt")
    assert ran.code == 1 and "token 0 of text.txt is 1 by the first model's tokenizer, 2 ('a')" in ran.err


@pytest.mark.parametrize("kind", ["perplexity", "weights"])
def test_a_report_that_could_not_be_written_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cli, "_measure", None)
    monkeypatch.setattr(eval_weights, "compared", None)
    (tmp_path / "file").touch()
    models = ("a", "b") if kind == "weights" else ("a",)
    ran = qconvert("eval", kind, *models, "-o", tmp_path / "file" / "report")
    assert ran.code == 1 and "file/report.json: cannot be created: Not a directory" in ran.err


def test_the_command_leaves_a_partial_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path)
    text = ("--text", folder / "text.txt", "--context", 512)
    options = ("eval", "perplexity", folder, *text, "-o", tmp_path / "r")

    @contextmanager
    def bar(unit: str, *, talks: bool, also: Progress) -> Iterator[Progress]:
        yield stop_after(1)

    with monkeypatch.context() as patch:
        patch.setattr(cli, "counted", bar)
        patch.setattr("qconvert.evaluate.lockstep.BATCH_TOKENS", {"cpu": 512})
        ran = qconvert(*options)
    assert ran.code == 130 and "--resume continues" in ran.err
    assert json.loads((tmp_path / "r.json").read_text())["partial"] is True
    weights = folder / "model.safetensors"
    time = weights.stat().st_mtime_ns
    os.utime(weights, ns=(time, time + 1))  # another quantization, of as many bytes
    ran = qconvert(*options, "--resume")
    assert ran.code == 1 and "scores of other models" in ran.err
    os.utime(weights, ns=(time, time))
    ran = qconvert(*options, "--resume")
    assert ran.code == 0 and json.loads((tmp_path / "r.json").read_text())["partial"] is False
    assert not (tmp_path / "r.partial.npz").exists()
    again = qconvert(*options, "--resume")
    assert again.code == 0 and "already complete" in again.err and again.out == ran.out
    ran = qconvert(*options, "--resume", "--chunks", 1)
    assert ran.code == 1 and "of another command: chunks was not given, now it is 1" in ran.err
    os.utime(weights, ns=(time, time + 1))  # touched, but the same bytes
    assert qconvert(*options, "--resume").code == 0
    said = (folder / "text.txt").read_text()
    (folder / "text.txt").write_text(f"{said} ")
    ran = qconvert(*options, "--resume")
    assert ran.code == 1 and "r.json: the text text.txt has changed since" in ran.err
    (folder / "text.txt").write_text(said)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ran = qconvert(*options, "--resume")
    assert ran.code == 1 and "have changed since" in ran.err and "leave out --resume" in ran.err
    (tmp_path / "r.json").write_text('{"report": "perplexity"}')
    ran = qconvert(*options, "--resume")
    assert ran.code == 1 and "is not a report that can be resumed" in ran.err
    (tmp_path / "r.json").unlink()
    ran = qconvert(*options, "--resume")
    assert ran.code == 0 and "starts from the beginning" in ran.err


def test_several_texts_have_a_report_each(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (tmp_path / "second.txt").write_text((folder / "text.txt").read_text()[::-1])
    texts = ("--text", folder / "text.txt", "--text", tmp_path / "second.txt", "--context", 512)
    ran = qconvert("eval", "perplexity", folder, *texts, "--chunks", 1, "--json", "-o", tmp_path / "r")
    assert ran.code == 0, ran.err
    reports = ran.json["reports"]
    assert [report["text"] for report in reports] == ["text.txt", "second.txt"]
    assert reports[0]["models"][0]["perplexity"] != reports[1]["models"][0]["perplexity"]
    for name, report in zip(("r-text.json", "r-second.json"), reports, strict=True):
        assert json.loads((tmp_path / name).read_text())["models"] == report["models"]
    ran = qconvert("eval", "perplexity", folder, *texts[:2], *texts[:2])
    assert ran.code == 2 and "given twice" in ran.err
