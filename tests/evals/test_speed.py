"""The speed commands run, on a model small enough for it, and write down what they measured."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from evals import processes, speed_decoder, synthetic
from evals.speed import main
from tests.support.commands import made
from tests.support.forked_python import fork_commands

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1200,
}
OURS = ("int4, int4 head", "int4, int8 head", "int4, bf16 head", "bf16")


@pytest.fixture(autouse=True)
def _commands_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_commands(monkeypatch, processes, synthetic)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both commands find the models that the first of them makes."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_measures_every_runner_in_every_round(
    command: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "qwen2.5-0.5b", synthetic.SHAPES["qwen2.5-0.5b"] | TINY)
    monkeypatch.setattr(speed_decoder, "_COPY_BYTES", 1 << 16)
    out = tmp_path / "record.json"
    options = ["--rounds", 2, "--tokens", 8, "--threads", 1, "--dir", models, "-o", out]
    ran = CliRunner().invoke(main, [command, *map(str, options)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    record = json.loads(out.read_text())
    rates = record["tokens_per_second"]
    assert set(OURS) <= set(rates)
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
    processor = record["processor_seconds_per_token"]
    assert set(processor) == set(rates) and all(len(values) == 2 for values in processor.values())
    # The head, and per layer q, o, k, v and the three matrices of the MLP.
    weights = 1200 * 128 + 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    assert record["token_bytes"]["bf16"] == 2 * weights
    head = 1200 * 128
    # Half a byte a weight, and a scale of two bytes for each 128 of them.
    packed = (weights - head) // 2 + 2 * (weights - head) // 128
    assert record["token_bytes"]["int4, bf16 head"] == packed + 2 * head, record["token_bytes"]
    assert f"{command}: qwen2.5-0.5b, 8 tokens" in ran.output
    shares = record["shares_of_processor_seconds"]
    kinds = {"linears", "logits", "attention", "norms", "losses", "rest"}
    assert not shares if command == "decode" else all(kinds <= set(shares[name]) for name in OURS)
    assert all(sum(found.values()) == pytest.approx(1) for found in shares.values())
    assert ("percent of processor time" in ran.output) == (command == "prefill")


def test_other_layouts_beside_int4(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "qwen3-0.6b", synthetic.SHAPES["qwen3-0.6b"] | TINY)
    monkeypatch.setattr(speed_decoder, "_COPY_BYTES", 1 << 16)
    out = tmp_path / "record.json"
    options = ["--layouts", "--shape", "qwen3-0.6b", "--rounds", 1, "--tokens", 2, "--threads", 1]
    ran = CliRunner().invoke(
        main, ["decode", *map(str, options), "--dir", str(models), "-o", str(out)], catch_exceptions=False
    )
    assert ran.exit_code == 0, ran.output
    rates = json.loads(out.read_text())["tokens_per_second"]
    assert {"int4, int8 head", "MLX 4-bit g64, int8 head", "NF4, int8 head"} <= set(rates)
    assert "times int4, int8 head" in ran.output
    if find_spec("cyllama"):
        assert {"GGUF Q4_0", "llama.cpp Q4_0", "GGUF Q4_K_M", "llama.cpp Q4_K_M"} <= set(rates)


def test_one_step_beside_llama_cpps_two(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    monkeypatch.setitem(synthetic.SHAPES, "qwen2.5-1.5b", synthetic.SHAPES["qwen2.5-1.5b"] | TINY)
    out = tmp_path / "record.json"
    options = ["--rounds", 1, "--type", "q8_0", "--dir", models, "-o", out]
    ran = CliRunner().invoke(main, ["gguf", *map(str, options)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["copy", "bf16", "q8_0", "q8_0, verified", "q8_0, llama.cpp"]
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 0 for done in runs.values() for run in done)
    assert "times two steps" in ran.output and all(f"\n{name}  " in ran.output for name in runs), ran.output


def test_repacking_beside_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint already exists: a process of its own would make one of the real size."""
    monkeypatch.setitem(synthetic.SHAPES, "qwen2.5-1.5b", synthetic.SHAPES["qwen2.5-1.5b"] | TINY)
    plain = synthetic.make_checkpoint(tmp_path / "plain", "qwen2.5-1.5b")
    made("quantize", plain, "--bits", 4, "--layout", "gptq", "-o", tmp_path / "qwen2.5-1.5b-gptq-int4")
    out = tmp_path / "record.json"
    options = ["--rounds", 1, "--dir", tmp_path, "-o", out]
    ran = CliRunner().invoke(main, ["repack", *map(str, options)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    record = json.loads(out.read_text())
    assert set(record["runs"]) == {"copy", "repacked", "repacked, verified"}
    assert all(runs[0]["seconds"] > 0 for runs in record["runs"].values())
    assert all(f"\n{name}  " in ran.output for name in record["runs"]), ran.output
