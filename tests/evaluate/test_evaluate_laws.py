"""Evaluations against naive references: windows token by token, errors by loops, scores kept in a file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.errors import BadRecipe
from qconvert.evaluate.figures import weight_figures
from qconvert.evaluate.lockstep import EvalModel, Track, run_lockstep
from qconvert.evaluate.paired_statistics import divergence, exp_mean, mean, root_mean_square
from qconvert.evaluate.protocols import PROTOCOLS, Window, protocol_named
from qconvert.evaluate.records import WeightError, relative_rms
from qconvert.evaluate.scores import fingerprint, load_scores, save_scores
from qconvert.evaluate.weights_report import WeightReport
from tests.support.commands import qconvert
from tests.support.decoder_models import decoder_of, tiny, tokens


def contexts_of(windows: list[Window]) -> dict[int, int]:
    """For every token that counts, how many tokens before it are read with it."""
    return {token: token - w.start for w in windows for token in range(w.scored, w.stop)}


def naive(name: str, tokens_: int, context: int) -> dict[int, int]:
    """The same, from what the protocols say of one token: where its window starts."""
    found = {}
    for token in range(tokens_):
        place = token % context
        whole = token - place + context <= tokens_
        if name == "gptq2048" and whole and place:
            found[token] = place
        if name == "llamacpp512" and whole and place > context // 2:
            found[token] = place
        if name == "hf-stride" and token:
            half = context // 2
            # The first window holds its whole context; later ones move on by half of one.
            late = max(0, -(-(token + 1 - context) // half))
            found[token] = token - late * half
    return found


@settings(max_examples=80)
@given(name=st.sampled_from(sorted(PROTOCOLS)), half=st.integers(2, 20), tokens_=st.integers(1, 300))
def test_every_token_is_read_in_the_context_that_its_protocol_says(
    name: str, half: int, tokens_: int
) -> None:
    wanted = naive(name, tokens_, 2 * half)
    if not wanted:
        with pytest.raises(BadRecipe, match="fewer than one window"):
            protocol_named(name, 2 * half).windows(tokens_)
        return
    assert contexts_of(protocol_named(name, 2 * half).windows(tokens_)) == wanted


def clustered_error(x: np.ndarray, chunks: np.ndarray) -> float:
    """The cluster-robust standard error of a mean, written out."""
    names = sorted(set(chunks.tolist()))
    total = 0.0
    for name in names:
        inside = sum(
            float(value) - float(x.mean()) for value, of in zip(x, chunks, strict=True) if of == name
        )
        total += inside * inside
    return math.sqrt(len(names) / (len(names) - 1) * total) / len(x)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), chunks=st.integers(2, 9), tokens_=st.integers(9, 60))
def test_errors_are_clustered_by_chunk(seed: int, chunks: int, tokens_: int) -> None:
    random = np.random.default_rng(seed)
    chunk_N = np.concatenate([np.arange(chunks), random.integers(0, chunks, tokens_ - chunks)])
    x_N = random.normal(0.5, 1, tokens_) + random.normal(0, 1, chunks)[chunk_N]
    found = mean(x_N, chunk_N)
    assert found.value == pytest.approx(x_N.mean()) and found.se == pytest.approx(
        clustered_error(x_N, chunk_N)
    )
    ratio = exp_mean(x_N, chunk_N)
    assert ratio.se is not None and ratio.se == pytest.approx(
        math.exp(x_N.mean()) * clustered_error(x_N, chunk_N)
    )
    rms = root_mean_square(x_N, chunk_N)
    assert rms.value == pytest.approx(math.sqrt((x_N**2).mean()))
    assert rms.se == pytest.approx(clustered_error(x_N**2, chunk_N) / (2 * rms.value))


def test_the_error_is_the_spread_of_repeated_measurements() -> None:
    """Over many synthetic texts with correlated tokens, the mean strays as far as its error says."""
    random = np.random.default_rng(0)
    chunk_N = np.repeat(np.arange(30), 20)
    found = []
    for _ in range(300):
        x_N = random.normal(0, 1, 600) + random.normal(0, 1, 30)[chunk_N]
        found.append(mean(x_N, chunk_N))
    spread = np.std([estimate.value for estimate in found])
    told = np.mean([estimate.se for estimate in found if estimate.se is not None])
    assert told == pytest.approx(spread, rel=0.15)
    naive_error = 1.41 / math.sqrt(600)  # as if the tokens of a chunk had nothing in common
    assert told > 2 * naive_error


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), tokens_=st.integers(1, 300))
def test_percentiles_of_a_divergence_rise(seed: int, tokens_: int) -> None:
    kl_N = np.random.default_rng(seed).exponential(0.01, tokens_)
    found = divergence(kl_N, np.arange(tokens_) // 7)
    tail = (found.median, found.p90, found.p99, found.p999, found.max)
    assert list(tail) == sorted(tail) and found.max == kl_N.max()
    assert list(found.curve) == sorted(found.curve) and found.curve[-1] == found.max
    assert found.mean.value == pytest.approx(kl_N.mean())


# Scores of models that are run side by side.

MODELS = {label: tiny("qwen2", seed=seed) for seed, label in enumerate(("base", "other"))}
IDS_N = tokens(1, 75)[0].numpy()
WINDOWS = protocol_named("hf-stride", 16).windows(75)


def track(label: str, **how: Any) -> Track:
    return Track(EvalModel(label, decoder_of(MODELS[label]), 1000, 16.0, **how))


def test_scores_are_those_of_softmax_window_by_window() -> None:
    """Losses, likeliest tokens and divergences of all tokens, from transformers' logits in float64."""
    tracks = [track("base"), track("other")]
    assert run_lockstep(tracks, IDS_N, WINDOWS, compared=True, batch_tokens=48) == len(WINDOWS)
    wanted: dict[str, list[float]] = {"nll": [], "kl": []}
    for window in WINDOWS:
        ids = torch.from_numpy(IDS_N[window.start : window.stop])[None]
        with torch.no_grad():
            base, other = (MODELS[n](ids).logits[0].double().log_softmax(-1) for n in ("base", "other"))
        for place in range(window.scored - window.start, window.stop - window.start):
            wanted["nll"].append(-float(other[place - 1, ids[0, place]]))
            wanted["kl"].append(float((base.exp() * (base - other))[place - 1].sum()))
    np.testing.assert_allclose(np.concatenate(tracks[1].nll), wanted["nll"], rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(tracks[1].kl), wanted["kl"], rtol=1e-3, atol=1e-6)
    assert tracks[1].tokens == sum(w.stop - w.start for w in WINDOWS) and tracks[1].seconds > 0


