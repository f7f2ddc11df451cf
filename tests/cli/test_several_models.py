"""Several models in one call, and outputs that are there already."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qconvert.formats.io.read_back import file_sha256
from tests.support.commands import failed, files_of, made, qconvert

BITS = ("--bits", 4)


def test_the_outputs_of_several_models_are_those_of_single_calls(models: Path, here: Path) -> None:
    names = ("plain", "untied")
    single = {name: made("quantize", models / name, *BITS, "-o", here / "single" / name) for name in names}
    ran = qconvert("quantize", *(models / name for name in names), *BITS, "-o", "folder", "-q")
    outputs = [Path(line) for line in ran.out.splitlines()]
    assert ran.code == 0 and outputs == [Path("folder") / f"{name}-int4-g128" for name in names]
    for name, out in zip(names, outputs, strict=True):
        weights = "model.safetensors"
        assert files_of(out)[weights] == files_of(single[name])[weights]
    assert qconvert("verify", *outputs, "-q").code == 0


def test_without_a_folder_they_lie_in_the_current_one(models: Path, here: Path) -> None:
    ran = qconvert("to-gguf", models / "plain", models / "untied", "--type", "q8_0", "--json")
    assert [Path(each["out"]).parent for each in ran.json["outputs"]] == [Path(), Path()]
    assert sorted(path.suffix for path in here.iterdir()) == [".gguf", ".gguf"]
    ran = qconvert("from-gguf", *here.iterdir(), "-o", "back", "-q")
    assert ran.code == 0 and len(list((here / "back").iterdir())) == 2


def test_two_outputs_of_one_name_are_an_error_before_the_first(models: Path, here: Path) -> None:
    ran = qconvert("fuse", models / "plain", f"{models / 'plain'}/", "--overwrite", "-q")
    assert ran.code == 1 and "two of the models have outputs of this name" in ran.err
    assert list(here.iterdir()) == []


def test_a_file_is_no_place_for_several(models: Path, here: Path) -> None:
    ran = qconvert("to-gguf", models / "plain", models / "untied", "--type", "f16", "-o", "m.gguf")
    failed(ran, "m.gguf: one file, and there are several models", "name a folder with -o", code=2)


def test_all_are_checked_before_the_first_is_written(models: Path, here: Path) -> None:
    """A model that cannot be quantized, one that is not there, an output that exists: all of the last one."""
    bad = models / "quantized"
    ran = qconvert("quantize", models / "plain", bad, *BITS, "--json")
    error = ran.json["error"]
    assert ran.code == 1 and "outputs" not in ran.json and error["model"] == str(bad)
    assert f"{bad}: " in error["fact"] and list(here.iterdir()) == []
    assert qconvert("quantize", models / "plain", "nowhere", *BITS).code == 1 and list(here.iterdir()) == []
    made("quantize", models / "untied", *BITS)
    ran = qconvert("quantize", models / "plain", models / "untied", *BITS)
    assert ran.code == 1 and "already exists" in ran.err and len(list(here.iterdir())) == 1


def damaged_weights(models: Path, folder: Path) -> Path:
    """A model whose header is sound, and whose numbers are not: found only while it is converted."""
    folder.mkdir()
    for name, data in files_of(models / "plain").items():
        (folder / name).write_bytes(data)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-256, 2)
        file.write(b"\xff" * 256)  # NaN
    return folder


def test_a_failure_while_writing_ends_it_and_tells_what_was_done(models: Path, here: Path) -> None:
    bad = damaged_weights(models, here / "bad")
    call = ("quantize", models / "plain", bad, models / "untied", *BITS)
    ran = qconvert(*call, "--json")
    assert ran.code == 1 and ran.json["error"]["model"] == str(bad)
    assert [each["out"] for each in ran.json["outputs"]] == ["plain-int4-g128"]
    assert not (here / "untied-int4-g128").exists()
    ran = qconvert(*call, "--skip-existing", "-q")
    assert ran.code == 1 and ran.out == "plain-int4-g128\n" and f"Error: {bad}: " in ran.err


def test_keep_going_writes_all_that_can_be_written(models: Path, here: Path) -> None:
    bad = damaged_weights(models, here / "bad")
    call = ("quantize", "nowhere", models / "plain", bad, models / "untied", *BITS, "--keep-going")
    ran = qconvert(*call, "--json")
    assert ran.code == 1 and not ran.json["ok"]
    assert [each["model"] for each in ran.json["errors"]] == ["nowhere", str(bad)]
    assert ran.json["error"] == ran.json["errors"][0]
    assert [each["out"] for each in ran.json["outputs"]] == ["plain-int4-g128", "untied-int4-g128"]
    ran = qconvert(*call, "--skip-existing", "-q")
    assert ran.code == 1 and ran.err.count("Error: ") == 2 and len(ran.out.splitlines()) == 2
    assert qconvert("quantize", models / "plain", models / "untied", "--bits", 9, "--keep-going").code == 2


@pytest.mark.parametrize("call", ["inspect", "check --for vllm", "verify"])
def test_keep_going_reads_all_that_can_be_read(call: str, models: Path) -> None:
    words = (*call.split(), "nowhere", models / "quantized", "absent", "--keep-going")
    ran = qconvert(*words, "--json")
    assert ran.code == 1 and not ran.json["ok"] and ran.json["error"] == ran.json["errors"][0]
    assert [each["model"] for each in ran.json["errors"]] == ["nowhere", "absent"]
    assert [each["model"] for each in ran.json["models"]] == [str(models / "quantized")]
    ran = qconvert(*words)
    assert ran.code == 1 and ran.err.count("Error: ") == 2 and str(models / "quantized") in ran.out
    ran = qconvert(*call.split(), "nowhere", "--keep-going", "--json")
    assert ran.code == 1 and "nowhere" in ran.json["error"]["fact"]


def test_what_fails_a_check_is_said_beside_what_cannot_be_checked(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "quantized", tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    ran = qconvert("verify", "nowhere", tmp_path / "m", "--keep-going")
    assert ran.code == 1 and "model.safetensors" in ran.err and ran.err.count("Error: ") == 2
    assert qconvert("verify", tmp_path / "m", models / "quantized", "--keep-going").code == 3


@pytest.mark.parametrize(
    ("call", "out"),
    [
        ("quantize {m} --bits 4", "plain-int4-g128"),
        ("convert {m} --to mlx --scheme int4-g64", "plain-int4-g64-mlx"),
        ("to-gguf {m} --type q8_0 --split-max-size 100KB -o m.gguf", "m-00001-of-00005.gguf"),
        ("fuse {m} -o f", "f"),
    ],
)
def test_an_output_that_is_complete_is_skipped(call: str, out: str, models: Path, here: Path) -> None:
    words = call.format(m=models / "plain").split()
    assert qconvert(*words).code == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in here.rglob("*")}
    ran = qconvert(*words, "--skip-existing")
    assert (ran.code, ran.out, ran.err) == (0, "", f"{out}: already complete, skipped\n")
    assert qconvert(*words, "--skip-existing", "-q").out == f"{out}\n"
    told = qconvert(*words, "--skip-existing", "--json").json
    hashes, listed = told.pop("sha256"), told.pop("files")
    weights = [path for path in here.rglob("*") if path.suffix in (".safetensors", ".gguf")]
    assert {file["name"]: file["bytes"] for file in listed} == {
        path.name: path.stat().st_size for path in weights
    }
    written = qconvert(*words, "--overwrite", "--json").json
    assert written["files"] == listed and {file["name"] for file in listed} <= set(written["sha256"])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in here.rglob("*")}
    assert qconvert(*words, "--skip-existing", "--json").json["files"] == listed
    assert told == {"schema": 1, "ok": True, "dry_run": False, "skipped": True, "out": out}
    recorded = (
        {"model.safetensors": file_sha256(here / out / "model.safetensors")} if "gguf" not in out else {}
    )
    assert hashes == recorded
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in here.rglob("*")} == before
    assert qconvert(*words).code == 1


def test_what_is_not_there_is_written(models: Path, here: Path) -> None:
    ran = qconvert("quantize", models / "plain", *BITS, "--skip-existing", "-o", "o", "-q")
    assert (ran.code, ran.out) == (0, "o\n") and qconvert("verify", "o", "-q").code == 0


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("quantize {plain} --bits 8", "model.safetensors has "),
        ("quantize {plain} --bits 4 --min-max", "qconvert.json names another recipe"),
        ("fuse {plain}", "model.safetensors has "),
    ],
)
def test_another_output_of_that_name_is_an_error(second: str, why: str, models: Path, here: Path) -> None:
    other = here / "other"
    other.mkdir()
    for name, data in files_of(models / "plain").items():
        (other / name).write_bytes(data)
    made("quantize", models / "plain", *BITS, "-o", "o")
    words = second.format(plain=models / "plain", other=other).split()
    ran = qconvert(*words, "-o", "o", "--skip-existing")
    assert ran.code == 1 and f"o: already exists, and is not what this command writes ({why}" in ran.err


@pytest.mark.parametrize(
    "call",
    ["quantize {m} --bits 4 -o o", "to-gguf {m} --type q8_0 --manifest -o o.gguf", "fuse {m} -o o"],
)
def test_the_source_is_told_by_its_weights(call: str, models: Path, here: Path) -> None:
    """A fine-tune has the name, the shapes and the headers of yesterday's; a copy has other times."""
    source, copy = here / "m", here / "elsewhere" / "m"
    for folder in (source, copy):
        folder.mkdir(parents=True)
        for name, data in files_of(models / "plain").items():
            (folder / name).write_bytes(data)
    made(*call.format(m=source).split())
    skipped = qconvert(*call.format(m=copy).split(), "--skip-existing")
    assert skipped.code == 0 and "already complete, skipped" in skipped.err
    weights = source / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-300] ^= 1
    weights.write_bytes(raw)
    words = (*call.format(m=source).split(), "--skip-existing")
    ran = qconvert(*words)
    assert ran.code == 1 and "(it was made from other weights)" in ran.err
    ran = qconvert(*words, "--overwrite")
    assert ran.code == 0 and "verified" in ran.err
    assert "already complete, skipped" in qconvert(*words).err


