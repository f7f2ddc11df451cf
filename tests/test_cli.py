"""The command line as a user meets it: exit codes, exact words, one JSON object, nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from qconvert import __version__
from qconvert.cli import COMMANDS
from tests.commands import Ran, files_of, made, qconvert, strict_json
from tests.models import EMBED, HEAD, stored, tiny

ROOT = Path(__file__).resolve().parents[1]
Q = "model.layers.0.self_attn.q_proj.weight"
WRITING = {
    "quantize": ("plain", "--bits", "4"),
    "fuse-qkv": ("plain",),
    "fuse": ("plain", "--only", "gate_up"),
    "unfuse": ("fused",),
    "tie": ("untied",),
    "untie": ("plain",),
    "dequantize": ("quantized",),
}
DERIVED = {
    "quantize": "plain-int4-g128",
    "fuse-qkv": "plain-fused-qkv",
    "fuse": "plain-fused",
    "unfuse": "fused-unfused",
    "tie": "untied-tied",
    "untie": "plain-untied",
    "dequantize": "quantized-dequantized",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: plain and tied, fused, quantized, and one with a head equal to its embedding."""
    root = tmp_path_factory.mktemp("models")
    tiny(root / "plain", hidden_size=128, num_hidden_layers=1)
    made("fuse", root / "plain", "-o", root / "fused")
    made("quantize", root / "plain", "--bits", 8, "-o", root / "quantized")
    made("untie", root / "plain", "-o", root / "untied")
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def failed(ran: Ran, fact: str, hint: str | None = None, code: int = 1) -> None:
    """Assert that a command said exactly this on stderr, and nothing on stdout."""
    wanted = f"Error: {fact}\n" + (f"Hint: {hint}\n" if hint else "")
    assert (ran.code, ran.out, ran.err) == (code, "", wanted)


def test_a_deleted_folder_is_told(models: Path, here: Path) -> None:
    here.rmdir()
    for command in (
        ("quantize", models / "plain", "--bits", 4),
        ("to-gguf", models / "plain", "--type", "f16"),
    ):
        failed(qconvert(*command), "the current folder was deleted", "cd to a folder that exists")


def test_a_reader_who_left_does_not_make_finished_work_a_failure(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qconvert", "fuse", str(models / "plain"), "-o", str(out)]
    read, write = os.pipe()
    os.close(read)
    try:
        assert subprocess.run(command, stdout=write, check=False, cwd=ROOT).returncode == 0
    finally:
        os.close(write)
    assert (out / "config.json").is_file()


# Help and usage


def test_help_lists_the_commands_in_their_order() -> None:
    ran = qconvert("--help")
    listed = [
        line.split()[0] for line in ran.out.split("Commands:\n")[1].splitlines() if line.startswith("  ")
    ]
    assert ran.code == 0 and [name for name in listed if name in COMMANDS] == list(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "eval perplexity"])
def test_every_command_explains_itself(command: str) -> None:
    ran = qconvert(*command.split(), "--help")
    assert ran.code == 0 and ran.out.startswith(f"Usage: qconvert {command} ") and not ran.err
    assert max(map(len, ran.out.splitlines())) <= 100


def test_the_version() -> None:
    assert qconvert("--version").out == f"qconvert, version {__version__}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("quantise m", "Did you mean 'quantize'?"),
        ("quantize", "Missing argument 'MODEL'"),
        ("quantize m --bits 9", "9 is not in the range 2<=x<=8"),
        ("quantize m --bits 4 --group-size 48", "'48' is not one of '32', '64', '128', 'channel'"),
        ("quantize m --max-memory 1KB", "1KB is too little; at least 1MB"),
        ("quantize m --max-memory lots", "'lots' is not a size; write for example 500MB, 5GB or 2GiB"),
        ("quantize m --dtype fp16", "'fp16' is not one of 'bf16', 'f16', 'f32'"),
        ("fuse m -j 0", "0 is not in the range 1<=x<=256"),
        ("fuse m --no-such-flag", "No such option"),
    ],
)
def test_a_wrong_call_is_a_usage_error(args: str, says: str) -> None:
    ran = qconvert(*args.split())
    assert (ran.code, ran.out) == (2, "") and says in ran.err and ran.err.startswith("Usage: qconvert")


@pytest.mark.parametrize("args", ["quantise --json", "quantize --json", "fuse m --json -j 0"])
def test_a_wrong_call_is_one_json_object_too(args: str) -> None:
    ran = qconvert(*args.split())
    assert ran.code == 2 and ran.json["error"]["exit_code"] == 2 and ran.json["error"]["fact"]