@pytest.mark.parametrize("batch_tokens", [1, 16, 40, 4096])
def test_batches_do_not_matter_and_progress_counts_windows(batch_tokens: int) -> None:
    one, many = track("base"), track("base")
    run_lockstep([one], IDS_N, WINDOWS, compared=False, batch_tokens=64)
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    run_lockstep([many], IDS_N, WINDOWS, compared=False, batch_tokens=batch_tokens, progress=tell)
    np.testing.assert_allclose(np.concatenate(many.nll), np.concatenate(one.nll), rtol=1e-4)
    assert told[-1] == (len(WINDOWS), len(WINDOWS)) and {total for _, total in told} == {len(WINDOWS)}
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def _single() -> SimpleNamespace:
    return SimpleNamespace(dtype=torch.float32)


@dataclass
class _Model:
    label: str = "m"
    size_bytes: int = 10
    path: Path | None = None
    decoder: Any = field(default_factory=_single)


def scored(chunks: int) -> Track:
    random = np.random.default_rng(chunks)
    made = Track(_Model(), seconds=1.25, tokens=99)  # type: ignore[arg-type]
    made.nll = [random.random(7) for _ in range(chunks)]
    made.top = [random.integers(0, 99, 7) for _ in range(chunks)]
    return made


def test_scores_come_back_from_their_file(tmp_path: Path) -> None:
    tracks, again = [scored(3), scored(2)], [scored(0), scored(0)]
    again[0].seconds = again[0].tokens = 0
    save_scores(tmp_path / "s.npz", tracks, 5, "mark")
    assert load_scores(tmp_path / "s.npz", again, "mark") == 5
    for before, after in zip(tracks, again, strict=True):
        assert (after.seconds, after.tokens) == (1.25, 99)
        for kind in ("nll", "top", "kl"):
            whole = np.concatenate([np.empty(0), *getattr(before, kind)])
            np.testing.assert_array_equal(np.concatenate(getattr(after, kind)), whole)
        assert after.top[0].dtype == np.int64
    assert load_scores(tmp_path / "none.npz", again, "mark") == 0
    with pytest.raises(BadRecipe, match="scores of other models"):
        load_scores(tmp_path / "s.npz", [scored(0), scored(0)], "another")


