"""`verify` and `diff` as a user meets them: damage is seen, and equal numbers are seen as equal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.check.verify import verify
from qconvert.checkpoint.open import open_checkpoint
from qconvert.errors import QConvertError
from tests.support.commands import files_of, made, qconvert
from tests.support.models import tiny

ROOT = Path(__file__).resolve().parents[2]
Q = "model.layers.0.self_attn.q_proj.weight"


def damaged(source: Path, copy: Path, name: str, change: int) -> Path:
    """A copy of an output with one byte of one array changed, `change` bytes into it."""
    copy.mkdir()
    for file, data in files_of(source).items():
        (copy / file).write_bytes(data)
    raw = bytearray((copy / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin = json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
    raw[8 + length + begin + change] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    return copy


@pytest.mark.parametrize("name", ["model.norm.weight", f"{Q}_packed", f"{Q}_scale"])
def test_verify_sees_one_flipped_bit(models: Path, here: Path, name: str) -> None:
    bad = damaged(models / "quantized", here / "bad", name, change=2)
    ran = qconvert("verify", bad)
    assert ran.code == 3 and ran.err.startswith("Error: model.safetensors: its SHA-256 is not the manifest's")
    ran = qconvert("verify", bad, "--json")
    assert ran.code == 3 and any(problem.startswith(f"{name}: ") for problem in ran.json["problems"])


def test_verify_against_the_source_sees_what_hashes_cannot(models: Path, here: Path) -> None:
    other = tiny(here / "other", seed=1, hidden_size=128, num_hidden_layers=1)
    assert qconvert("verify", models / "quantized", "--against", models / "plain").code == 0
    ran = qconvert("verify", models / "quantized", "--against", other)
    assert ran.code == 3 and "differs from the source (relative RMS 1." in ran.err
    assert qconvert("verify", models / "fused", "--against", other).code == 3


def test_nothing_stands_for_weights_that_are_all_zero_but_zeros(models: Path, here: Path) -> None:
    zeros = np.zeros((256, 128), "f4")
    source = tiny(here / "zeros", hidden_size=128, num_hidden_layers=1, changes={Q: zeros})
    ran = qconvert("verify", models / "quantized", "--against", source)
    assert ran.code == 3 and f"Error: {Q}: differs from the source (relative RMS inf)" in ran.err
    report = qconvert("eval", "weights", source, models / "quantized")
    assert report.code == 0 and "inf" in next(line for line in report.out.splitlines() if "attn.q " in line)
    right = made("quantize", source, "--bits", 8, "-o", "right")
    assert qconvert("verify", right, "--against", source).code == 0


@pytest.mark.parametrize(
    "manifest", ["{", "[]", "{}", '{"files": 3, "tensors": {}}', '{"files": [{}], "tensors": {}}']
)
def test_verify_survives_a_manifest_that_is_none(models: Path, here: Path, manifest: str) -> None:
    copy = damaged(models / "quantized", here / "copy", "model.norm.weight", change=2)
    (copy / "qconvert.json").write_text(manifest)
    ran = qconvert("verify", copy)
    assert ran.code in (1, 3) and "qconvert.json" in ran.err and "bug in qconvert" not in ran.err


def test_verify_without_a_manifest_checks_structure_and_numbers(models: Path, here: Path) -> None:
    ran = qconvert("verify", models / "plain")
    assert ran.code == 3 and "manifest: none" in ran.out and "verified" not in ran.out
    assert (
        "sound, but nothing is recorded to compare its bytes with" in ran.err
        and "to-gguf --manifest" in ran.err
    )
    found = qconvert("verify", models / "plain", "--json").json
    assert not found["ok"] and found["verdict"] == "unrecorded" and found["problems"] == []
    assert qconvert("verify", models / "plain", "--against", models / "plain").code == 0
    tiny(here / "nan", changes={"model.norm.weight": np.full(256, np.nan, "f4")})
    ran = qconvert("verify", "nan")
    assert ran.code == 3 and ran.err.startswith("Error: model.norm.weight: NaN or Inf")


def test_diff_sees_through_fusing_and_quantizing(models: Path) -> None:
    assert qconvert("diff", models / "plain", models / "fused", "--exit-code").code == 0
    assert qconvert("diff", models / "fused", models / "plain", "--exit-code").code == 0
    assert qconvert("diff", models / "plain", models / "untied", "--json").json["summary"] == {"equal": 14}
    ran = qconvert("diff", models / "plain", models / "quantized", "--json")
    assert ran.json["summary"] == {"equal": 6, "differs": 7}
    assert all(0 < entry["max_steps"] < 4 and entry["relative_rms"] < 0.02 for entry in ran.json["tensors"])


def test_diff_can_fail_with_its_own_code(models: Path) -> None:
    pair = (models / "plain", models / "quantized")
    assert qconvert("diff", *pair).code == 0
    ran = qconvert("diff", *pair, "--exit-code")
    said = f"Error: {pair[0]} and {pair[1]}: they differ\nHint: the table above says where\n"
    assert (ran.code, ran.err) == (3, said)
    ran = qconvert("diff", *pair, "--exit-code", "--json")
    assert ran.code == 3 and ran.json["summary"]["differs"] == 7


def test_verify_takes_numbers_that_were_rounded_once_from_codes(assets: Path, here: Path) -> None:
    source = assets / "fixtures" / "quantized" / "awq-w4-asym-g128"
    out = made("dequantize", source, "--dtype", "bf16")
    assert qconvert("verify", out, "--against", source).code == 0


def test_verify_knows_groups_that_are_whole_rows(here: Path) -> None:
    tiny(here / "m", hidden_size=64, num_hidden_layers=1, intermediate_size=96, head_dim=16)
    out = made("quantize", "m", "--bits", 4, "--allow-smaller-group")
    ran = qconvert("verify", out, "--against", "m")
    assert ran.code == 0, ran.err


def test_a_folder_without_weights_is_named(models: Path, here: Path) -> None:
    (here / "bare").mkdir()
    (here / "bare/config.json").write_bytes((models / "plain/config.json").read_bytes())
    plain = models / "plain"
    for call in (("verify", "bare"), ("diff", "bare", "bare"), ("verify", plain, "--against", "bare")):
        ran = qconvert(*call)
        assert ran.code == 1 and ran.err.startswith("Error: bare: no weights beside the config.json"), call
    with pytest.raises(QConvertError, match=r"bare: no weights beside"):
        verify(open_checkpoint(here / "bare"))
