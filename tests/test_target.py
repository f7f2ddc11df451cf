"""Outputs reach the size or the divergence that a command aims at, and are never worse than one encoding."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint.open import open_checkpoint
from tests.commands import Ran, made, qconvert
from tests.models import tiny

CALIBRATION = ("--tokens", 512, "--window", 64, "-j", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of an untied Llama, and a text beside it."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    (folder / "text.txt").write_text("A text of many words, which nobody needs to understand. " * 40)
    return tiny(folder / "model", "llama", tied=False, max_position_embeddings=128, **sizes)


def aimed(command: str, model: Path, *more: object) -> Any:
    """What a dry run would write."""
    text = model.parent / "text.txt"
    ran = qconvert(command, model, "--text", text, *CALIBRATION, *more, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    return ran.json


SCHEMES = ("--schemes", "int3-g64,int4-g64,int8-g64")
TYPES = ("--types", "q4_0,q5_0,q8_0")


@pytest.mark.parametrize(
    ("command", "choices", "targets"),
    [("quantize", SCHEMES, ("6.5bpw", "8bpw", "9bpw")), ("to-gguf", TYPES, ("4.9bpw", "5.6bpw", "7bpw"))],
)
def test_a_target_is_kept_and_no_encoding_alone_costs_less(
    command: str, choices: tuple[str, str], targets: tuple[str, ...], model: Path
) -> None:
    costs = []
    for target in targets:
        found = aimed(command, model, *choices, "--target-size", target)["target"]
        assert 8 * found["bytes"] <= float(target.removesuffix("bpw")) * found["weights"]
        for label in found["choices"]:
            options = [
                next(option for option in group["options"] if option["choice"] == label)
                for group in found["groups"]
            ]
            spent = sum(o["bytes"] for o in options) - sum(
                o["bytes"] for g in found["groups"] for o in g["options"] if o["choice"] == g["choice"]
            )
            fits = 8 * (found["bytes"] + spent) <= float(target.removesuffix("bpw")) * found["weights"]
            assert not fits or found["expected_kl"] <= sum(o["expected_kl"] for o in options) * (1 + 1e-9)
        costs.append(found["expected_kl"])
    assert costs[0] > costs[1] > costs[2] > 0


def test_the_folder_is_as_large_as_asked_and_says_what_was_chosen(model: Path, here: Path) -> None:
    text = model.parent / "text.txt"
    plan = aimed("quantize", model, *SCHEMES, "--target-size", "410KB")
    assert sum(file["bytes"] for file in plan["output"]["files"]) == plan["target"]["bytes"] <= 410_000
    folder = made("quantize", model, "--text", text, *CALIBRATION, *SCHEMES, "--target-size", "410KB")
    assert folder.name == "model-410kb-mixed"
    weights = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in weights) == plan["target"]["bytes"]
    chosen = {name: group["choice"] for group in plan["target"]["groups"] for name in group["weights"]}
    tensors = open_checkpoint(folder).tensors
    assert {name: tensors[name].encoding.label for name in chosen} == chosen
    assert len(set(chosen.values())) > 1
    manifest = json.loads((folder / "qconvert.json").read_text())
    assert manifest["recipe"] == plan["recipe"]  # rules like any others


def test_q_k_and_v_stay_alike_in_a_folder_and_are_free_in_a_gguf(model: Path) -> None:
    folder = aimed("quantize", model, *SCHEMES, "--target-size", "9.5bpw")["target"]["groups"]
    qkv = [group["weights"] for group in folder if "q_proj" in group["weights"][0]]
    assert [len(weights) for weights in qkv] == [3, 3]
    file = aimed("to-gguf", model, *TYPES, "--target-size", "5.6bpw")["target"]["groups"]
    assert all(len(group["weights"]) == 1 for group in file)
    names = {group["weights"][0] for group in file}
    assert {"token_embd.weight", "output.weight", "blk.1.attn_q.weight"} <= names


def test_a_gguf_is_written_as_it_was_planned(model: Path, here: Path) -> None:
    text = model.parent / "text.txt"
    asked = ("--text", text, *CALIBRATION, *TYPES, "--target-size", "300KB")
    plan = aimed("to-gguf", model, *TYPES, "--target-size", "300KB")
    file = made("to-gguf", model, *asked, "-o", here / "mixed.gguf")
    assert file.stat().st_size <= 300_000 and plan["target"]["bytes"] == file.stat().st_size
    assert {row["type"] for row in plan["types"]} >= {"q4_0", "f32"}
    again = made("to-gguf", model, *asked, "-o", here / "again.gguf")
    assert again.read_bytes() == file.read_bytes()


def test_a_divergence_is_reached_and_was_measured(model: Path) -> None:
    bytes_of = {}
    for target in (0.002, 0.0005):
        found = aimed("to-gguf", model, *TYPES, "--target-kl", target)["target"]
        assert found["measured_kl"]["mix"] <= target
        bytes_of[target] = found["bytes"]
    assert bytes_of[0.0005] > bytes_of[0.002]


def test_a_mix_that_is_measured_to_be_worse_is_not_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("quantize", model, "--text", model.parent / "text.txt", *CALIBRATION, *SCHEMES)
    aim = ("--target-size", "9bpw", "--dry-run", "--json")
    mixed = qconvert(*asked, *aim).json["target"]
    assert len({group["choice"] for group in mixed["groups"]}) > 1
    assert mixed["measured_kl"]["mix"] <= mixed["measured_kl"]["uniform"]
    measured = "qconvert.evaluate.planned.planned_divergences"
    monkeypatch.setattr(measured, lambda jobs, tokens_BT: [0.2, 0.1][: len(jobs)])
    same = qconvert(*asked, *aim).json["target"]
    assert {group["choice"] for group in same["groups"]} == {mixed["uniform"]["choice"]}
    assert same["bytes"] < mixed["bytes"]
    told = qconvert(*asked, *aim[:-1]).out
    assert (
        f"{mixed['uniform']['choice']} throughout: measured KL 0.10000, that of the best mix 0.20000" in told
    )


def test_a_type_that_a_weight_cannot_have_is_left_out(model: Path) -> None:
    """The embedding has no importances, which IQ1 and IQ2 need."""
    asked = ("to-gguf", model, "--text", model.parent / "text.txt", *CALIBRATION, "--target-size", "6bpw")
    given = ("--types", "q4_0,iq2_xxs,q8_0", "--no-fallback", "--dry-run")
    ran = qconvert(*asked, *given)
    assert ran.code == 0, ran.err
    (line,) = (line for line in ran.out.splitlines() if "left out" in line)
    assert line.startswith("iq2_xxs is left out: ")
    found = qconvert(*asked, *given, "--json").json["target"]
    assert found["choices"] == ["q4_0", "q8_0"] and list(found["left_out"]) == ["iq2_xxs"]
    alone = refused(*asked, "--types", "iq2_xxs,q4_0", "--no-fallback", "--dry-run")
    assert "iq2_xxs" in alone.err


def test_the_time_of_choosing_is_part_of_the_time(model: Path, here: Path) -> None:
    text = ("--text", model.parent / "text.txt", *CALIBRATION)
    began = time.perf_counter()
    ran = qconvert("quantize", model, *text, *SCHEMES, "--target-size", "9bpw", "--json", "--no-verify")
    took = time.perf_counter() - began
    plain = qconvert("quantize", model, "--scheme", "int4-g64", "-o", "plain", "--json", "--no-verify")
    assert plain.json["seconds"] < ran.json["seconds"] < took
    assert ran.json["seconds"] > 0.5 * took  # which is mostly that of choosing


def test_people_see_the_mix(model: Path) -> None:
    asked = ("--text", model.parent / "text.txt", *CALIBRATION, *SCHEMES, "--target-size", "9.5bpw")
    ran = qconvert("quantize", model, *asked, "--dry-run")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split() == ["weights", "loaded", "alike", "int3-g64", "int4-g64", "int8-g64", "bytes",
                                "expected", "KL"]  # fmt: skip
    assert "model.layers.N.mlp.down_proj.weight" in lines[4]
    assert any("expected KL" in line and "nats per token" in line for line in lines)
    assert any(line.startswith("with int4-g64 throughout: expected KL") for line in lines)
    assert "tokens forwards and backwards" in ran.err


def refused(*args: object) -> Ran:
    ran = qconvert(*args)
    assert ran.code != 0 and not ran.out and ran.err.startswith("Error: "), ran
    return ran


@pytest.mark.parametrize(
    ("args", "fact"),
    [
        (["--target-size", "4.5"], "--target-size '4.5': has no unit"),
        (["--target-size", "4.5bpw", "--target-kl", "0.1"], "--target-size, --target-kl: both"),
        (["--target-kl", "minus"], "--target-kl minus: is no divergence"),
        (["--target-size", "4.5bpw", "--bits", "4"], "--bits: given beside a target"),
        (["--target-size", "4.5bpw", "--schemes", "int4"], "one encoding to choose among (int4)"),
        (["--target-size", "4.5bpw", "--schemes", "int4,keep"], "--schemes keep: is no scheme"),
        (["--target-size", "4.5bpw", "--schemes", "int4,nf4"], "scheme 'nf4': not a scheme"),
        (["--bits", "4", "--schemes", "int4,int8"], "--schemes, --types: given without a target"),
    ],
)
def test_what_cannot_be_aimed_at_is_told_before_anything_is_read(
    args: list[str], fact: str, model: Path
) -> None:
    ran = refused("quantize", model, *args)
    assert fact in ran.err and ran.code == 2


@pytest.mark.parametrize(
    ("args", "fact"),
    [
        ([], "to-gguf: no type was asked for"),
        (["--type", "q4_0", "--target-size", "5bpw"], "--type: given beside a target"),
        (["--target-size", "5bpw", "--types", "q4_0,q99"], "q99"),
    ],
)
def test_a_gguf_has_a_type_or_a_target(args: list[str], fact: str, model: Path) -> None:
    ran = refused("to-gguf", model, *args)
    assert fact in ran.err and ran.code == 2


def test_a_size_that_no_mix_has_is_told_with_the_least(model: Path) -> None:
    text = model.parent / "text.txt"
    ran = refused(
        "quantize", model, "--text", text, *CALIBRATION, *SCHEMES, "--target-size", "4bpw", "--dry-run"
    )
    assert "bytes, and take" in ran.err and "fewer bits" in ran.err  # the tables alone are more