@pytest.mark.parametrize("cut", [1, 10, 200, -1])
def test_a_damaged_file_of_scores_is_told(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "s.npz"
    save_scores(path, [scored(2)], 2, "mark")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadRecipe, match="no scores to resume from"):
        load_scores(path, [scored(0)], "mark")
    save_scores(path, [scored(2)], 2, "mark")
    with pytest.raises(BadRecipe, match="no scores to resume from"):
        load_scores(path, [scored(0), scored(0)], "mark")


def test_every_condition_of_an_evaluation_counts(tmp_path: Path) -> None:
    def mark(*conditions: str, echo: bool = False, **model: Any) -> str:
        return fingerprint([Track(_Model(**model), echo=echo)], *conditions)  # type: ignore[arg-type]

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x")
    (tmp_path / "README.md").write_text("a")
    half = SimpleNamespace(dtype=torch.bfloat16)
    marks = [
        mark("a"), mark("b"), mark("a", "b"), mark("a", echo=True), mark("a", label="n"),
        mark("a", size_bytes=11), mark("a", decoder=half), mark("a", path=tmp_path),
    ]  # fmt: skip
    assert len(set(marks)) == len(marks) and mark("a") == marks[0]
    (tmp_path / "README.md").write_text("another card")
    assert mark("a", path=tmp_path) == marks[-1]
    os.utime(weights, ns=(0, 12345))
    assert mark("a", path=tmp_path) != marks[-1]


def errors_of(*layers: int | None) -> tuple[WeightError, ...]:
    return tuple(
        WeightError(f"w{i}", f"mlp.experts.{i}.up", layer, 0.01 * (i + 1), 1.0, 0.1, 0.5)
        for i, layer in enumerate(layers)
    )


def test_errors_of_weights_are_taken_together() -> None:
    errors = errors_of(0, 0, 1)
    assert relative_rms(errors) == pytest.approx(math.sqrt(0.06 / 3))
    report = WeightReport("a", "b", errors, 5, ())
    rows = report.page().grids[0].rows
    assert [row[1] for row in rows] == ["1", "1", "1", "3"]
    assert rows[-1][:3] == ("all", "3", f"{math.sqrt(0.06 / 3):.4f}")
    assert report.to_json()["equal"] == 5 and len(report.to_json()["errors"]) == 3
    (figure,) = weight_figures(errors, "a", "b")
    assert "worst is shown" in figure.caption  # all experts share a row
    assert weight_figures(errors_of(None, None), "a", "b") == []


@pytest.mark.parametrize(("a", "b"), list(product(("plain", "quantized"), repeat=2)))
def test_the_weights_of_one_model_are_compared_in_any_form(a: str, b: str, models: Path) -> None:
    found = qconvert("eval", "weights", models / a, models / b, "--json").json
    assert (len(found["errors"]), found["equal"]) == ((0, 13) if a == b else (7, 6))
    assert all(0 < math.sqrt(e["sum_sq_diff"] / e["sum_sq"]) < 0.02 for e in found["errors"])


def test_an_empty_file_of_scores_is_told(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"")
    with pytest.raises(BadRecipe, match="no scores to resume from"):
        load_scores(tmp_path / "s.npz", [], "mark")