def test_without_a_record_no_file_of_the_source_may_be_newer(models: Path, here: Path) -> None:
    source = here / "m"
    source.mkdir()
    for name, data in files_of(models / "plain").items():
        (source / name).write_bytes(data)
    call = ("to-gguf", source, "--type", "q8_0", "-o", "o.gguf")
    written = made(*call).stat().st_mtime_ns
    os.utime(source / "model.safetensors", ns=(written, written + 1))
    ran = qconvert(*call, "--skip-existing")
    assert ran.code == 1 and "(the source's model.safetensors is newer)" in ran.err
    assert qconvert(*call, "--skip-existing", "--overwrite").code == 0


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "header"])
def test_an_incomplete_output_is_an_error(damage: str, models: Path, here: Path) -> None:
    out = made("quantize", models / "plain", *BITS, "-o", "o")
    weights = out / "model.safetensors"
    data = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(data[:-1])
    elif damage == "gone":
        weights.unlink()
    elif damage == "manifest":
        (out / "qconvert.json").unlink()
    else:
        weights.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    ran = qconvert("quantize", models / "plain", *BITS, "-o", "o", "--skip-existing")
    assert ran.code == 1 and "is not what this command writes" in ran.err


def test_with_overwriting_what_is_incomplete_is_written_anew(models: Path, here: Path) -> None:
    call = ("to-gguf", models / "plain", "--type", "q8_0", "-o", "m.gguf", "--skip-existing")
    whole = made(*call).read_bytes()
    written = Path("m.gguf").stat().st_mtime_ns
    assert "already complete, skipped" in qconvert(*call, "--overwrite").err
    assert Path("m.gguf").stat().st_mtime_ns == written
    Path("m.gguf").write_bytes(whole[:-1])
    ran = qconvert(*call)
    assert ran.code == 1 and "Hint: add --overwrite: " in ran.err
    assert qconvert(*call, "--overwrite").code == 0 and Path("m.gguf").read_bytes() == whole


