"""Of a mix and one encoding, both made with codes that a text chose, the better one is finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.cli import events
from qconvert.convert.execute import open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.core.encodings import ModelTensor
from qconvert.core.schemes import parse_scheme
from qconvert.core.values import Value
from qconvert.evaluate.planned import surely_less
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
from tests.convert.test_events import told
from tests.support.commands import Ran, made, qconvert
from tests.support.models import tiny

TEXT = ("--tokens", 512, "--window", 64, "-j", 2, "--method", "feedback")
SCHEMES = ("--schemes", "int3-g64,int4-g64,int8-g64", "--target-size", "9bpw")
TYPES = ("--types", "q4_0,q5_0,q8_0", "--target-size", "5.6bpw")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Two layers of an untied Llama, and how their codes are chosen."""
    folder = tmp_path_factory.mktemp("candidates")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (folder / "text.txt").write_text("A text of many words, which nobody needs to understand. " * 40)
    model = tiny(folder / "model", "llama", tied=False, max_position_embeddings=128, **sizes)
    return (model, "--text", folder / "text.txt", *TEXT)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """One for every time that codes are chosen on the text."""
    from qconvert.convert import calibrated

    found: list[None] = []
    plain = calibrated.waves

    def counted(*args: Any) -> Any:
        found.append(None)
        return plain(*args)

    monkeypatch.setattr(calibrated, "waves", counted)
    yield found


def winner(monkeypatch: pytest.MonkeyPatch, *, mixed: bool) -> None:
    monkeypatch.setattr("qconvert.evaluate.planned.surely_less", lambda mix_N, one_N: mixed)


def alone(path: Path) -> list[str]:
    """What lies beside an output and is not it."""
    return sorted(each.name for each in path.parent.iterdir() if each != path)


def test_one_encoding_that_wins_has_the_bytes_of_a_run_of_its_own(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch, passes: list[None]
) -> None:
    winner(monkeypatch, mixed=False)
    out = made("quantize", *asked, *SCHEMES, "-o", here / "out" / "best")
    assert len(passes) == 2 and alone(out) == []
    plain = made("quantize", *asked, "--scheme", "int4-g64", "-o", here / "plain")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, plain)]
    assert weights[0] == weights[1]


def test_a_mix_that_wins_is_finished_and_was_measured_on_text_that_no_code_has_seen(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch, passes: list[None]
) -> None:
    winner(monkeypatch, mixed=True)
    ran = qconvert("to-gguf", *asked, *TYPES, "-o", here / "out" / "best.gguf", "--json")
    assert ran.code == 0, ran.err
    found = ran.json["target"]
    assert found["measured_kl"].keys() == {"mix", "uniform"}
    assert found["measured_on"]["as_written"] and found["measured_on"]["tokens"] > 60
    file = here / "out" / "best.gguf"
    assert len(passes) == 2 and alone(file) == []
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in GGUFReader(file).tensors}
    chosen = {name: group["choice"] for group in found["groups"] for name in group["weights"]}
    assert {name: kinds[name] for name in chosen} == chosen and len(set(chosen.values())) > 1


class WrittenRows:
    """The rows of a folder by the names of its source."""

    def __init__(self, written: Checkpoint) -> None:
        self._written = written

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        return self._written.reader.read(self._written.tensors[tensor.name], start, stop)


