"""What a tensor costs beside its bytes: columns for arrays, streams for headers, indexes and manifests."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qconvert as library
from evals.speed_tensors import make_sparse
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.outcome import WrittenParts, WrittenRows
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, read_header
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.huggingface.shard_index import read_index
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
from tests.commands import made

SPECS = [
    TensorSpec(f'layers.{i}."é".w', DType.F32 if i % 3 else DType.I64, (1 + i % 2, 4)) for i in range(40)
]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2,321 tensors, all zeros, in files without bytes."""
    return make_sparse(tmp_path_factory.mktemp("many") / "moe", 3, 256)


def test_a_table_is_a_mapping_of_specs_with_offsets() -> None:
    table, plain, offset = ArrayTable(start=100), {}, 0
    for spec in SPECS:
        table.add(spec.name, table.kind(spec.dtype, spec.shape), offset)
        plain[spec.name] = spec, 100 + offset
        offset += spec.nbytes
    assert dict(table) == dict(table.items()) == {name: spec for name, (spec, _) in plain.items()}
    assert dict(table.offsets) == {name: at for name, (_, at) in plain.items()}
    assert list(table.values()) == SPECS and list(table.places()) == list(plain.values())
    assert len(table.kinds) == 4 and table.nbytes == offset and "layers" not in table


@pytest.mark.parametrize("shard_size", [None, 100])
def test_an_index_is_what_json_writes(shard_size: int | None) -> None:
    files = plan_files(SPECS, shard_size, {"format": "pt"}, 5)
    assert all(len(file.head) == file.size - file.specs.nbytes for file in files)
    if shard_size is not None:
        *shards, index = files
        homes = {name: file.name for file in shards for name in file.specs}
        totals = {"total_size": sum(spec.nbytes for spec in SPECS), "total_parameters": 5}
        said = json.dumps({"metadata": totals, "weight_map": homes}, indent=2, sort_keys=True) + "\n"
        assert index.head == said.encode() and list(homes) != sorted(homes)


def test_a_shard_has_no_more_tensors_than_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SAFETENSORS_TENSORS", 16)
    *shards, _ = plan_files(SPECS, 1 << 30)
    assert [len(file.specs) for file in shards] == [16, 16, 8]


def test_an_index_has_a_limit_of_its_own(tmp_path: Path) -> None:
    raw = json.dumps({"metadata": {}, "weight_map": {"w": "model-1.safetensors"}}).encode()
    (tmp_path / INDEX_FILE).write_bytes(raw + b" " * limits.CONFIG_BYTES)
    assert read_index(tmp_path / INDEX_FILE).weight_map == {"w": "model-1.safetensors"}
    os.truncate(tmp_path / INDEX_FILE, limits.INDEX_BYTES + 1)
    with pytest.raises(CorruptCheckpoint, match=r"has 0\.54 GB, the limit is 0\.54 GB"):
        read_index(tmp_path / INDEX_FILE)


def test_parts_of_arrays_come_back_as_they_were_added() -> None:
    parts = [WrittenRows(name, row, 1, 4, crc, 2) for row, crc in ((3, 1 << 31), (0, None)) for name in "ab"]
    found = WrittenParts()
    for part in parts:
        found.add(part)
    assert dict(found) == {name: [part for part in parts if part.name == name] for name in "ab"}
    assert found.get("c", ()) == ()


def test_a_manifest_is_what_json_writes(tmp_path: Path) -> None:
    experts = make_sparse(tmp_path / "moe", 2, 8)
    out = made("quantize", experts, "--bits", 4, "--min-max", "-o", tmp_path / "out")
    text = (out / "qconvert.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    arrays = read_header(out / "model.safetensors").specs
    entries = json.loads(text)["tensors"]
    assert {part for entry in entries.values() for part in entry["parts"]} == set(arrays)
    other = made("quantize", experts, "--bits", 4, "--min-max", "-j", 4, "-o", tmp_path / "other")
    assert (other / "qconvert.json").read_text() == text


def test_a_plan_takes_little_memory_for_each_tensor(experts: Path) -> None:
    """With an object for each array, 2,700 bytes for each tensor stayed, and 4,200 were taken at once."""
    recipe = Recipe(scheme=library.parse_scheme("int4-g128"))
    request = Request("quantize", recipe)
    job = prepare(open_model(str(experts)), request, library.RunOptions())  # loads what is loaded once
    count = len(job.compiled.plan.units)
    del job
    gc.collect()
    tracemalloc.start()
    try:
        job = prepare(open_model(str(experts)), request, library.RunOptions())
        files = job.container.files(Path("out"))
        held, peak = (nbytes / count for nbytes in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert sum(len(file.specs) for file in files) > 3 * 256 * 3
    assert held < 1_700 and peak < 2_300, (held, peak)


def test_blocks_come_in_the_order_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stacks of experts, which lie side by side, are read from a layer's 1.5 MB in one go."""
    source, request = make_sparse(tmp_path / "moe", 2, 8), Request("fuse", Recipe(fuse=("experts",)))
    job = prepare(open_model(str(source)), request, library.RunOptions(jobs=1, max_memory=100_000))
    begins, read = [], HFCheckpoint.read

    def watched(self: HFCheckpoint, name: str, start: int, stop: int, **how: Any) -> np.ndarray:
        begins.append(self.source_offset(name)[1])
        return read(self, name, start, stop, **how)

    monkeypatch.setattr(HFCheckpoint, "read", watched)
    execute(job, tmp_path / "out")
    assert len(begins) > 400
    assert max(before - begin for before, begin in pairwise(begins)) < 400_000  # two experts