def test_skipping_does_not_go_with_a_target(models: Path, here: Path) -> None:
    assert qconvert("quantize", models / "plain", "--skip-existing", "--target-size", "5bpw").code == 2


@pytest.mark.parametrize(
    "call", ["quantize {m} --bits 4 -o o", "to-gguf {m} --type q8_0 --manifest -o o.gguf"]
)
def test_a_flipped_bit_is_found_by_the_recorded_hash(call: str, models: Path, here: Path) -> None:
    words = call.format(m=models / "plain").split()
    out = made(*words)
    weights = out if out.is_file() else out / "model.safetensors"
    whole = weights.read_bytes()
    assert "already complete, skipped" in qconvert(*words, "--verify-existing").err
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert qconvert(*words, "--skip-existing").code == 0, "which looks at sizes, headers and recipe"
    ran = qconvert(*words, "--verify-existing")
    assert ran.code == 1 and f"{weights.name} is not what was recorded of it" in ran.err
    assert qconvert("verify", out).code == 3
    assert qconvert(*words, "--verify-existing", "--overwrite").code == 0 and weights.read_bytes() == whole
    assert qconvert("verify", out).code == 0


def test_what_has_no_recorded_hash_is_not_known_to_be_intact(models: Path, here: Path) -> None:
    call = ("to-gguf", models / "plain", "--type", "q8_0", "-o", "m.gguf")
    made(*call)
    ran = qconvert(*call, "--verify-existing")
    assert ran.code == 1 and "no SHA-256 of m.gguf is recorded to compare it with" in ran.err


