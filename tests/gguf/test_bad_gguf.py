"""Broken and hostile GGUF models through the commands: each refused by name, or accepted."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.ggml_types import KV, GGMLType
from qconvert.errors import QConvertError
from qconvert.formats.gguf.reader import GGUFFile
from tests.gguf.test_gguf_back import source_of
from tests.gguf.test_gguf_relatives import byte_tokenizer
from tests.support.commands import qconvert
from tests.support.gguf_models import write_gguf
from tests.support.hostile_files import sound_gguf

# Both ends are fine for these; we refuse them.
REFUSED = {"gguf-nested-array-2.gguf", "gguf-key-not-utf8.gguf"}
# Seen where the numbers are read; the others are seen on opening.
BY_NUMBERS = ("gguf-nan.gguf", "gguf-q8-inf-scale.gguf")
# Where the list names what is wrong in other words than a key or a tensor.
NAMED = {"a tensor past the end": "blk.0.", "split.count": "split.count"}


@pytest.fixture(scope="module")
def bad(assets: Path) -> dict[str, Any]:
    folder = assets / "fixtures" / "bad"
    items = json.loads((folder / "MANIFEST.json").read_text())["items"]
    return {n: item | {"path": folder / n} for n, item in sorted(items.items()) if n.startswith("gguf-")}


def names(item: dict[str, Any]) -> list[str]:
    return [NAMED.get(name, name) for name in item.get("must_name", ())]


def test_inspect_refuses_what_the_header_and_the_names_decide(bad: dict[str, Any]) -> None:
    assert len(bad) > 50
    for name, item in bad.items():
        if name in BY_NUMBERS:
            continue
        started = time.monotonic()
        ran = qconvert("inspect", item["path"])
        assert time.monotonic() - started < 5, name
        if item["expect"] == "reject" or name in REFUSED:
            assert ran.code == 1 and ran.err.startswith("Error: "), (name, ran)
            assert "bug in qconvert" not in ran.err, ran.err
            assert all(each in ran.err for each in names(item)), (name, ran.err)
        else:
            assert ran.code == 0, (name, ran.err)


def test_verify_names_the_tensor_that_holds_nan(bad: dict[str, Any]) -> None:
    for name in BY_NUMBERS:
        ran = qconvert("verify", bad[name]["path"])
        assert ran.code == 3 and ran.err.startswith("Error: blk.0.ffn_up.weight: NaN or Inf"), (name, ran)
    ran = qconvert("verify", bad["gguf-ok.gguf"]["path"])
    assert ran.code == 3 and "numbers are sound" in ran.err, "nothing is recorded to compare with"


def test_from_gguf_writes_no_nan_unless_asked(bad: dict[str, Any], tmp_path: Path) -> None:
    for name in BY_NUMBERS:
        ran = qconvert("from-gguf", bad[name]["path"], "-o", tmp_path / "out")
        assert ran.code == 1 and "blk.0.ffn_up.weight: NaN or Inf at row" in ran.err, (name, ran)
        assert not list(tmp_path.iterdir())
    ran = qconvert("from-gguf", bad["gguf-nan.gguf"]["path"], "-o", tmp_path / "out", "--allow-nonfinite")
    assert ran.code == 0, ran.err


# One declaration of each kind: fused, latent, hybrid, with constants, by layer, with two stacks.
FAMILIES = [
    "phi3-long", "gemma3", "falcon-40b", "gpt2", "glm", "olmo", "command-r", "deepseek-v3", "gpt-oss",
    "qwen3.5-moe", "t5", "openelm",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_senseless_keys_of_every_kind(assets: Path, tmp_path: Path, name: str) -> None:
    """Each key of an architecture left out, out of bounds or of another type: refused by name, or read."""
    pytest.importorskip("transformers")
    source = assets / "fixtures" / "zoo" / name
    if not source.is_dir():
        source = source_of(tmp_path, name)
    folder = tmp_path / "copy"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    if not (folder / "tokenizer.json").exists():
        byte_tokenizer(256).save(str(folder / "tokenizer.json"))
    assert qconvert("to-gguf", folder, "--type", "f32", "-o", tmp_path / "m.gguf", "-q").code == 0
    with GGUFFile(tmp_path / "m.gguf") as file:
        kv, tensors = dict(file.kv), list(file.tensors.values())
    arch = f"{kv['general.architecture'].value}."
    refused = 0
    for key in [key for key in kv if key.startswith(arch)]:
        for entry in (None, KV.u32(key, 0), KV.u32(key, 2**31 - 1), KV.text(key, "x"), KV.f32(key, math.nan)):
            changed = [old for old in kv.values() if old.key != key] + ([entry] if entry else [])
            started = time.monotonic()
            try:
                open_checkpoint(write_gguf(tmp_path / "bad.gguf", changed, tensors)).bind()
            except QConvertError as error:
                assert error.hint, error
                refused += 1
            assert time.monotonic() - started < 2, (key, entry)
    assert refused > 20


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_blocks_that_no_file_holds_are_refused(kind: str, tmp_path: Path) -> None:
    keys, tensors = sound_gguf()
    turned = [replace(t, type=GGMLType[kind]) if t.name == "blk.0.attn_q.weight" else t for t in tensors]
    path = write_gguf(tmp_path / "m.gguf", keys, turned)
    for words in (("inspect", path), ("verify", path), ("from-gguf", path, "-o", tmp_path / "out")):
        ran = qconvert(*words)
        assert (
            ran.code == 1
            and f"blk.0.attn_q.weight: {kind} blocks, which llama.cpp has only in memory" in ran.err
        )
