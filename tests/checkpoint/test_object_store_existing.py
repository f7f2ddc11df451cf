"""Outputs that are in a bucket already: skipped where they are whole, read where asked for, or made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_object_store import (  # noqa: F401
    HOW,
    bucket,
    folder,
    objects,
    obstore,
    recorded,
    server,
)
from tests.support.commands import failed, qconvert
from tests.support.fake_hub import sha256

REDO = "add --overwrite: it then writes again what is not complete, and leaves the rest"
OUT = "s3://bucket/made/out"
COMMAND = ("quantize", "m", *HOW, "-o", OUT)
GGUF = ("to-gguf", "m", "--type", "q8_0", "--split-max-size", "300KB", "-o", "s3://bucket/gguf/m.gguf")
OPTIONS = pytest.mark.parametrize("option", ["--skip-existing", "--verify-existing"])


def other(why: str, out: str = OUT) -> str:
    return f"{out}: already exists, and is not what this command writes ({why})"


@OPTIONS
def test_what_is_there_is_skipped(
    bucket: Any,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    assert qconvert(*COMMAND, option).code == 0
    before = objects(bucket, "made/out")
    puts = recorded(monkeypatch, obstore.put)
    for more in ((), ("--overwrite",)):
        ran = qconvert(*COMMAND, option, *more, "--events", "e.jsonl")
        assert (ran.code, ran.out, ran.err) == (0, "", f"{OUT}: already complete, skipped\n")
    lines = [json.loads(line) for line in (here / "e.jsonl").read_text().splitlines()]
    assert [(line["event"], line["path"]) for line in lines] == [("skipped", OUT)] * 2
    told = qconvert(*COMMAND, option, "--json").json
    manifest = json.loads(before["qconvert.json"])
    assert told["skipped"] and told["out"] == OUT
    assert told["sha256"] == {file["name"]: file["sha256"] for file in manifest["files"]}
    assert qconvert(*COMMAND, option, "-q").out == f"{OUT}\n"
    assert not puts and objects(bucket, "made/out") == before and not list(here.glob("out*"))


def test_bytes_are_read_where_that_is_asked_for(bucket: Any, here: Path) -> None:  # noqa: F811
    assert qconvert(*COMMAND).code == 0
    before = objects(bucket, "made/out")
    name = min(name for name in before if name.endswith(".safetensors"))
    obstore.put(bucket, f"made/out/{name}", before[name][:-1] + bytes([before[name][-1] ^ 1]))
    assert qconvert(*COMMAND, "--skip-existing").code == 0, "sizes, headers and recipe alone"
    why = other(f"{name} is not what was recorded of it")
    failed(qconvert(*COMMAND, "--verify-existing"), why, REDO)
    assert qconvert(*COMMAND, "--verify-existing", "--overwrite").code == 0
    assert objects(bucket, "made/out") == before


def test_large_files_are_read_in_windows(
    bucket: Any,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qconvert.convert import bucket_files

    monkeypatch.setattr(bucket_files, "_WINDOW", 1000)
    assert qconvert(*COMMAND).code == 0
    ran = qconvert(*COMMAND, "--verify-existing")
    assert (ran.code, ran.err) == (0, f"{OUT}: already complete, skipped\n")


def test_what_is_not_what_this_command_writes_is_refused(
    bucket: Any,  # noqa: F811
    here: Path,
) -> None:
    assert qconvert(*COMMAND).code == 0
    before = objects(bucket, "made/out")
    name = max(name for name in before if name.endswith(".safetensors"))
    skipping = (*COMMAND, "--skip-existing")
    eight = [8 if word == 4 else word for word in skipping]
    assert "model-00001-of-00004.safetensors is missing" in failed_because(qconvert(*eight))
    searched = [word for word in skipping if word != "--min-max"]
    assert failed_because(qconvert(*searched)) == other("qconvert.json names another recipe")
    obstore.delete(bucket, f"made/out/{name}")
    failed(qconvert(*skipping), other(f"{name} is missing"), REDO)
    obstore.put(bucket, f"made/out/{name}", before[name][:100])
    failed(qconvert(*skipping), other(f"{name} has 100 bytes, not {len(before[name]):,}"), REDO)
    obstore.put(bucket, f"made/out/{name}", b"\0" * len(before[name]))
    failed(qconvert(*skipping), other(f"{name} has another header"), REDO)
    obstore.put(bucket, f"made/out/{name}", before[name])
    obstore.put(bucket, "made/out/qconvert.json", b"{")
    failed(qconvert(*skipping), other("qconvert.json is missing or damaged"), REDO)
    assert qconvert(*skipping, "--overwrite").code == 0
    assert objects(bucket, "made/out") == before


def failed_because(ran: Any) -> str:
    assert ran.code == 1 and ran.err.startswith("Error: "), ran.err
    return str(ran.err).splitlines()[0].removeprefix("Error: ")


def test_another_source_is_told(bucket: Any, here: Path, tmp_path: Path, folder: Path) -> None:  # noqa: F811
    from tests.support.models import tiny

    assert qconvert(*COMMAND).code == 0
    (here / "m").unlink()
    tiny(here / "m", "qwen3", shards=3, seed=1, hidden_size=128, intermediate_size=256, vocab_size=1000,
         num_hidden_layers=2)  # fmt: skip
    failed(qconvert(*COMMAND, "--skip-existing"), other("it was made from other weights"), REDO)


@pytest.mark.parametrize("command", [COMMAND, GGUF], ids=["folder", "gguf"])
def test_what_a_killed_run_has_left_there_is_completed(
    bucket: Any,  # noqa: F811
    here: Path,
    command: tuple[object, ...],
) -> None:
    """On a machine that has nothing of it; what is there and not of this run stays, and is refused."""
    place = str(command[-1]).removeprefix("s3://bucket/").removesuffix("/m.gguf")
    assert qconvert(*command).code == 0
    before = objects(bucket, place)
    weights = sorted(name for name in before if name.endswith((".safetensors", ".gguf")))
    for name in {*before} - {weights[0]}:
        obstore.delete(bucket, f"{place}/{name}")
    assert "already" in failed_because(qconvert(*command))
    obstore.put(bucket, f"{place}/{weights[0]}", b"\0" * len(before[weights[0]]))
    ran = qconvert(*command, "--skip-existing")
    failed(ran, other(f"{weights[0]} has another header", str(command[-1])), REDO)
    obstore.put(bucket, f"{place}/{weights[0]}", before[weights[0]])
    assert qconvert(*command, "--skip-existing").code == 0
    assert objects(bucket, place) == before
    assert "already complete, skipped" in qconvert(*command, "--skip-existing").err


def test_a_source_of_the_second_of_its_output_is_not_newer(bucket: Any, here: Path) -> None:  # noqa: F811
    """Storages name whole seconds."""
    assert qconvert(*GGUF).code == 0
    written = max(int(each["last_modified"].timestamp()) for batch in obstore.list(bucket) for each in batch)
    source = next((here / "m").glob("*.safetensors"))
    before = source.stat().st_mtime_ns
    try:
        os.utime(source, ns=(0, written * 10**9 + 999_000_000))
        assert "already complete" in qconvert(*GGUF, "--skip-existing").err
        os.utime(source, ns=(0, (written + 2) * 10**9))
        assert f"the source's {source.name} is newer" in failed_because(qconvert(*GGUF, "--skip-existing"))
    finally:
        os.utime(source, ns=(0, before))  # other tests read it


def test_a_gguf_is_verified_by_the_manifest_beside_it(bucket: Any, here: Path) -> None:  # noqa: F811
    assert qconvert(*GGUF).code == 0
    first = min(objects(bucket, "gguf"))
    ran = qconvert(*GGUF, "--verify-existing")
    assert f"no SHA-256 of {first} is recorded to compare it with" in failed_because(ran)
    ran = qconvert(*GGUF, "--manifest", "--skip-existing")
    assert "m.qconvert.json is missing or damaged" in failed_because(ran)
    assert qconvert(*GGUF, "--manifest", "--overwrite").code == 0
    before = objects(bucket, "gguf")
    recorded_ = {file["name"]: file["sha256"] for file in json.loads(before["m.qconvert.json"])["files"]}
    assert recorded_ == {name: sha256(blob) for name, blob in before.items() if name.endswith(".gguf")}
    ran = qconvert(*GGUF, "--verify-existing")
    assert (ran.code, ran.err) == (0, "s3://bucket/gguf/m.gguf: already complete, skipped\n")
    obstore.put(bucket, f"gguf/{first}", before[first][:-1] + bytes([before[first][-1] ^ 1]))
    assert "is not what was recorded of it" in failed_because(qconvert(*GGUF, "--verify-existing"))
    other_type = [word if word != "q8_0" else "q4_0" for word in GGUF]
    assert qconvert(*other_type, "--overwrite").code == 0, "its manifest is written again"
    assert "already complete" in qconvert(*other_type, "--verify-existing").err
    assert "--card, --modelfile: no local file is kept" in qconvert(*GGUF, "--card").err


def test_of_several_models_those_that_are_there_are_skipped(bucket: Any, here: Path) -> None:  # noqa: F811
    shutil.copytree(here / "m", here / "n")
    several = ("quantize", "m", "n", *HOW, "-o", "s3://bucket/all", "--skip-existing")
    assert qconvert("quantize", "n", *HOW, "-o", "s3://bucket/all/n-int4-g32").code == 0
    left = min(name for name in objects(bucket, "all/n-int4-g32") if name.endswith(".safetensors"))
    obstore.put(bucket, f"all/m-int4-g32/{left}", objects(bucket, "all/n-int4-g32")[left])
    ran = qconvert(*several)
    assert ran.code == 0 and ran.err.count("already complete, skipped") == 1, ran.err
    assert {name.partition("/")[0] for name in objects(bucket, "all")} == {"m-int4-g32", "n-int4-g32"}
    assert qconvert(*several).err.count("already complete, skipped") == 2