def test_several_models_are_checked_and_verified(models: Path, here: Path) -> None:
    plain, quantized = models / "plain", models / "quantized"
    ran = qconvert("check", plain, quantized, "--for", "mlx")
    assert ran.code == 3 and ran.out.startswith(f"{plain}:\n") and f"Error: {quantized}: " in ran.err
    ran = qconvert("check", plain, quantized, "--for", "mlx", "--json")
    assert ran.code == 3 and [each["ok"] for each in ran.json["models"]] == [True, False]
    ran = qconvert("verify", plain, quantized, "--against", plain)
    assert ran.code == 0 and ran.out.count("verified\n") == 2
    ran = qconvert("verify", quantized, "nowhere")
    assert ran.code == 1 and "nowhere" in ran.err
    for words in (("verify",), ("check", "--for", "mlx"), ("inspect",)):
        ran = qconvert(*words, plain, "nowhere", "--json")
        assert ran.code == 1 and ran.json["error"]["model"] == "nowhere"
        assert [each["model"] for each in ran.json["models"]] == [str(plain)], "which was found before"


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("compressed-tensors --scheme fp8-channel", "plain-fp8-channel"),
        ("compressed-tensors --scheme fp8", "plain-fp8-channel"),
        ("compressed-tensors --scheme nvfp4", "plain-nvfp4"),
        ("compressed-tensors --scheme int4", "plain-int4-g128"),
        ("mlx --scheme mxfp4", "plain-mxfp4-mlx"),
        ("bitsandbytes --scheme nf4", "plain-nf4-bitsandbytes"),
        ("gptq --scheme int8-g32", "plain-int8-g32-gptq"),
        ("f16", "plain-f16"),
    ],
)
def test_every_scheme_has_a_derived_name_of_its_own(how: str, name: str, models: Path, here: Path) -> None:
    ran = qconvert("convert", models / "plain", "--to", *how.split(), "--dry-run", "--json")
    assert ran.json.get("out") == name, ran.out


def test_names_that_say_nothing_are_those_of_what_holds_them(models: Path, here: Path) -> None:
    snapshot = here / "models--acme--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name, data in files_of(models / "plain").items():
        (snapshot / name).write_bytes(data)
    for source, name in ((models / "plain" / "model.safetensors", "plain"), (snapshot, "tiny")):
        assert qconvert("fuse", source, "--dry-run", "--json").json["out"] == f"{name}-fused"


def test_what_is_no_checkpoint_is_said_of_the_file_that_was_named(models: Path, here: Path) -> None:
    failed(
        qconvert("inspect", models / "plain" / "tokenizer.json"),
        "tokenizer.json: not the config of a model, which has a model_type",
        "name config.json, or its folder",
    )
    (here / "empty").mkdir()
    ran = qconvert("inspect", "empty")
    assert ran.code == 1 and "give a folder that has both, or the name of a model on the Hub" in ran.err


def test_types_that_stand_in_for_others_are_named(models: Path, here: Path) -> None:
    """Rows of 128 columns do not divide into blocks of Q4_K: llama-quantize warns of that, too."""
    call = ("to-gguf", models / "plain", "--type", "q4_k_m", "--dry-run")
    found = qconvert(*call, "--json").json
    # mlp.down has rows of 384, the others of 128; attn.o has 256
    assert len(found["substituted"]) == 6 and "blk.0.attn_output.weight" not in found["substituted"]
    assert "Warning: 6 tensors have rows that q4_k's blocks do not divide" in qconvert(*call).err
    assert qconvert(*call, "--no-fallback").code == 1


def test_what_is_asked_for_beside_a_skipped_gguf_is_there_afterwards(models: Path, here: Path) -> None:
    """As after a kill between a file and its Modelfile, or with an option that is new."""
    call = (
        "to-gguf",
        models / "plain",
        "--type",
        "q8_0",
        "-o",
        "o.gguf",
        "--modelfile",
        "--card",
        "--manifest",
    )
    made(*call)
    beside = {name: (here / name).read_text() for name in ("o.Modelfile", "o.md")}
    (here / "o.md").write_text("mine")
    (here / "o.Modelfile").unlink()
    written = (here / "o.gguf").stat().st_mtime_ns
    assert "already complete, skipped" in qconvert(*call, "--skip-existing").err
    assert (here / "o.Modelfile").read_text() == beside["o.Modelfile"]
    assert (here / "o.md").read_text() == "mine" and (here / "o.gguf").stat().st_mtime_ns == written
    (here / "o.qconvert.json").unlink()
    ran = qconvert(*call, "--skip-existing")
    assert ran.code == 1 and "(o.qconvert.json is missing or damaged)" in ran.err
    assert qconvert(*call, "--skip-existing", "--overwrite").code == 0
    assert (here / "o.qconvert.json").exists() and (here / "o.md").read_text() == beside["o.md"]
