"""`qconvert bench`: rates and memory of the decoder, each model in a process of its own."""

from __future__ import annotations

import json

import pytest

from qconvert.evaluate.speed import Rate
from tests.support.commands import qconvert, strict_json
from tests.support.forked_python import fork_models


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_models(monkeypatch)


def test_a_table_of_models_and_the_same_figures_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("bench", "embedded", "-p", 16, "-n", 4, "-r", 2, "-j", 1)
    shown = qconvert(*words)
    fork_models(monkeypatch)
    assert shown.code == 0 and "2 rounds on cpu, 1 thread;" in shown.err
    assert shown.out.splitlines()[0].split()[:3] == ["model", "weights", "prompt"]
    found = strict_json(qconvert(*words, "--json").out)
    (model,) = found["models"]
    for rate in (model["prompt_tokens_per_second"], model["generated_tokens_per_second"]):
        assert len(rate["rounds"]) == 2 and rate["mean"] == pytest.approx(sum(rate["rounds"]) / 2)
        assert all(each > 0 for each in rate["rounds"])
    assert model["weight_bytes"] == 8_394_240 < model["peak_bytes"]


def test_what_is_left_out_is_not_timed(forked: None) -> None:
    words = ("bench", "embedded", "-p", 0, "-n", 2, "-r", 1, "-j", 1)
    model = json.loads(qconvert(*words, "--json").out)["models"][0]
    assert model["prompt_tokens_per_second"] is None
    assert model["generated_tokens_per_second"]["deviation"] == 0.0


def test_errors_come_out_of_the_other_process(forked: None) -> None:
    ran = qconvert("bench", "./nothing-here")
    assert ran.code == 1 and "nothing-here: no such file or folder" in ran.err
    ran = qconvert("bench", "embedded", "-p", 100_000, "-j", 1)
    assert ran.code == 1 and "positions" in ran.err and "use --prompt" in ran.err
    assert qconvert("bench", "embedded", "-p", 0, "-n", 0).code == 2


def test_a_rate_has_a_mean_and_a_deviation() -> None:
    rate = Rate((1.0, 2.0, 3.0))
    assert rate.mean == 2.0 and rate.deviation == 1.0 and Rate((5.0,)).deviation == 0.0


def test_a_single_round_is_shown_without_a_deviation(forked: None) -> None:
    lines = qconvert("bench", "embedded", "-p", 0, "-n", 2, "-r", 1, "-j", 1).out.splitlines()
    assert lines[1].startswith("embedded") and "±" not in lines[1]
