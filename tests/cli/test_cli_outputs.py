"""What the writing commands leave behind: names, manifests, hashes, cards, and nothing on failure."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qconvert.errors import TAKEN
from tests.support.commands import failed, files_of, made, qconvert
from tests.support.models import stored, tiny

ROOT = Path(__file__).resolve().parents[2]
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
    ran = qconvert("verify", "out")
    assert ran.code == 3 and "manifest: 0 files and 0 arrays with hashes, of 1 file and 14 arrays" in ran.out
    assert ran.err.startswith("Error: out: structure and numbers are sound, but nothing is recorded")
    assert "--against SOURCE" in ran.err and "verified\n" not in ran.out
    assert qconvert("verify", "out", "--against", models / "plain").code == 0


@pytest.mark.parametrize("command", ["fuse embedded", "to-gguf embedded --type f16"])
def test_quietly_only_the_path_is_printed(command: str, here: Path) -> None:
    words = command.split()
    dry = qconvert(*words, "-q", "--dry-run")
    assert dry.code == 0 and len(dry.out.splitlines()) == 1 and not Path(dry.out.strip()).exists()
    done = qconvert(*words, "-q")
    assert (done.code, done.out) == (0, dry.out) and Path(dry.out.strip()).exists()


def test_the_embedded_model_has_a_name_for_every_command(here: Path) -> None:
    assert qconvert("verify", "embedded", "-q").out == ""
    assert qconvert("verify", "embedded", "--against", "embedded").code == 0
    assert qconvert("diff", "embedded", "embedded", "--exit-code").out.splitlines() == ["46 equal"]
    assert qconvert("check", "embedded", "--for", "vllm", "-q").code == 0
    assert qconvert("inspect", "embedded", "-q").out.startswith("embedded: Qwen3")


def test_an_existing_output_is_kept_unless_told(models: Path, here: Path) -> None:
    out = made("fuse", models / "plain", "-o", "out")
    before = files_of(out)
    for model in (models / "plain", "some/model-on-the-hub"):
        ran = qconvert("fuse", model, "-o", "out")
        failed(ran, "out: already exists", TAKEN)
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
