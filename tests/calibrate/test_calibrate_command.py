"""`qconvert calibrate`: what it writes, what it tells while it runs, and what it refuses."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.calibrate import collect
from qconvert.calibrate.statistics_file import read_statistics
from qconvert.cli import main
from qconvert.formats.gguf.imatrix import read_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from tests.cli.test_cli_reading import Terminal
from tests.support.commands import failed, made, qconvert
from tests.support.models import tiny as tiny_checkpoint

GGUF = ("--type", "q4_k_m", "--pre-tokenizer", "gpt-2")


def model_with_tokenizer(folder: Path, **sizes: Any) -> Path:
    """A tiny checkpoint and a tokenizer of bytes."""
    from tests.calibrate.test_calibration_text import dialogue

    dialogue(folder.with_name(f"{folder.name}-tokenizer"))
    tiny_checkpoint(folder, **sizes)
    for path in folder.with_name(f"{folder.name}-tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_command_writes_statistics_that_quantizing_takes(tmp_path: Path, here: Path) -> None:
    model = model_with_tokenizer(tmp_path / "m")
    ran = qconvert("calibrate", model, "--tokens", "1k", "--window", 128, "-o", "stats")
    assert ran.code == 0 and "1,024 in windows of 128" in ran.out and "done in" in ran.err, ran.err
    assert "9, read by 15 linears" in ran.out
    weighed = made("quantize", model, "--bits", 3, "--calibration", "stats", "-o", "weighed")
    plain = made("quantize", model, "--bits", 3, "-o", "plain")
    assert (weighed / "model.safetensors").read_bytes() != (plain / "model.safetensors").read_bytes()
    record = json.loads((weighed / "qconvert.json").read_text())["statistics"]
    assert record["tensors"] == 14 and record["texts"][0]["files"][0]["name"] == "documents.jsonl"
    card = (weighed / "README.md").read_text()
    assert "weighed by the statistics of their inputs `statistics.safetensors`, measured on `default`" in card
    import jsonschema

    schema = Path(__file__).resolve().parents[2] / "qconvert" / "manifest.schema.json"
    jsonschema.validate(json.loads((weighed / "qconvert.json").read_text()), json.loads(schema.read_text()))


def test_one_run_gives_both_files_which_weigh_alike(tmp_path: Path, here: Path) -> None:
    model = model_with_tokenizer(tmp_path / "m")
    how = ("--tokens", "1k", "--window", 128, "--imatrix", "i.gguf", "-o", "s.safetensors", "--json")
    ran = qconvert("calibrate", model, *how)
    assert ran.json["outputs"] == ["s.safetensors", "i.gguf"] and ran.json["tokens"] == 1024
    assert ran.json["experts"] == 0 and ran.json["inputs"] == 9
    outputs = [
        made("to-gguf", model, *GGUF, "--calibration", file, "-o", f"{file}.gguf")
        for file in ("s.safetensors", "i.gguf")
    ]
    with GGUFFile(outputs[0]) as ours, GGUFFile(outputs[1]) as theirs:
        for name, spec in ours.specs.items():
            assert np.array_equal(ours.read(name, 0, spec.rows), theirs.read(name, 0, spec.rows)), name


def test_merging_is_adding_and_turns_into_an_importance_matrix(tmp_path: Path, here: Path) -> None:
    model = model_with_tokenizer(tmp_path / "m")
    for seed in (1, 2):
        made("calibrate", model, "--tokens", 512, "--window", 128, "--seed", seed, "-o", f"s{seed}")
    made("calibrate", model, "--merge", "s1", "--merge", "s2", "-o", "both", "--imatrix", "both.gguf")
    both, parts = read_statistics(Path("both")), [read_statistics(Path(f"s{seed}")) for seed in (1, 2)]
    assert both.statistics.tokens == 1024 and len(both.texts) == 2
    for key, moments in both.statistics.inputs.items():
        np.testing.assert_allclose(
            moments.squares_I, sum(part.statistics.inputs[key].squares_I for part in parts), rtol=1e-6
        )
    assert read_imatrix(Path("both.gguf")).chunks == 8


def test_who_watches_sees_layers_pass_with_every_batch(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm

    model = model_with_tokenizer(tmp_path / "m")
    monkeypatch.setattr(collect, "BATCH_BYTES", 1)  # every window by itself
    monkeypatch.setattr("qconvert.calibrate.backward.BATCH_TOKENS", {"cpu": 256})
    shown: list[tuple[float, float]] = []

    class Bar(tqdm.tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            shown.append((self.n, self.total))
            return super().update(n)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    how = ("--tokens", 512, "--window", 128, "--overwrite", "-o", "stats")
    for more, wanted in (
        ((), [(n / 4, 2) for n in range(1, 9)]),
        (("--sensitivities",), [(n / 2, 5) for n in range(1, 11)]),
    ):
        shown.clear()
        code, err = watched("calibrate", model, *how, *more)
        assert code == 0 and shown == [(round(n, 1), total) for n, total in wanted]
        assert "running 512 tokens, 4 windows of 128, through 2 layers" in err
    assert not qconvert("calibrate", model, *how, "-q").err


def watched(*args: object) -> tuple[int, str]:
    """A command on a terminal."""
    err = Terminal()
    with redirect_stdout(StringIO()), redirect_stderr(err), pytest.raises(SystemExit) as ending:
        main([str(arg) for arg in args])
    return int(ending.value.code or 0), err.getvalue()


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (("--engine", "transformers"), "--sensitivities: --engine transformers runs no model backwards"),
        (("--imatrix", "i.gguf"), "--sensitivities: an importance matrix has none"),
        (("--merge", "s"), "--sensitivities: nothing is run with --merge"),
    ],
)
def test_sensitivities_that_nobody_would_get_are_refused(
    more: tuple[str, ...], fact: str, tmp_path: Path, here: Path
) -> None:
    ran = qconvert("calibrate", tiny_checkpoint(tmp_path / "m"), "--sensitivities", *more)
    assert ran.code != 0 and f"Error: {fact}" in ran.err


def test_nothing_is_replaced_unasked_and_little_text_is_told(tmp_path: Path, here: Path) -> None:
    model = model_with_tokenizer(tmp_path / "m")
    (here / "t.txt").write_text("a b c " * 50)
    how = ("calibrate", model, "--text", "t.txt", "--window", 64)
    first = qconvert(*how, "-o", "stats")
    assert (
        first.code == 0 and "note: the text has 256 tokens in whole windows, fewer than 32,768" in first.err
    )
    ran = qconvert(*how, "-o", "stats")
    assert ran.code == 1 and "statistics.safetensors: already exists" in ran.err
    assert qconvert(*how, "-o", "stats", "--overwrite", "-q").out == "stats/statistics.safetensors\n"
    assert qconvert(*how, "-q").out == "m-statistics/statistics.safetensors\n"
    ran = qconvert(*how, "-o", "i.gguf")
    hint = "--imatrix i.gguf writes llama.cpp's importance matrix"
    failed(ran, "i.gguf: -o names a folder of statistics, not a file", hint, 2)
    ran = qconvert(*how, "--window", 512, "--imatrix", "i.gguf")
    failed(ran, "--window 512: the model has 128 positions", "use --window 128 or less")
    ran = qconvert(
        "calibrate", model, "--merge", "stats", "--imatrix", "i.gguf", "--merge", tmp_path / "none"
    )
    assert ran.code == 1 and "none: no such file" in ran.err
    other = model_with_tokenizer(tmp_path / "other", num_hidden_layers=1)
    ran = qconvert("quantize", other, "--bits", 4, "--calibration", "stats", "-o", "x")
    assert ran.code == 1 and "has the statistics of 2 layers (m), the model 1" in ran.err


def test_measuring_on_the_text_of_calibration_is_told(tmp_path: Path, here: Path) -> None:
    model = model_with_tokenizer(tmp_path / "m")
    (here / "same.txt").write_text("A text of some words. " * 40)
    (here / "other.txt").write_text("Another text of words. " * 40)
    made("calibrate", model, "--text", "same.txt", "--window", 64, "-o", "stats")
    out = made("quantize", model, "--bits", 8, "--calibration", "stats", "-o", "out")
    for name, told in (("same.txt", True), ("other.txt", False)):
        ran = qconvert("eval", "perplexity", out, "--text", name, "--context", 64, "--chunks", 2)
        assert ran.code == 0 and ("out was calibrated on this text, which flatters it" in ran.out) is told
