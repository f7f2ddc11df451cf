"""Divergences from a saved reference are those of running it; a file of other conditions is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from qconvert.errors import BadRecipe, QConvertError
from qconvert.evaluate.perplexity import evaluate
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.evaluate.saved_reference import SavedReference, encoded, is_saved_reference, reference_bytes
from tests.evaluate.test_perplexity import IDS, as_tokens, eval_model
from tests.evaluate.test_scores import stop_after, written
from tests.support.commands import qconvert

RULES = protocol_named("gptq2048", 16)
STRIDED = protocol_named("hf-stride", 16)


def measured(reference: object, rules: object = RULES, **options: object) -> PerplexityReport:
    return evaluate([eval_model("other")], reference, as_tokens(IDS), rules, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [RULES, STRIDED])
@pytest.mark.parametrize("batch_tokens", [1, 40])
def test_it_stands_for_the_reference(tmp_path: Path, rules: object, batch_tokens: int) -> None:
    path = tmp_path / "deep" / "ref"
    direct = measured(eval_model("base"), rules, save_reference=path, batch_tokens=batch_tokens)
    assert is_saved_reference(path) and not list(path.parent.glob("*.partial"))
    assert path.stat().st_size == pytest.approx(reference_bytes(direct.scored_tokens, 160), abs=3000)
    later = measured(SavedReference(path), rules)
    assert later.saved_reference == str(path) and later.reference == "base"
    before, after = (report.models[1].versus for report in (direct, later))
    assert before is not None and after is not None
    assert after.kl.mean.value == pytest.approx(before.kl.mean.value, abs=1e-6)
    assert after.kl.max == pytest.approx(before.kl.max, abs=1e-3)
    exact = (after.perplexity_ratio.value, after.top1_agreement.value, after.rms_delta_p.value)
    assert exact == pytest.approx(
        (before.perplexity_ratio.value, before.top1_agreement.value, before.rms_delta_p.value), rel=1e-6
    )
    rows = [replace(report.models[0], tokens_per_second=0) for report in (direct, later)]
    assert rows[0] == rows[1]


def test_codes_are_half_a_step_from_the_log_probabilities() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 6, (9, 500)).astype(np.float32))
    logits[3, 7] = -200.0
    codes, low, step = encoded(logits.clone())
    wanted = logits.double().log_softmax(-1).numpy()
    found = low[:, None] + codes.astype(float) * step[:, None]
    floor = wanted.max(-1, keepdims=True) - 32
    assert np.abs(found - np.maximum(wanted, floor)).max() <= step.max() / 2 + 1e-5
    assert step.max() <= 32 / 65535 * 1.001


def test_a_prefix_of_the_windows_may_be_measured(tmp_path: Path) -> None:
    measured(eval_model("base"), save_reference=tmp_path / "ref")
    saved = SavedReference(tmp_path / "ref")
    part, whole = measured(saved, max_chunks=2), measured(eval_model("base"), max_chunks=2)
    assert part.models[0].perplexity == whole.models[0].perplexity and part.chunks == 2
    measured(eval_model("base"), save_reference=tmp_path / "short", max_chunks=2)
    with pytest.raises(BadRecipe, match="holds 2 windows, of which 4"):
        measured(SavedReference(tmp_path / "short"))


def test_other_conditions_are_refused(tmp_path: Path) -> None:
    measured(eval_model("base"), save_reference=tmp_path / "ref")
    saved = SavedReference(tmp_path / "ref")
    with pytest.raises(BadRecipe, match="another protocol: gptq2048@16, now hf-stride@16"):
        measured(saved, STRIDED)
    tokens = as_tokens(IDS)
    other = replace(tokens, text=replace(tokens.text, sha256="00" * 32))
    with pytest.raises(BadRecipe, match="another text"):
        evaluate([eval_model("other")], saved, other, RULES)
    with pytest.raises(BadRecipe, match="another tokenizer"):
        evaluate([eval_model("other")], saved, as_tokens(IDS.flip(0)), RULES)


def test_nothing_is_left_of_an_interrupted_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(eval_model("base"), save_reference=tmp_path / "r", progress=stop_after(1), batch_tokens=16)
    partial = measured(
        eval_model("base"), save_reference=tmp_path / "r", progress=stop_after(1), batch_tokens=16,
        scores=tmp_path / "s.npz",
    )  # fmt: skip
    assert partial.partial and [path.name for path in tmp_path.iterdir()] == ["s.npz"]


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    measured(eval_model("base"), save_reference=tmp_path / "ref")
    data = (tmp_path / "ref").read_bytes()
    for cut in (0, 7, 200, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:cut])
        assert not is_saved_reference(tmp_path / "cut")
        with pytest.raises(QConvertError):
            SavedReference(tmp_path / "cut")
    safetensors.numpy.save_file({"x": np.zeros(3)}, tmp_path / "plain")
    assert not is_saved_reference(tmp_path / "plain")
    with pytest.raises(BadRecipe, match="is not a saved reference"):
        SavedReference(tmp_path / "plain")
    arrays = safetensors.numpy.load_file(tmp_path / "ref")
    with safetensors.safe_open(tmp_path / "ref", "np") as file:
        metadata = file.metadata()
    wrong = [arrays | {"low": arrays["low"][:-1]}, {k: v for k, v in arrays.items() if k != "windows"}]
    for made in wrong:
        safetensors.numpy.save_file(made, tmp_path / "wrong", metadata)
        with pytest.raises(BadRecipe, match="is not a saved reference"):
            SavedReference(tmp_path / "wrong")


def test_the_commands(tmp_path: Path) -> None:
    base, other = written(tmp_path / "base", seed=1), written(tmp_path / "other")
    text = ("--text", base / "text.txt", "--context", 64, "--chunks", 2)
    file = tmp_path / "ref.safetensors"
    ran = qconvert("eval", "perplexity", base, *text, "--save-reference", file)
    assert ran.code == 0 and file.exists(), ran.err
    direct = qconvert("eval", "perplexity", other, "--reference", base, *text, "--json").json
    later = qconvert(
        "eval", "perplexity", other, "--reference", file, *text, "--json", "-o", tmp_path / "r"
    ).json
    means = [record["models"][1]["versus"]["kl"]["mean"]["value"] for record in (direct, later)]
    assert means[0] == pytest.approx(means[1], abs=1e-6) and means[0] > 0
    assert later["models"][0]["origin"] == direct["models"][0]["origin"]
    assert later["saved_reference"] == str(file) and later["weights"] == []
    assert math.isclose(
        later["models"][1]["versus"]["perplexity_ratio"]["value"],
        direct["models"][1]["versus"]["perplexity_ratio"]["value"],
    )
    again = qconvert(
        "eval", "perplexity", other, "--reference", file, *text, "-o", tmp_path / "r", "--resume"
    )
    assert again.code == 0 and "already complete" in again.err
    page = json.loads((tmp_path / "r.json").read_text())
    assert page["request"]["reference"] == str(file)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("a", "b", "--save-reference", "f"), "which model is the reference?"),
        (("a", "--save-reference", "f", "--resume", "-o", "r"), "needs a whole run"),
        (("a", "--save-reference", "f", "--text", "x", "--text", "y"), "covers one text"),
    ],
)
def test_what_cannot_be_saved_is_wrong_usage(options: tuple[str, ...], fact: str) -> None:
    ran = qconvert("eval", "perplexity", *options)
    assert ran.code == 2 and fact in ran.err
