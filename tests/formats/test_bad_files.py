"""Broken and hostile folders: each refused by name, or accepted and the oddity said aloud.

Covers what the files themselves decide: all `st-` and `ix-` items but ix-missing-tensor, the `cfg-`
items of LAYER, and two folders. Whether a tensor or a field is missing from the model, or a number
in it is wrong (the other `cfg-` items, `w-`, `q-`), is for the architecture and the layouts to say.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from qconvert.errors import QConvertError
from qconvert.formats.huggingface.folder import open_hf_folder

LAYER = {
    "cfg-missing", "cfg-empty", "cfg-invalid-json", "cfg-list", "cfg-nan", "cfg-infinity", "cfg-utf16",
    "cfg-dup-keys", "cfg-auto-map", "dir-as-file", "empty-folder", "ok-tied", "ok-untied",
}  # fmt: skip
ELSEWHERE = {"ix-missing-tensor"}
# Where the list describes a name instead of giving it.
NAMED = {
    "first tensor that does not fit": "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight or whichever tensor is last": "model.norm.weight",
}
# Items of which both ends are fine, and what we say to the ones we accept.
SAID = {
    "st-lead-space": "white space",
    "st-extra-field": "unknown header fields of 1 tensors ignored",
    "ix-extra-tensor": "does not list model.layers.9.mlp.up_proj.weight",
    "ix-duplicate-tensor": "several shards hold model.layers.0.self_attn.q_proj.weight",
    "ix-wrong-total": "total_size is 1",
    "ix-and-single": "model.safetensors is read",
}
REFUSED = {"st-hole", "st-header-nul-pad", "st-meta-int-value", "st-meta-list", "cfg-dup-keys"}


@pytest.fixture(scope="module")
def bad(assets: Path) -> dict[str, Any]:
    """The items of this layer by name, each with its folder."""
    folder = assets / "fixtures" / "bad"
    items = json.loads((folder / "MANIFEST.json").read_text())["items"]
    ours = {name for name in items if name.startswith(("st-", "ix-"))} | LAYER
    return {name: items[name] | {"folder": folder / name} for name in sorted(ours - ELSEWHERE)}


def test_every_item_is_refused_by_name_or_accepted_aloud(bad: dict[str, Any]) -> None:
    assert len(bad) == 78
    for name, item in bad.items():
        expected = {"either": "reject" if name in REFUSED else "accept"}.get(item["expect"], item["expect"])
        try:
            checkpoint = open_hf_folder(item["folder"])
        except QConvertError as error:
            assert expected == "reject", f"{name}: {error.fact}"
            for part in item.get("must_name") or ():
                assert NAMED.get(part, part) in error.fact, name
            assert error.fact.isprintable(), name
            assert len(error.fact) < 500, name
        else:
            assert expected == "accept", name
            assert SAID.get(name, "") in " ".join(checkpoint.warnings), name
            assert bool(checkpoint.warnings) == (name in SAID), name


def test_no_item_costs_time_or_memory(bad: dict[str, Any]) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before, started = peak(), time.process_time()
    for item in bad.values():
        try:
            open_hf_folder(item["folder"]).close()
        except QConvertError:
            continue
    assert time.process_time() - started < 10
    assert peak() - before < 500_000, "kilobytes"


def test_nothing_is_written_and_no_code_is_run(bad: dict[str, Any], tmp_path: Path) -> None:
    copy = shutil.copytree(bad["cfg-auto-map"]["folder"], tmp_path / "model")
    before = sorted(path.name for path in copy.iterdir())
    assert "evil.py" in [path.name for path in open_hf_folder(copy).sidecars.code]
    assert sorted(path.name for path in copy.iterdir()) == before
