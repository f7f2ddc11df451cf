"""Outputs reach the size or the divergence that a command aims at, and are never worse than one encoding."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import gguf
import jsonschema
import numpy as np
import pytest

import qconvert as qconvert_package
from qconvert.checkpoint.open import open_checkpoint
from qconvert.evaluate.mix_table import mix_grid
from tests.support.commands import Ran, made, qconvert
from tests.support.models import tiny

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
    plan = aimed("quantize", model, *SCHEMES, "--target-size", "420KB")
    assert sum(file["bytes"] for file in plan["files"]) == plan["target"]["bytes"] <= 420_000
    folder = made("quantize", model, "--text", text, *CALIBRATION, *SCHEMES, "--target-size", "420KB")
    assert folder.name == "model-420kb-mixed"
    weights = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in weights) == plan["target"]["bytes"]
    chosen = {name: group["choice"] for group in plan["target"]["groups"] for name in group["weights"]}
    tensors = open_checkpoint(folder).tensors
    assert {name: tensors[name].encoding.label for name in chosen} == chosen
    assert len(set(chosen.values())) > 1
    manifest = json.loads((folder / "qconvert.json").read_text())
    assert manifest["recipe"] == plan["recipe"]  # rules like any others
    check_record(manifest["target"], plan["target"])
    assert manifest["target"]["size"] == "420KB" and manifest["target"]["kl"] is None
    schema = json.loads((Path(qconvert_package.__file__).parent / "manifest.schema.json").read_text())
    jsonschema.validate(manifest, schema)
    grid = mix_grid("m", manifest["target"])
    assert grid is not None and "--target-size 420KB" in grid.title
    assert len(grid.rows) == len(plan["target"]["groups"])
    assert any(row[1] == "self_attn.q_proj, k_proj, v_proj" for row in grid.rows)
    row = next(row for row in grid.rows if row[2] != "int3-g64")
    assert row[0].isdecimal() and row[5].split()[-1].startswith("(int") and row[6].startswith("+")


def check_record(record: Any, planned: Any) -> None:
    """What an output says of its target is what the plan printed, prices to four digits."""
    assert record["choices"] == planned["choices"] and record["texts"] == [planned["text"]]
    assert record["expected_kl"] == pytest.approx(planned["expected_kl"], rel=1e-3)
    for found, group in zip(record["groups"], planned["groups"], strict=True):
        assert (found["weights"], found["choice"]) == (group["weights"], group["choice"])
        for option in group["options"]:
            nbytes, nats = found["options"][option["choice"]]
            assert nbytes == option["bytes"] and nats == pytest.approx(option["expected_kl"], rel=1e-3)


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
    key = gguf.GGUFReader(file).fields["qconvert.target"]
    check_record(json.loads(bytes(key.parts[-1]).decode()), plan["target"])
    again = made("to-gguf", model, *asked, "-o", here / "again.gguf")
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("method", ["nearest", "feedback"])
def test_a_size_in_bytes_holds_with_all_that_a_file_says_of_itself(
    method: str, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of one encoding, the bytes leave no room for a record: that file is made again at least."""
    asked = ("to-gguf", model, "--text", model.parent / "text.txt", *CALIBRATION, "--method", method)
    file = made(*asked, *TYPES, "--target-size", "300KB", "-o", here / "mixed.gguf")
    assert file.stat().st_size <= 300_000
    plan = aimed("to-gguf", model, *TYPES, "--method", method, "--target-size", "300KB")
    assert plan["target"]["bytes"] == file.stat().st_size
    text = () if method == "nearest" else asked[2:]
    alone = made("to-gguf", model, "--type", "q5_0", "--pure", *text, "-o", here / "alone.gguf")
    monkeypatch.setattr("qconvert.evaluate.planned.surely_less", lambda mix_N, one_N: False)
    room = alone.stat().st_size + (0 if method == "feedback" else 512)
    same = made(*asked, *TYPES, "--target-size", f"{room}B", "-o", here / "same.gguf")
    assert same.stat().st_size <= room
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(same).tensors}
    assert {kinds[name] for name in kinds if kinds[name] != "F32"} == {"Q5_0"}


def test_a_size_is_told_in_the_terms_in_which_it_was_asked(model: Path) -> None:
    asked = ("to-gguf", model, "--text", model.parent / "text.txt", *CALIBRATION, *TYPES, "--dry-run")
    of_file = qconvert(*asked, "--target-size", "300KB").out
    assert "KB with headers and tokenizer, of 300 KB asked; expected KL" in of_file
    of_tensors = qconvert(*asked, "--target-size", "8bpw").out
    assert "KB of tensors, " in of_tensors and "bits for each of" in of_tensors
    small = qconvert(*asked, "--target-size", "90KB").err
    assert "KB are fixed: what no rule quantizes, headers and metadata" in small
    assert small.endswith("add an encoding of fewer bits\n")


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
    nats = [np.full(512, kl) for kl in (0.2, 0.1)]
    monkeypatch.setattr(measured, lambda jobs, tokens_BT, **how: nats[: len(jobs)])
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
    assert "a mix is as good as its text" not in ran.out
    bundled = ("--text", "default", *asked[2:], "--dry-run")
    assert "a mix is as good as its text: --text FILE" in qconvert("quantize", model, *bundled).out