def test_the_two_are_measured_as_their_files_are(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of the one that wins is what its folder has, read by the ordinary decoder."""
    from qconvert.evaluate import planned

    tokens: list[np.ndarray] = []
    plain = planned.divergences_of

    def heard(weights: Any, job: Any, tokens_BT: np.ndarray, **how: Any) -> Any:
        tokens.append(tokens_BT)
        return plain(weights, job, tokens_BT, **how)

    monkeypatch.setattr(planned, "divergences_of", heard)
    for mixed in (True, False):
        winner(monkeypatch, mixed=mixed)
        out = here / f"best-{mixed}"
        ran = qconvert("quantize", *asked, *SCHEMES, "-o", out, "--json")
        assert ran.code == 0, ran.err
        nats = ran.json["target"]["measured_kl"]["mix" if mixed else "uniform"]
        request = Request("quantize", Recipe(scheme=parse_scheme("int4-g64")))
        job = prepare(open_model(str(asked[0])), request, RunOptions(jobs=2))  # which names the model
        (kl_N,) = plain([WrittenRows(open_checkpoint(out))], job, tokens[-1])
        assert nats == pytest.approx(float(kl_N.mean()), rel=1e-4)


def test_a_dry_run_makes_neither_and_says_what_a_run_costs(
    asked: tuple[object, ...], here: Path, passes: list[None]
) -> None:
    ran = qconvert("quantize", *asked, *SCHEMES, "-o", here / "best", "--dry-run")
    assert ran.code == 0 and not passes and not list(here.iterdir()), ran.err
    assert (
        "twice the time of one" in ran.out and "int4-g64 throughout, both with --method feedback" in ran.out
    )


def test_events_tell_of_candidates_in_a_run_of_their_own(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends that run is told there, too; the prices and what is measured are runs of stages."""
    monkeypatch.setattr(events, "EVERY", 0.0)
    command = ("to-gguf", *asked, *TYPES, "-o", here / "best.gguf", "--events", here / "e.jsonl")

    def stopped(*args: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qconvert.evaluate.planned.divergences_of", stopped)
        assert qconvert(*command).code == 130
    assert told(here / "e.jsonl")[-1]["stopped"] == 130
    (here / "e.jsonl").unlink()
    made(*command, "--restart")
    found = told(here / "e.jsonl")
    runs = list(dict.fromkeys(line["run"] for line in found))
    every = [[line for line in found if line["run"] == run] for run in runs]
    assert [own[0]["stage"] for own in every if own[0]["event"] == "stage"] == ["weigh", "measure"]
    of = [own for own in every if own[0]["event"] == "start"]
    assert len(of) == 2 and [[own[0]["event"], own[-1]["event"]] for own in of] == [["start", "end"]] * 2
    assert all(own[-1]["ok"] for own in of)
    first, second = of[0][0], of[1][0]
    assert first["candidates_of"] == str(here / "best.gguf") == second["outputs"][0]["path"]
    assert len(first["outputs"]) == 2 and "candidates_of" not in second
    progress = [line for line in of[0] if line["event"] == "progress"]
    assert len(progress) > 10 and progress[-1]["bytes_read"] == first["bytes"]["read"]
    assert progress[-1]["bytes_written"] == first["bytes"]["written"]


def test_a_run_that_was_stopped_goes_on_with_both_and_with_what_was_measured(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch, passes: list[None]
) -> None:
    command = ("to-gguf", *asked, *TYPES, "-o", here / "best.gguf")

    def stopped(*args: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qconvert.evaluate.planned.divergences_of", stopped)
        assert qconvert(*command).code == 130
    assert len(passes) == 2 and alone(here / "best.gguf") == ["best.gguf.candidates"]
    with monkeypatch.context() as patch:  # after what was measured is noted, as the output is finished
        patch.setattr("qconvert.convert.writing.Writing.finished", stopped)
        winner(patch, mixed=True)
        assert qconvert(*command).code == 130
    with monkeypatch.context() as patch:
        patch.setattr("qconvert.evaluate.planned.divergences_of", stopped)
        ran = qconvert(*command, "--json")
    assert ran.code == 0, ran.err
    assert len(passes) == 2 and alone(here / "best.gguf") == []
    assert ran.json["target"]["measured_on"]["as_written"]
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(here / "best.gguf").tensors}
    assert len(kinds - {"F32"}) > 1


def refused(*args: object) -> Ran:
    ran = qconvert(*args)
    assert ran.code == 1 and ran.err.rpartition("Error: ")[2], ran
    return ran


def test_what_another_job_left_is_in_the_way_until_it_is_thrown_away(
    asked: tuple[object, ...], here: Path, monkeypatch: pytest.MonkeyPatch, passes: list[None]
) -> None:
    out = here / "best"

    def stopped(*args: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qconvert.evaluate.planned.divergences_of", stopped)
        assert qconvert("quantize", *asked, *SCHEMES, "-o", out).code == 130
    other = ("quantize", *asked, *SCHEMES[:2], "--target-size", "7.5bpw", "-o", out)
    assert "is the unfinished output of another job" in refused(*other).err
    made(*other, "--restart")
    assert alone(out) == [] and len(passes) == 4


def test_a_gain_counts_where_it_is_more_than_chance() -> None:
    rng = np.random.default_rng(0)
    hard_N = rng.exponential(0.1, 4096)
    noise_N = rng.normal(0, 0.01, 4096)
    assert surely_less(hard_N - 0.002 + noise_N, hard_N)
    assert not surely_less(hard_N + noise_N - noise_N.mean(), hard_N)
    assert not surely_less(hard_N, hard_N - 0.002 + noise_N)
    assert not surely_less(hard_N[:100] - 1, hard_N[:100])  # one run of neighbours says nothing of chance
    waves_N = np.repeat(rng.normal(0, 0.02, 32), 128)  # as large by the token, but neighbours go together
    assert not surely_less(hard_N - 0.002 + waves_N - waves_N.mean(), hard_N)
