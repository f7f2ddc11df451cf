"""Reports can be traced to files, name every model apart, and say in a sentence what was found."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.demo import MODEL_DIR
from qconvert.demo.corpus import demo_text
from qconvert.evaluate import samples
from qconvert.evaluate.models import open_model
from qconvert.evaluate.origins import labels_of, origin_of
from qconvert.evaluate.paired_statistics import Estimate
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.plain_data import from_plain
from qconvert.evaluate.records import Comparison, ModelResult, Origin, WeightError, WeightFile
from qconvert.evaluate.scales import GLOSSARY, KL, SCALES
from qconvert.evaluate.verdict import perplexity_verdict, weights_verdict
from qconvert.report.page import to_markdown, to_terminal
from tests.evaluate.test_perplexity import compared
from tests.evaluate.test_scores import written
from tests.support.commands import made, qconvert
from tests.support.models import tiny


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["org/a", "b"], ["a", "b"]),
        (["x/a/model", "x/b/model", "c"], ["a/model", "b/model", "c"]),
        (["x/y/m", "z/y/m"], ["x/y/m", "z/y/m"]),
        (["m", "m", "x/m/"], ["m", "m (2)", "x/m"]),
        (["one/m", "two/n"], ["m", "n"]),
    ],
)
def test_labels_are_the_shortest_that_differ(names: list[str], labels: list[str], here: Path) -> None:
    assert labels_of(names) == labels


def test_labels_of_folders_that_are_there_go_up_to_the_root(here: Path) -> None:
    (here / "deep" / "model").mkdir(parents=True)
    (here / "model").mkdir()
    assert labels_of(["model", "deep/model"]) == [f"{here.name}/model", "deep/model"]
    assert labels_of(["./model", str(here / "model")]) == ["model", "model (2)"]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_origin_has_the_hashes_of_the_files(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    plain = origin_of(open_checkpoint(source), "asked")
    weights = source / "model.safetensors"
    assert plain.manifest_sha256 is None and plain.name == "asked" and plain.path == str(source)
    assert plain.files == (WeightFile("model.safetensors", weights.stat().st_size, sha256(weights)),)
    assert plain.weights_sha256 == sha256(weights)
    folder = made("quantize", source, "--bits", 8, "--group-size", 32, "-o", tmp_path / "q")
    made_here = origin_of(open_checkpoint(folder), "q")
    assert made_here.manifest_sha256 == sha256(folder / "qconvert.json")
    assert made_here.files[0].sha256 == sha256(folder / "model.safetensors")
    manifest = json.loads((folder / "qconvert.json").read_text())
    manifest["files"][0]["bytes"] += 1  # a manifest of other files is not believed
    (folder / "qconvert.json").write_text(json.dumps(manifest))
    assert origin_of(open_checkpoint(folder), "q").manifest_sha256 is None
    two = replace(plain, files=(*plain.files, WeightFile("z", 1, "0" * 64)))
    listed = f"{plain.files[0].sha256}  model.safetensors\n{'0' * 64}  z\n"
    assert two.weights_sha256 == hashlib.sha256(listed.encode()).hexdigest()


def comparison(ratio: float, se: float, kl: float) -> Comparison:
    versus = compared().models[1].versus
    assert versus is not None
    mean = replace(versus.kl, mean=Estimate(kl, kl / 10))
    return replace(versus, perplexity_ratio=Estimate(ratio, se), kl=mean)


def result(label: str, nbytes: int, versus: Comparison | None) -> ModelResult:
    return ModelResult(label, nbytes, 4.0, "float32", Estimate(20.0, 1.0), 1.0, 9.0, versus)


def test_the_verdict_says_the_loss_and_what_it_means() -> None:
    base = result("base", 9_000_000, None)
    models = [base, result("int4", 4_000_000, comparison(1.028, 0.003, 0.038))]
    (line,) = perplexity_verdict(models, "base")
    assert line == "int4 has a perplexity 2.8 % higher; KL 0.038: visible in long texts."
    models.append(result("int8", 5_000_000, comparison(0.9995, 0.001, 2e-4)))
    line = perplexity_verdict(models, "base")[1]
    assert line.startswith("int8 has the same perplexity within the error (-0.05 %")
    assert line.endswith("KL 0.0002: not noticeable.")
    better = perplexity_verdict([base, result("x", 1, comparison(0.9, 0.001, 0.2))], "base")
    assert better[0].startswith("x has a perplexity 10 % lower; KL 0.2: easily visible")
    (alone,) = perplexity_verdict([base, result("b", 1, None)], None)
    assert "a perplexity of 20, the lowest of 2 models; without a reference" in alone


def test_many_models_are_taken_together() -> None:
    kls = (1e-4, 5e-4, 0.05, 2.0)
    others = [result(f"m{i}", 1000 * i, comparison(1.1, 0.01, kl)) for i, kl in enumerate(kls)]
    lines = perplexity_verdict([result("base", 1, None), *others], "base")
    assert lines == (
        "The loss is not noticeable: m0 (0 B), m1 (1.00 KB).",
        "The loss is visible in long texts: m2 (2.00 KB).",
        "The loss is severe: m3 (3.00 KB).",
    )


def test_the_glossary_states_the_scale_of_the_verdict() -> None:
    said = dict(GLOSSARY)["KL mean"]
    for limit, word in KL.steps:
        assert word in said and (limit == math.inf or f"below {limit:g} {word}" in said)
        assert KL.word(limit * 0.999 if limit < math.inf else 9.0) == word
    assert KL.grade(-1e-9) == 0 and KL.grade(0.001) == 1  # a step begins at its number
    for scale in SCALES:
        assert json.dumps(scale.to_json(), allow_nan=False)


def test_weights_have_a_verdict_too() -> None:
    errors = [WeightError("w", "attn.q", 0, 0.0103, 1.0, 0.1, 0.5)]
    assert weights_verdict("a", "b", errors, 0) == (
        "The weights of b differ from a's by 10.1 % (RMS): usual for 4 bits.",
    )
    assert weights_verdict("a", "b", errors, 89) == (
        "Only w of b differs from a's, by 10.1 % (RMS): usual for 4 bits; the other 89 tensors are equal.",
    )
    assert weights_verdict("a", "b", [*errors, replace(errors[0], name="v")], 88)[0].startswith(
        "Only w and v of b differ from a's, by 10.1 % (RMS)"
    )
    assert weights_verdict("a", "b", [], 3) == ("b has the weights of a: all 3 tensors are equal.",)


def test_each_kind_of_arithmetic_says_which_models_it_is_of() -> None:
    report = compared()
    facts = [value for name, value in report.page().facts if name == "arithmetic"]
    assert facts == [report.models[0].arithmetic]
    first, *others = report.models
    rounded = tuple(replace(each, arithmetic="bf16, inputs int8") for each in others)
    facts = [
        value
        for name, value in replace(report, models=(first, *rounded)).page().facts
        if name == "arithmetic"
    ]
    assert facts == [
        f"{first.label}: {first.arithmetic}",
        f"{', '.join(each.label for each in others)}: bf16, inputs int8",
    ]


def test_a_report_comes_back_from_its_json() -> None:
    report = replace(
        compared(noise_floor=True),
        command=("qconvert", "x"),
        request={"chunks": None, "models": ["a"]},
    )
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert from_plain(PerplexityReport, record) == report
    record["models"][1]["versus"]["kl"]["p99"] = "0.1"
    with pytest.raises(ValueError, match="no float"):
        from_plain(PerplexityReport, record)
    with pytest.raises(ValueError, match="without protocol"):
        from_plain(PerplexityReport, {})
    with pytest.raises(ValueError, match="3 is no list"):
        from_plain(Origin, {"name": "", "path": "", "commit": None, "manifest_sha256": None, "files": 3})


def test_the_command_tells_everything(tmp_path: Path, here: Path) -> None:
    """Two folders of one name: path, hash, date, command line and versions, in all four views."""
    for folder in ("a", "b"):
        (here / folder).mkdir()
    base, small = written(here / "a" / "model", seed=1), written(here / "b" / "model")
    text = ("--text", base / "text.txt", "--context", 64, "--chunks", 2)
    asked = ("eval", "perplexity", "b/model", "--reference", "a/model", *text, "-o", "r", "--samples")
    ran = qconvert(*asked)
    assert ran.code == 0, ran.err
    record = json.loads((here / "r.json").read_text())
    assert [model["label"] for model in record["models"]] == ["a/model", "b/model"]
    assert record["command"] == ["qconvert", *map(str, asked)] and record["verdict"]
    assert record["models"][1]["origin"]["path"] == str(small)
    digest = record["models"][1]["origin"]["files"][0]["sha256"]
    assert digest == sha256(small / "model.safetensors")
    for view in (ran.out, (here / "r.md").read_text(), (here / "r.html").read_text()):
        for word in (digest[:12], record["date"].replace("T", " ")[:-1], "b/model", "eval tokens/s", "torch"):
            assert word in view
        assert "qconvert eval perplexity b/model --reference a/model" in view
    assert [len(sample["continuations"]) for sample in record["samples"]] == [2, 2]
    assert "what the models write next" in (here / "r.md").read_text() and "Sample 1" not in ran.out
    assert record["weights"][0]["b"] == "b/model"


def test_views_show_the_verdict_first_and_the_glossary_last() -> None:
    report = compared()
    page = report.page()
    for view in (to_terminal(page), to_markdown(page)):
        assert view.index("KL mean") > view.index("other ")
        assert view.splitlines()[2].lstrip("*").startswith("other ")
    shown = to_terminal(page)
    assert max(map(len, shown[shown.index("Words") :].splitlines())) <= 100
    assert "Words" not in to_terminal(page, glossary=False)
    assert asdict(report)["date"].endswith("Z")


def test_samples_are_what_generate_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = demo_text("held-out").text
    model = open_model(open_checkpoint(MODEL_DIR), "embedded")
    monkeypatch.setattr(samples, "_PLACES", (0.25,))
    (sample,) = samples.continuations([model, replace(model, label="twice")], MODEL_DIR, text)
    at = text.index(sample.prompt + sample.text)
    assert abs(at - len(text) / 4) < 250
    first, second = sample.continuations
    assert first.text == second.text and first.same == second.same == len(first.text) > 48
    command = ("generate", "embedded", "-n", samples.NEW_TOKENS, "--backend", "reference", "-q")
    ran = qconvert(*command, "-p", sample.prompt)
    assert ran.code == 0 and ran.out == first.text + "\n"


def test_letters_that_are_the_same() -> None:
    assert [samples._same(a, b) for a, b in (("abc", "abd"), ("", "x"), ("ab", "ab"), ("ab", "abc"))] == [
        2,
        0,
        2,
        2,
    ]
    assert samples.continuations([], MODEL_DIR, "too short for a prompt") == ()