STATS = ("--text", "text.txt", "--tokens", 512, "--window", 64, "-o", "stats")


def labels_of(plan: Any) -> dict[str, str]:
    return {name: group["choice"] for group in plan["target"]["groups"] for name in group["weights"]}


@pytest.mark.parametrize(
    ("command", "choices", "targets"),
    [("quantize", SCHEMES, ("6.5bpw", "9.5bpw")), ("to-gguf", TYPES, ("4.9bpw", "6bpw"))],
)
def test_stored_sensitivities_give_a_mix_and_read_no_text(
    command: str, choices: tuple[str, str], targets: tuple[str, ...], model: Path, here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the same text and tokens; their prices are rougher, and their mixes are not measured."""
    (here / "text.txt").write_text((model.parent / "text.txt").read_text())
    ran = qconvert("calibrate", model, *STATS, "--sensitivities")
    assert ran.code == 0 and "sensitivities  of 512 tokens" in ran.out, ran.err
    assert "through 2 layers, forwards and backwards" in ran.err
    measured = [aimed(command, model, *choices, "--target-size", target) for target in targets]
    monkeypatch.setattr("qconvert.calibrate.measure_sensitivity.sensitivities_of", None)
    monkeypatch.setattr("qconvert.calibrate.run.read_text", None)
    how = (*choices, "--calibration", "stats", "-j", 2, "--dry-run", "--json", "--target-size")
    for target, want in zip(targets, measured, strict=True):
        found = qconvert(command, model, *how, target)
        assert found.code == 0, found.err
        assert labels_of(found.json).keys() == labels_of(want).keys()
        assert len(set(labels_of(found.json).values())) > 1
        ours, theirs = (each["target"]["expected_kl"] for each in (found.json, want))
        assert 1 / 2.5 < ours / theirs < 2.5  # sums lack what errors of rows have in common
        text, same = (each["target"]["text"] for each in (found.json, want))
        assert text == same
    told = qconvert(command, model, *how[:-3], "--dry-run", "--target-size", targets[0])
    assert "weighing encodings: sensitivities of 512 tokens in stats" in told.err


def test_a_text_that_is_named_is_run_and_statistics_without_sensitivities_go_on(
    model: Path, here: Path
) -> None:
    (here / "text.txt").write_text((model.parent / "text.txt").read_text())
    made("calibrate", model, *STATS, "--sensitivities")
    made("calibrate", model, *STATS[:-1], "plain")
    how = ("quantize", model, *SCHEMES, "--target-size", "8bpw", "--dry-run", "-j", 2, "--calibration")
    asked = ("--text", "text.txt", "--tokens", "all", "--window", 64)
    for more in (("stats", *asked), ("plain", *asked)):
        ran = qconvert(*how, *more)
        assert ran.code == 0 and "tokens forwards and backwards through the model" in ran.err, ran.err


def refused(*args: object) -> Ran:
    ran = qconvert(*args)
    assert ran.code != 0 and not ran.out and ran.err.startswith("Error: "), ran
    return ran


@pytest.mark.parametrize(
    ("args", "fact"),
    [
        (["--target-size", "4.5"], "--target-size '4.5': has no unit"),
        (["--target-size", "4.5bpw", "--target-kl", "0.1"], "--target-size, --target-kl: both"),
        (["--target-kl", "minus"], "--target-kl minus: is not a divergence"),
        (["--target-size", "4.5bpw", "--bits", "4"], "--bits: given together with a target"),
        (["--target-size", "4.5bpw", "--schemes", "int4"], "one encoding to choose among (int4)"),
        (["--target-size", "4.5bpw", "--schemes", "int4,keep"], "--schemes keep: is not an integer scheme"),
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
        (["--type", "q4_0", "--target-size", "5bpw"], "--type: given together with a target"),
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
    assert "target size 4bpw: too small; the smallest is about" in ran.err and "fewer bits" in ran.err


@pytest.mark.parametrize("command", [("quantize", *SCHEMES), ("to-gguf", "--types", "q4_0,q8_0")])
def test_the_least_size_that_a_refusal_names_is_reached(model: Path, command: tuple[str, ...]) -> None:
    name, *choices = command
    asked = (name, model, "--text", model.parent / "text.txt", *CALIBRATION, *choices, "--dry-run")
    told = refused(*asked, "--target-size", "20KB").err
    found = re.search(r"about (\S+) KB, of which (\S+) KB", told)
    assert found is not None, told
    smallest = float(found[1])
    assert float(found[2]) < smallest
    assert qconvert(*asked, "--target-size", f"{smallest * 1.03:.0f}KB").code == 0
    refused(*asked, "--target-size", f"{smallest * 0.98:.0f}KB")
