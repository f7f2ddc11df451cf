"""`inspect` says what a model can be used for, and lays several models side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qconvert.checkpoint.about import about
from qconvert.checkpoint.open import open_checkpoint
from qconvert.report.side_by_side import side_by_side
from tests.support.commands import made, qconvert, strict_json
from tests.support.models import tiny


def test_what_config_tokenizer_and_card_say_is_one_line() -> None:
    line = qconvert("inspect", "embedded").out.splitlines()[1]
    assert line == (
        "context 2,048; vocabulary 4,096; rope base 10,000; "
        "tokenizer BPE; chat template yes; licence apache-2.0"
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 scaling by 8",
        ),
        ({"rope_theta": 1000000, "rope_scaling": {"type": "yarn", "factor": 4}}, "yarn scaling by 4"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "base 10,000"),
        ({"rope_theta": 10000.0, "rope_scaling": "broken"}, "base 10,000"),
    ],
)
def test_rope_in_its_spellings(said: dict[str, object], shown: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    (model / "config.json").write_text(json.dumps(config | said))
    rope = about(open_checkpoint(model))["rope"]
    assert rope.endswith(shown)


def test_a_damaged_tokenizer_does_not_keep_a_model_from_being_inspected(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m")
    (model / "tokenizer.json").write_text("{")
    ran = qconvert("inspect", model)
    assert ran.code == 0 and "tokenizer tokenizer.json" in ran.out


def test_several_models_stand_side_by_side(tmp_path: Path) -> None:
    quantized = made("quantize", "embedded", "--bits", 4, "-o", tmp_path / "int4")
    gguf = tmp_path / "m.gguf"
    made("to-gguf", "embedded", "--type", "q8_0", "-o", gguf)
    shown = qconvert("inspect", "embedded", quantized, gguf).out.splitlines()
    rows = {line[:15].strip(): line[15:].split() for line in shown}
    assert rows["mlp.down"] == ["bf16", "int4-g128", "q8_0"] and rows["context"] == ["2,048"] * 3
    found = strict_json(qconvert("inspect", "embedded", gguf, "--json").out)
    assert [each["about"]["context"] for each in found["models"]] == [2048, 2048]


def test_facts_stand_before_roles_whichever_model_has_them() -> None:
    about = {"context": None, "vocabulary": None, "tokenizer": None, "chat_template": False, "licence": None}
    row = {"role": "embed", "forms": ["bf16"]}
    one = {"family": "F", "layers": 1, "parameters": 8, "bytes": 16, "tied": True, "quantization": None}
    one["has_head"] = True
    models = [{**one, "about": {**about, "rope": rope}, "rows": [row]} for rope in (None, "base 10,000")]
    lines = side_by_side({"a": models[0], "b": models[1]})
    assert [line.split("  ")[0] for line in lines][-3:] == ["quantization", "rope", "embed"]
    narrow = side_by_side({"a": models[0], "b": models[1]}, 40)
    assert max(map(len, narrow)) <= 40 < max(map(len, lines)) and narrow.count("") == 1


def test_metadata_is_listed_with_long_arrays_cut(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    made("to-gguf", "embedded", "--type", "q8_0", "-o", gguf)
    keys = strict_json(qconvert("inspect", gguf, "--metadata", "--json").out)["metadata"]
    assert keys["general.architecture"] == "qwen3" and keys["tokenizer.ggml.tokens"]["length"] == 4096
    assert "hidden_size" in qconvert("inspect", "embedded", "--metadata").out