# Writing commands


@pytest.mark.parametrize("command", WRITING)
def test_a_dry_run_prints_the_plan_and_writes_nothing(models: Path, here: Path, command: str) -> None:
    name, *flags = WRITING[command]
    ran = qconvert(command, models / name, *flags, "--dry-run")
    assert ran.code == 0 and ran.out.splitlines()[0] == f"{name}  ->  {DERIVED[command]}/"
    assert ran.err.endswith("dry run: nothing was written\n") and not list(here.iterdir())
    as_json = qconvert(command, models / name, *flags, "--dry-run", "--json").json
    assert (as_json["schema"], as_json["dry_run"], as_json["out"]) == (1, True, DERIVED[command])
    assert not list(here.iterdir())


@pytest.mark.parametrize("command", WRITING)
def test_the_derived_name_the_manifest_and_the_sidecars(models: Path, here: Path, command: str) -> None:
    name, *flags = WRITING[command]
    ran = qconvert(command, models / name, *flags)
    assert ran.code == 0, ran.err
    assert [path.name for path in here.iterdir()] == [DERIVED[command]]
    out = here / DERIVED[command]
    schema = json.loads((ROOT / "qconvert" / "manifest.schema.json").read_text())
    manifest = json.loads((out / "qconvert.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert (manifest["command"], manifest["verified"], manifest["source"]["name"]) == (command, True, name)
    assert {path for path, _ in manifest_hashes(manifest)} == set(stored(out))
    for sidecar in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / sidecar).read_bytes() == (models / name / sidecar).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["custom_key"] == {"kept": True}
    assert qconvert("verify", out, "--against", models / name).code == 0


def manifest_hashes(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [item for entry in manifest["tensors"].values() for item in entry["parts"].items()]


def test_the_hashes_are_those_of_the_stored_bytes(models: Path) -> None:
    import hashlib

    out = models / "quantized"
    manifest = json.loads((out / "qconvert.json").read_text())
    arrays = stored(out)
    for name, digest in manifest_hashes(manifest):
        assert hashlib.sha256(arrays[name][2]).hexdigest() == digest
    for file in manifest["files"]:
        assert hashlib.sha256((out / file["name"]).read_bytes()).hexdigest() == file["sha256"]


@pytest.mark.parametrize("hashed", [True, False])
def test_source_hashes_are_of_headers_and_of_files_when_asked(models: Path, here: Path, hashed: bool) -> None:
    import hashlib

    out = made("fuse", models / "plain", *(["--hash-sources"] if hashed else []))
    (source,) = json.loads((out / "qconvert.json").read_text())["source"]["files"]
    whole = (models / "plain" / "model.safetensors").read_bytes()
    header = whole[: 8 + int.from_bytes(whole[:8], "little")]
    assert source["header_sha256"] in (
        hashlib.sha256(header).hexdigest(),
        hashlib.sha256(header[8:]).hexdigest(),
    )
    assert source["sha256"] == (hashlib.sha256(whole).hexdigest() if hashed else None)


def test_the_recorded_recipe_makes_the_same_file_again(models: Path, here: Path) -> None:
    wish = (
        "--bits",
        4,
        "--asym",
        "--rule",
        "mlp.down=int8-channel",
        "--keep",
        "attn.o",
        "--fuse",
        "qkv",
        "--min-max",
    )
    first = made("quantize", models / "plain", *wish, "-o", "first")
    recipe = json.loads((first / "qconvert.json").read_text())["recipe"]
    (here / "recipe.yaml").write_text(json.dumps(recipe))
    again = made("quantize", models / "plain", "--recipe", "recipe.yaml", "-o", "again")
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "config.json").read_bytes() == (again / "config.json").read_bytes()


def test_the_plan_and_the_result_print_one_table(models: Path, here: Path) -> None:
    wish = ("quantize", models / "plain", "--bits", 4, "-o", "out")
    assert qconvert(*wish, "--dry-run").out == qconvert(*wish).out
    planned = qconvert(*wish, "--dry-run", "--json").json
    ran = qconvert(*wish, "--json", "--overwrite")
    assert {**ran.json, **{key: planned[key] for key in ("dry_run", "out")}}.items() >= planned.items()
    assert ran.err == "" and ran.json["verified"] is True


def test_quiet_prints_the_path_alone(models: Path, here: Path) -> None:
    ran = qconvert("fuse", models / "plain", "-q", "-o", "sub/folder")
    assert (ran.code, ran.out) == (0, "sub/folder\n") and (here / "sub" / "folder").is_dir()


@pytest.mark.parametrize(
    ("wish", "verdict"),
    [
        (("fuse", "plain"), "exact, verified"),
        (("fuse", "plain", "--dtype", "f16"), ", 10 cast, verified"),
        (("dequantize", "quantized"), ", 7 dequantized + 6 exact, verified"),
        (("fuse", "quantized"), "exact, verified"),
    ],
)
def test_the_last_line_tells_what_was_lost(
    models: Path, here: Path, wish: tuple[str, ...], verdict: str
) -> None:
    ran = qconvert(wish[0], models / wish[1], *wish[2:], "-o", "out")
    assert ran.err.splitlines()[-1].endswith(verdict)


def test_without_verifying_it_says_so(models: Path, here: Path) -> None:
    ran = qconvert("untie", models / "plain", "--no-verify", "-o", "out")
    assert ran.err.rstrip().endswith("not verified")
    manifest = json.loads((here / "out" / "qconvert.json").read_text())
    assert manifest["verified"] is False and {digest for _, digest in manifest_hashes(manifest)} == {None}
    assert qconvert("verify", "out").code == 0


def test_an_existing_output_is_kept_unless_told(models: Path, here: Path) -> None:
    out = made("fuse", models / "plain", "-o", "out")
    before = files_of(out)
    for model in (models / "plain", "some/model-on-the-hub"):
        ran = qconvert("fuse", model, "-o", "out")
        failed(ran, "out: is there already", "use --overwrite, or choose another output")
    assert files_of(out) == before
    assert qconvert("fuse-qkv", models / "plain", "-o", "out", "--overwrite").code == 0
    assert files_of(out) != before and [path.name for path in here.iterdir()] == ["out"]


def test_what_qconvert_did_not_write_is_never_overwritten(models: Path, here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("years")
    ran = qconvert("fuse", models / "plain", "-o", "mine", "--overwrite")
    assert ran.code == 1 and "not written by qconvert" in ran.err
    assert files_of(here / "mine") == {"thesis.txt": b"years"}


@pytest.mark.parametrize("out", ["plain", "../models/plain", ".", "./plain/"])
def test_the_source_is_never_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    tiny(tmp_path / "models" / "plain", hidden_size=128, num_hidden_layers=1)
    monkeypatch.chdir(tmp_path / "models")
    before = files_of(tmp_path / "models" / "plain")
    ran = qconvert("fuse", "plain", "-o", out, "--overwrite")
    assert ran.code == 1 and "is or holds the source" in ran.err
    assert files_of(tmp_path / "models" / "plain") == before


def test_a_full_disk_is_seen_before_the_work(
    models: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    ran = qconvert("fuse", models / "plain", "-o", "out")
    assert ran.code == 1 and "1,000 bytes free" in ran.err and not list(here.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_told(models: Path, here: Path) -> None:
    here.chmod(stat.S_IRUSR | stat.S_IXUSR)
    ran = qconvert("fuse", models / "plain", "-o", "out")
    here.chmod(stat.S_IRWXU)
    assert ran.code == 1 and "cannot be created" in ran.err


# Kinds of input


def test_a_missing_model(here: Path) -> None:
    ran = qconvert("quantize", "./nowhere", "--bits", 4)
    assert ran.code == 1 and ran.err.startswith("Error: ./nowhere: ") and "Hint: " in ran.err


def test_a_config_alone_can_be_inspected_but_not_converted(models: Path, here: Path) -> None:
    (here / "bare").mkdir()
    (here / "bare" / "config.json").write_bytes((models / "plain" / "config.json").read_bytes())
    by_config, by_headers = (qconvert("inspect", m, "--json").json for m in ("bare", models / "plain"))
    assert by_config["parameters"] == by_headers["parameters"]
    assert (by_config["from"], by_headers["from"]) == ("config.json", "headers")
    failed(
        qconvert("fuse", "bare"),
        "bare: no weights beside the config.json",
        "give the whole model folder",
    )


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8", "not-known"])
def test_a_config_alone_may_claim_any_quantization(models: Path, here: Path, method: str) -> None:
    config = json.loads((models / "plain" / "config.json").read_text())
    plain = qconvert("inspect", models / "plain", "--json").json
    claiming = config | {"quantization_config": {"quant_method": method}}
    (here / "claims.json").write_text(json.dumps(claiming))
    found = qconvert("inspect", "claims.json", "--json").json
    assert (found["parameters"], found["from"]) == (plain["parameters"], "config.json")
    assert found["quantization"] == f"{method} (config.json says so)"
    (here / "claims").mkdir()
    (here / "claims" / "config.json").write_text(json.dumps(claiming))
    failed(
        qconvert("dequantize", "claims"),
        "claims: no weights beside the config.json",
        "give the whole model folder",
    )


def test_a_lora_folder_and_pickles_are_told_apart(here: Path) -> None:
    marker = here / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    (here / "lora").mkdir()
    (here / "lora" / "adapter_config.json").write_text("{}")
    ran = qconvert("quantize", "lora", "--bits", 4)
    assert ran.code == 1 and "LoRA adapter" in ran.err and "merge_and_unload" in ran.err
    tiny(here / "bin", hidden_size=128, num_hidden_layers=1)
    (here / "bin" / "model.safetensors").unlink()
    (here / "bin" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    ran = qconvert("quantize", "bin", "--bits", 4)
    assert ran.code == 1 and "pytorch_model.bin" in ran.err and "safe_serialization=True" in ran.err
    assert not marker.exists()


def test_quantizing_twice_is_refused(models: Path, here: Path) -> None:
    ran = qconvert("quantize", models / "quantized", "--bits", 4)
    assert ran.code == 1 and "already quantized (int8-channel)" in ran.err and "dequantize" in ran.err


def test_nothing_to_do_is_an_error(models: Path, here: Path) -> None:
    for command, name, fact in (
        ("fuse", "fused", "nothing left to fuse"),
        ("unfuse", "plain", "no fused linears"),
        ("tie", "plain", "already tied"),
        ("untie", "untied", "already a table of its own"),
        ("dequantize", "plain", "no quantized tensors"),
    ):
        ran = qconvert(command, models / name)
        assert ran.code == 1 and fact in ran.err and not list(here.iterdir())


def test_tying_tells_how_far_the_head_is_from_the_embedding(here: Path) -> None:
    tiny(here / "m", tied=False, hidden_size=128, num_hidden_layers=1)
    ran = qconvert("tie", "m")
    assert ran.code == 1 and ran.err.startswith(f"Error: {HEAD}: differs from {EMBED} in ")
    assert "largest difference 0." in ran.err


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_name_the_tensor_and_the_place(here: Path, bad: float) -> None:
    weight = np.full((256, 128), 0.01, "f4")
    weight[3, 5] = bad
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes={Q: weight})
    fact = f"{Q}: NaN or Inf at row 3, column 5 (flat index 389)"
    hint = "the checkpoint is damaged; --allow-nonfinite converts it all the same"
    for command in (("quantize", "m", "--bits", 4), ("fuse", "m")):
        ran = qconvert(*command, "-q")
        assert (ran.code, ran.out) == (1, "") and ran.err.endswith(f"Error: {fact}\nHint: {hint}\n")
        assert [path.name for path in here.iterdir()] == ["m"]


def test_numbers_that_are_none_stay_json_when_allowed(here: Path) -> None:
    weight = np.full((256, 128), 0.01, "f4")
    weight[3, 5], weight[9, 9] = np.nan, np.inf
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes={Q: weight})
    out = made("quantize", "m", "--bits", 4, "--allow-nonfinite")
    schema = json.loads((ROOT / "qconvert" / "manifest.schema.json").read_text())
    jsonschema.validate(strict_json((out / "qconvert.json").read_text()), schema)
    ran = qconvert("diff", "m", out, "--json")
    assert [t["relative_rms"] for t in ran.json["tensors"] if t["name"] == Q] == [None]
    fused = made("fuse", "m", "--allow-nonfinite")
    ran = qconvert("verify", fused)
    assert ran.code == 3 and "qkv_proj.weight: NaN or Inf" in ran.err


def test_a_row_that_the_group_does_not_divide(here: Path) -> None:
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, intermediate_size=96)
    failed(
        qconvert("quantize", "m", "--bits", 4),
        "model.layers.0.mlp.down_proj.weight: its rows of 96 columns are not divisible by group size 128",
        "use --group-size 32, or --allow-smaller-group, or keep it: --keep mlp.down"
        " (sizes that divide: 32, channel)",
    )
    out = made("quantize", "m", "--bits", 4, "--allow-smaller-group")
    assert "int4-g32" in qconvert("inspect", out).out


def test_an_empty_wish_is_refused(models: Path) -> None:
    failed(
        qconvert("quantize", models / "plain"),
        "quantize: no scheme was asked for",
        "add --bits 4, --scheme int8-g128 or --recipe FILE",
    )
    ran = qconvert("quantize", models / "plain", "--bits", 4, "--scheme", "int8")
    assert ran.code == 1 and ran.err.startswith("Error: --scheme: given together with --bits")


def test_warnings_come_before_the_work_and_travel_in_card_and_manifest(models: Path, here: Path) -> None:
    ran = qconvert(
        "quantize", models / "plain", "--bits", 4, "--rule", "embed=int8", "--fuse", "qkv", "-o", "out"
    )
    assert ran.code == 0
    card, manifest = (
        (here / "out" / "README.md").read_text(),
        json.loads((here / "out" / "qconvert.json").read_text()),
    )
    for text in ("no fused qkv/gate_up linears", "the embedding is quantized"):
        assert text in ran.err and text in card and any(text in w for w in manifest["warnings"])
    assert "| SGLang 0.5 | no |" in card and "SGLang 0.5" in ran.err
    verified = qconvert("verify", "out")
    assert verified.code == 0 and "no fused qkv/gate_up linears" in verified.err


def test_the_card_keeps_what_upstream_says(models: Path, here: Path) -> None:
    tiny(here / "m", hidden_size=128, num_hidden_layers=1)
    upstream = "---\nlicense: apache-2.0\nlanguage: [en, de]\nmodel-index: secret\n---\n# Theirs\n"
    (here / "m" / "README.md").write_text(upstream)
    card = (made("quantize", "m", "--bits", 4) / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlanguage:\n- en\n- de\n")
    assert "model-index" not in card and "# Theirs" not in card and "scheme: int4-g128" in card


# Errors as JSON


@pytest.mark.parametrize("command", ["inspect", "quantize --bits 4", "fuse", "verify", "diff {0}"])
def test_an_error_is_one_json_object(here: Path, command: str) -> None:
    name, *flags = command.format("./nowhere").split()
    ran = qconvert(name, "./nowhere", *flags, "--json")
    assert ran.code == 1 and ran.err == ""
    error = ran.json["error"]
    assert ran.json["schema"] == 1 and error["exit_code"] == 1 and "nowhere" in error["fact"]


def test_warnings_do_not_disturb_json(models: Path, here: Path) -> None:
    ran = qconvert("fuse", models / "plain", "--json", "-o", "out")
    assert ran.code == 0 and ran.err == "" and ran.json["warnings"]


# verify and diff


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
    assert ran.code == 0 and "manifest: none" in ran.out and ran.out.endswith("verified\n")
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
    assert ran.code == 3 and ran.err == f"Error: {pair[0]} and {pair[1]}: not the same numbers\n"
    ran = qconvert("diff", *pair, "--exit-code", "--json")
    assert ran.code == 3 and ran.json["summary"]["differs"] == 7


# inspect and env


def test_inspect_names_ties_fusions_and_quantization(models: Path) -> None:
    found = qconvert("inspect", models / "fused", "--json").json
    assert (found["tied"], found["fusions"], found["quantization"]) == (
        True,
        ["attn.qkv", "mlp.gate_up"],
        None,
    )
    assert "head tied to the embedding" in qconvert("inspect", models / "plain").out
    assert (
        "quantization: compressed-tensors (int8-channel, int8-g128)"
        in qconvert("inspect", models / "quantized").out
    )
    listed = qconvert("inspect", models / "quantized", "--tensors", "--json").json["tensor_list"]
    assert {"name": Q, "role": "attn.q", "shape": [256, 128], "form": "int8-channel"} in listed


def test_env_prints_every_package() -> None:
    found = qconvert("env", "--json").json
    assert found["qconvert"] == __version__ and found["torch"] != "not installed"
    assert len(qconvert("env").out.splitlines()) == len(found) - 1


# Bugs


def test_a_bug_is_called_a_bug_in_one_line(models: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("qconvert.convert.convert", broken)
    failed(
        qconvert("untie", models / "plain", "-q"),
        "unexpected ZeroDivisionError: division by zero",
        "this is a bug in qconvert; set QCONVERT_DEBUG=1 for the traceback",
    )
    monkeypatch.setenv("QCONVERT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        qconvert("untie", models / "plain", "-q")
