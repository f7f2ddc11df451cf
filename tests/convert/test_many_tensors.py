"""What a tensor costs beside its bytes: columns for arrays, streams for headers, indexes and manifests."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
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
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Encoding,
    ModelTensor,
    Quantized,
    Unquantized,
)
from qconvert.core.values import DenseRows, stack_rows
from qconvert.errors import CorruptCheckpoint, QConvertError
from qconvert.formats.huggingface import plain_json, safetensors_file, shard_index
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.formats.huggingface.plain_json import scan_header, scan_index
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, read_header
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.huggingface.shard_index import read_index
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.gptq_dynamic import Claims
from qconvert.formats.layouts.stored_arrays import arrays_of
from qconvert.plan.passes.transcode import Target
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
from tests.support.commands import made

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
        table.add(spec.name, table.kind((spec.dtype, spec.shape)), offset)
        plain[spec.name] = spec, 100 + offset
        offset += spec.nbytes
    assert dict(table) == dict(table.items()) == {name: spec for name, (spec, _) in plain.items()}
    assert dict(table.offsets) == {name: at for name, (_, at) in plain.items()}
    assert list(table.values()) == SPECS
    places = [(name, form.nbytes, offset) for name, form, offset in table.places()]
    assert places == [(name, spec.nbytes, at) for name, (spec, at) in plain.items()]
    assert len(table.kinds) == 4 and table.nbytes == offset and "layers" not in table


PLAIN = [TensorSpec(f"layers.{i}.w", spec.dtype, spec.shape) for i, spec in enumerate(SPECS)]


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("specs", [SPECS, PLAIN, PLAIN[:1], []])
@pytest.mark.parametrize("shard_size", [None, 100])
def test_an_index_is_what_json_writes(
    shard_size: int | None, specs: list[TensorSpec], metadata: dict[str, str] | None
) -> None:
    files = plan_files(specs, shard_size, metadata, 5)
    assert all(len(file.head) == file.size - file.specs.nbytes for file in files)
    if shard_size is not None and len(specs) > 1:
        *shards, index = files
        homes = {name: file.name for file in shards for name in file.specs}
        totals = {"total_size": sum(spec.nbytes for spec in specs), "total_parameters": 5}
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


@pytest.mark.parametrize("layout", ["gptq", "auto-round", "compressed-tensors"])
def test_settings_of_very_many_modules_are_told_in_one_pass(layout: str) -> None:
    """To count each among all took 1.2 seconds for 5,000, and with the square of their number more."""
    four, eight = (AffineInt(bits, 128, symmetric=True, scale_dtype=DType.F16) for bits in (4, 8))
    modules = [f"model.layers.{number % 90}.mlp.experts.{number}.up_proj" for number in range(20_000)]
    quantized = {module: eight if number % 1000 == 1 else four for number, module in enumerate(modules)}
    began = time.process_time()
    said = registry.writer(layout).settings(quantized, [])["quantization_config"]
    assert time.process_time() - began < 5
    if layout != "compressed-tensors":
        assert said["bits"] == 4 and len(said["dynamic" if layout == "gptq" else "extra_config"]) == 20


@pytest.mark.parametrize("layout", registry.written())
def test_arrays_of_tensors_alike_are_told_once_and_are_those_of_each(layout: str) -> None:
    traits, writer = registry.traits_of(layout), registry.writer(layout)
    form: Quantized = AffineInt(4, 64, symmetric=True, scale_dtype=DType.F16)
    if traits.codebooks:
        form = traits.codebooks[0].encoding(DType.BF16)
    elif layout == "hqq":
        form = AffineMin(4, 64, DType.F16, "zero")
    elif layout == "int-quantized":
        form = AffineInt(8, None, symmetric=True, scale_dtype=DType.F16)
    shape = (3, 128, 128) if traits.experts == "class" else (128, 128)
    encodings: tuple[Encoding, ...] = (form, Unquantized(DType.BF16))
    names = ("a.weight", "b.weight", "a.w", "b.w", "a.own_weight")
    tensors = [ModelTensor(name, shape, encoding) for encoding in encodings for name in names]
    found = [
        TensorSpec(begin + end, *kind) for begin, parts in arrays_of(writer, tensors) for end, kind in parts
    ]
    assert found == [spec for tensor in tensors for spec in writer.stored_arrays(tensor)]


def test_linears_of_a_layout_share_their_encodings(experts: Path, tmp_path: Path) -> None:
    """With one for each linear, 247,000 of them took as long as all else that was done with a GPTQ model."""
    out = made("convert", experts, "--to", "gptq", "--scheme", "int4-channel", "-o", tmp_path / "out")
    tensors = open_model(str(out)).checkpoint.tensors.values()
    assert len({id(tensor.encoding) for tensor in tensors}) == len({t.encoding for t in tensors}) == 2
    converted = Request("convert", Recipe(), target=Target("mlx"))
    units = prepare(open_model(str(out)), converted, library.RunOptions()).compiled.plan.units
    assert len({id(unit.output.encoding) for unit in units}) < 10 < 3 * 256 * 3 < len(tensors)


def test_what_gptq_says_of_some_modules_counts_in_its_order() -> None:
    """The first that matches; an expression that is not run could be of any module after it."""
    here, there, opened = {"sym": False}, {"sym": True}, {".*": {"sym": False}}
    assert not Claims({"sym": True, "dynamic": {"^a$": here}}).symmetric("a")
    assert Claims({"sym": True, "dynamic": {"^a$": here}}).symmetric("b")
    assert Claims({"sym": False, "dynamic": {"^a$": there, "+:^a$": here, **opened}}).symmetric("a")
    assert Claims({"sym": True, "dynamic": {"^a$": there, **opened}}).symmetric("a")
    assert not Claims({"sym": True, "dynamic": {**opened, "^a$": there}}).symmetric("a")
    assert not Claims({"sym": True, "dynamic": opened}).symmetric("b")
    assert Claims({"sym": True, "dynamic": {".*": {"bits": 8}, "-:^b$": here}}).symmetric("b")


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


def test_tensors_read_together_are_those_read_alone(tmp_path: Path) -> None:
    """Plain and quantized ones, of two files, in any order; the plain ones without a read of their own."""
    source = made("quantize", "embedded", "--bits", "4", "--shard-size", "2MB", "-o", tmp_path / "int4")
    checkpoint = open_model(str(source)).checkpoint
    assert len(checkpoint.files.files) > 1
    kinds: dict[object, list[ModelTensor]] = {}
    for tensor in checkpoint.tensors.values():
        kinds.setdefault((tensor.shape, tensor.encoding), []).insert(0, tensor)
    values = checkpoint.reader.read_stacked(list(kinds.values()))
    assert len(values) == len(kinds) > 5 and any(isinstance(each, DenseRows) for each in values)
    for tensors, value in zip(kinds.values(), values, strict=True):
        alone = stack_rows([checkpoint.reader.read(each, 0, each.rows) for each in tensors])
        for stacked, array in zip(value.arrays, alone.arrays, strict=True):
            np.testing.assert_array_equal(stacked, array)


def test_units_of_a_kind_are_counted(experts: Path) -> None:
    job = prepare(open_model(str(experts)), Request("quantize", Recipe()), library.RunOptions())
    kinds = job.compiled.plan.kinds
    assert sum(count for _, count in kinds) == len(job.compiled.plan.units) > 2000 > 20 > len(kinds)
    assert {unit.output.shape for unit, _ in kinds} == {u.output.shape for u in job.compiled.plan.units}


def entry(name: str, begin: object, end: object, said: str = '"dtype":"F32","shape":[2,2]') -> str:
    return f'"{name}":{{{said},"data_offsets":[{begin},{end}]}}'


USUAL = (
    f"{{{entry('a', 0, 16)},{entry('b.{}', 16, 32)}}}",
    f'{{"__metadata__":{{"format":"pt"}},{entry("a", 0, 16)},{entry("b", 16, 32)}}}   ',
    f"{{{entry('b', 16, 32)}}}".replace("16,32", "0,32").replace("[2,2]", "[2,4]"),
)
UNUSUAL = (
    '{"__metadata__":{"format":"pt"}}',
    f'{{"__metadata__":{{"a":"}}"}},{entry("a", 0, 16)},{entry("b", 16, 32)}}}',
    f'{{"__metadata__":{{"a":3}},{entry("a", 0, 16)},{entry("b", 16, 32)}}}',
    f'{{"__metadata__":null,{entry("a", 0, 16)},{entry("b", 16, 32)}}}',
    f"{{{entry('b', 16, 32)},{entry('a', 0, 16)}}}",
    f"{{{entry('é', 0, 16)},{entry('b', 16, 32)}}}",
    f"{{ {entry('a', 0, 16)}, {entry('b', 16, 32)}}}",
    f"{{{entry('a', 0, 16)},{entry('a', 16, 32)}}}",
    f"{{{entry('a', 0, 16)},{entry('__metadata__', 16, 32)}}}",
    f"{{{entry('a', 0, 16)},{entry('b', 16, 31)}}}",
    f"{{{entry('a', 0, 16)},{entry('b', 17, 33)}}}",
    f"{{{entry('a', 0, 16)},{entry('b', 16, '032')}}}",
    f"{{{entry('a', 0, 16)}}},{entry('b', 16, 32)}}}",
    f"{{{entry('a', 0, 16)}{entry('b', 16, 32)}}}",
    f"{{{entry('a', 0, 16)},{entry('b', 16, 32)},}}",
    f"{{{entry('a', 0, 16)},{entry('b', 16, 32)}}}}}",
    f"{{{entry('a', 0, 32, said)}}}" if (said := '"dtype":"F32","shape":[2,4,]') else "",
    f"{{{entry('a', 0, 32, said)}}}" if (said := '"dtype":"F99","shape":[8]') else "",
    f"{{{entry('a', 0, 32, said)}}}" if (said := '"dtype":"F32","shape":[08]') else "",
    f"{{{entry('a', 0, 32, said)}}}" if (said := '"shape":[8],"dtype":"F32"') else "",
)


@pytest.mark.parametrize("text", [*USUAL, *UNUSUAL])
def test_a_scanned_header_is_what_the_strict_parser_reads(text: str) -> None:
    """Whatever is scanned or not, the arrays are the same, or the error."""
    raw, found = text.encode(), []
    assert text not in USUAL or scan_header(raw) is not None
    for scan in (scan_header, lambda raw, most: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safetensors_file, "scan_header", scan)
            try:
                header = safetensors_file.parse_header(raw, Path("f"), 8 + len(raw) + 32)
                places = list(header.specs.values()), list(header.specs.places())
                found.append((places, header.metadata, header.header_sha256))
            except QConvertError as error:
                found.append((str(error), error.hint))
    assert found[0] == found[1]


MAPPED = '{"metadata": {"total_size": 7}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'


@pytest.mark.parametrize(
    "text",
    [
        MAPPED,
        json.dumps(json.loads(MAPPED), indent=2),
        json.dumps(json.loads(MAPPED), separators=(",", ":")),
        MAPPED.replace('"a"', '"é,\\u00e9"'),
        MAPPED.replace('"b"', '"a"'),
        MAPPED.replace("2.safe", "../2.safe"),
        MAPPED.replace('"2.safetensors"', "3"),
        MAPPED.replace('"b":', '"b" :'),
        MAPPED.replace(', "b"', ' "b"'),
        MAPPED.replace('"}}', '",}}'),
        MAPPED + "}",
        MAPPED[:-1],
        MAPPED.replace("7", "07"),
        '{"metadata": {"weight_map": {"a": "1.safetensors"}}}',
        '{"weight_map": {"a": "1.safetensors"}, "metadata": {}}',
        '{"weight_map": {}}',
        "[]",
        "",
    ],
)
def test_a_scanned_index_is_what_the_strict_parser_reads(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of any size."""
    path, found = tmp_path / INDEX_FILE, []
    path.write_text(text)
    assert "é" in text or text != MAPPED or scan_index(path) is not None
    for size in (1 << 20, 70, 7, 0):
        monkeypatch.setattr(plain_json, "_BLOCK_BYTES", max(1, size))
        if not size:
            monkeypatch.setattr(shard_index, "scan_index", lambda path: None)
        try:
            index = read_index(path)
            found.append((index, list(index.weight_map.items())))
        except QConvertError as error:
            found.append((str(error), error.hint))  # type: ignore[arg-type]
    assert found[0] == found[1] == found[2] == found[3]


def test_an_index_takes_no_more_memory_than_its_names(tmp_path: Path) -> None:
    """In a process of its own: the table of interned names grows by steps, with those of other tests too."""
    names = [f"model.layers.{i % 92}.mlp.experts.{i}.down_proj.weight_packed" for i in range(100_000)]
    path = tmp_path / INDEX_FILE
    homes = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": homes}, indent=2))
    assert read_index(path).weight_map == homes
    measured = (
        "import sys, tracemalloc; from pathlib import Path\n"
        "from qconvert.formats.huggingface.shard_index import read_index\n"
        "tracemalloc.start(); index = read_index(Path(sys.argv[1]))\n"
        "print(tracemalloc.get_traced_memory()[1])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", measured, path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    # Beside these: blocks of the file, and the table of interned names.
    most = 1.2 * (sys.getsizeof(homes) + sum(map(sys.getsizeof, names))) + (18 << 20)
    assert int(ran.stdout) < most, ran.stdout
