"""Broken and hostile folders through the real command: one clear error, or a right output.

Driven by the manifest that lies beside the folders: what is wrong with each, what a good tool does,
and the words that its message must hold.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support.commands import Ran, qconvert

# Whole sentences among the words to name: the tensors that they stand for.
SPELLED = {
    "first tensor that does not fit": "model.layers.",
    "model.norm.weight or whichever tensor is last": "model.norm.weight",
}
# Folders that the manifest wants refused: their structure says what they are, and the output says so aloud.
PLANNED = {"cfg-unknown-model-type": "qwen99"}
KINDS = ("ok-", "cfg-", "w-", "ix-", "st-", "empty-folder", "dir-as-file")


@pytest.fixture(scope="module")
def bad(assets: Path) -> dict[str, Any]:
    folder = assets / "fixtures" / "bad"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    return {"folder": folder, **manifest}


def quantized(folder: Path, tmp_path: Path) -> Ran:
    return qconvert("quantize", folder, "--bits", 4, "--group-size", 32, "-o", tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_each_folder_gets_what_it_deserves(bad: dict[str, Any], tmp_path: Path, kind: str) -> None:
    items = {name: item for name, item in bad["items"].items() if name.startswith(kind)}
    assert items
    before = sorted(bad["folder"].parent.rglob("*"))
    for name, item in items.items():
        started = time.perf_counter()
        ran = quantized(bad["folder"] / name, tmp_path / name)
        assert time.perf_counter() - started < bad["limits"]["seconds"], name
        complaint = f"{name} ({item['wrong']}): {ran.err}"
        if ran.code == 0:
            assert item["expect"] != "reject" or name in PLANNED, complaint
            assert PLANNED.get(name, "") in ran.err, complaint
            assert_readable(tmp_path / name / "out")
        else:
            assert item["expect"] != "accept", complaint
            assert_one_clear_error(ran)
            assert not (tmp_path / name).exists() or not list((tmp_path / name).iterdir()), complaint
        for text in item.get("must_name") or () if item["expect"] == "reject" else ():
            assert SPELLED.get(text, text) in ran.err, complaint
    assert sorted(bad["folder"].parent.rglob("*")) == before, "something was written beside the input"


def assert_one_clear_error(ran: Ran) -> None:
    assert (ran.code, ran.out) == (1, "")
    assert "bug in qconvert" not in ran.err and ran.err.replace("\n", "").isprintable(), ran.err
    lines = [line for line in ran.err.splitlines() if not line.startswith("Warning: ")]
    assert lines[0].startswith("Error: ") and all(line.startswith("Hint: ") for line in lines[1:]), ran.err
    assert len(lines) <= 2 and max(map(len, lines)) < 1000, ran.err


def assert_readable(out: Path) -> None:
    with safe_open(out / "model.safetensors", framework="numpy") as file:
        assert "model.norm.weight" in file.keys()  # noqa: SIM118 (the library's object is no mapping)
    assert qconvert("verify", out).code == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


ACCEPTED_ALOUD = {
    "ix-wrong-total": "total_size",
    "ix-extra-tensor": "model.layers.9.mlp.up_proj.weight",
    "ix-duplicate-tensor": "model.layers.0.self_attn.q_proj.weight",
    "ix-and-single": "model.safetensors.index.json",
    "w-inv-freq": "inv_freq",
    "w-lm-head-identical-tied": "lm_head.weight",
    "w-lm-head-different-tied": "lm_head.weight",
    "st-name-bidi": "\\u202e",
    "st-name-100k": "100000 characters",
    "w-zero-size": "model.layers.0.extra.weight",
    "w-scalar": "model.layers.0.scale",
}


@pytest.mark.parametrize("name", ACCEPTED_ALOUD)
def test_what_is_tolerated_is_told(bad: dict[str, Any], tmp_path: Path, name: str) -> None:
    assert ACCEPTED_ALOUD[name] in quantized(bad["folder"] / name, tmp_path).err


@pytest.mark.parametrize("name", ["w-nan-one", "w-inf-one", "w-neginf-embed", "w-nan-norm"])
def test_numbers_that_are_none_pass_when_allowed(bad: dict[str, Any], tmp_path: Path, name: str) -> None:
    wish = ("--bits", 4, "--group-size", 32, "--allow-nonfinite", "-o", tmp_path / "out")
    assert qconvert("quantize", bad["folder"] / name, *wish).code == 0


@pytest.mark.parametrize("name", ["w-zero-size", "w-scalar", "st-name-bidi", "st-name-100k"])
def test_unknown_tensors_are_copied_when_allowed(bad: dict[str, Any], tmp_path: Path, name: str) -> None:
    wish = ("--bits", 4, "--group-size", 32, "--allow-unknown", "-o", tmp_path / "out")
    ran = qconvert("quantize", bad["folder"] / name, *wish)
    assert ran.code == 0, ran.err


def test_a_number_too_large_for_float16_is_refused_for_float16_alone(
    bad: dict[str, Any], tmp_path: Path
) -> None:
    folder = bad["folder"] / "w-bf16-max"
    for command in (("quantize", "--bits", 4, "--group-size", 32), ("fuse",)):
        ran = qconvert(command[0], folder, *command[1:], "--dtype", "f16", "-o", tmp_path / "f16")
        assert ran.code == 1 and "model.layers.0.self_attn.q_proj.weight" in ran.err and "f16" in ran.err
        assert not list(tmp_path.iterdir())
    assert quantized(folder, tmp_path).code == 0


@pytest.mark.parametrize("name", ["w-all-zero", "w-zero-group", "w-constant-row", "w-denormals", "w-outlier"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-asym-g32", "int8-channel"])
def test_degenerate_weights_decode_to_finite_numbers_near_them(
    bad: dict[str, Any], tmp_path: Path, name: str, scheme: str
) -> None:
    wish = ("--scheme", scheme, "-o", tmp_path / "out")
    assert qconvert("quantize", bad["folder"] / name, *wish).code == 0
    ran = qconvert("diff", bad["folder"] / name, tmp_path / "out", "--json")
    by_name = {entry["name"]: entry for entry in ran.json["tensors"]}
    assert all(entry["relative_rms"] < 0.5 for entry in by_name.values())
    if name == "w-all-zero":
        assert "model.layers.0.mlp.down_proj.weight" not in by_name, "zeros decode to zeros"


def test_no_code_of_a_checkpoint_runs(bad: dict[str, Any], tmp_path: Path) -> None:
    """It is copied, as the loaders that are told to run it want it, and the user hears of it."""
    source = bad["folder"] / "cfg-auto-map"
    ran = quantized(source, tmp_path)
    assert ran.code == 0 and "never run: evil.py" in ran.out
    assert (tmp_path / "out" / "evil.py").read_bytes() == (source / "evil.py").read_bytes()
    marker = (source / "evil.py").read_text().split("'")[1]
    assert not Path(marker).exists()
