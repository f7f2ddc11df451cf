"""Safetensors files against the safetensors library: what it reads, we read; what we write, it writes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import DTYPE_BY_CODE, DType, TensorSpec
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.huggingface.safetensors_file import (
    INDEX_FILE,
    SafetensorsFile,
    SafetensorsHeader,
    parse_header,
    read_header,
)
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io.planned_files import FileSink

# What the library calls each dtype in its constructor.
LIBRARY_NAMES = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn", DType.F8_E5M2: "float8_e5m2", DType.F8_E8M0: "float8_e8m0fnu",
    DType.I64: "int64", DType.I32: "int32", DType.I16: "int16", DType.I8: "int8",
    DType.U64: "uint64", DType.U32: "uint32", DType.U16: "uint16", DType.U8: "uint8", DType.BOOL: "bool",
}  # fmt: skip

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
some_specs = st.lists(
    st.builds(TensorSpec, names, st.sampled_from(DType), shapes), max_size=8, unique_by=lambda s: s.name
)


def contents(specs: list[TensorSpec]) -> dict[str, np.ndarray]:
    """Rows of every tensor, all bytes different from their neighbours'."""
    arrays = {}
    for number, spec in enumerate(specs):
        octets = (np.arange(spec.nbytes) + 7 * number).astype(np.uint8)
        if spec.dtype is DType.BOOL:
            octets &= 1
        arrays[spec.name] = octets.view(spec.dtype.carrier).reshape(spec.rows, spec.width)
    return arrays


def library_bytes(specs: list[TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """The file that the library writes."""
    arrays = contents(specs)
    described = {
        spec.name: safetensors.TensorSpec(
            dtype=LIBRARY_NAMES[spec.dtype],
            shape=list(spec.shape),
            data_ptr=arrays[spec.name].ctypes.data,
            data_len=spec.nbytes,
        )
        for spec in specs
    }
    return bytes(safetensors.serialize(described, metadata=metadata))


def library_specs(blob: bytes) -> dict[str, TensorSpec] | None:
    """What the library reads in a file; None if it refuses it."""
    try:
        tensors = safetensors.deserialize(blob)
    except safetensors.SafetensorError:
        return None
    return {
        name: TensorSpec(name, DTYPE_BY_CODE[tensor["dtype"]], tuple(tensor["shape"]))
        for name, tensor in tensors
        if tensor["dtype"] in DTYPE_BY_CODE
    }


def write_ours(folder: Path, specs: list[TensorSpec], **plan: object) -> list[str]:
    """Write tensors by our own sink, in rows of one; return the names of the files."""
    files = plan_files(specs, **plan)  # type: ignore[arg-type]
    sink = FileSink(folder, files)
    for name, rows in contents(specs).items():
        for row in range(len(rows)):
            sink.write(name, row, rows[row : row + 1])
    sink.commit()
    return [file.name for file in files]


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def parse(blob: bytes) -> SafetensorsHeader:
    """The header of a file that is only in memory."""
    length = int.from_bytes(blob[:8], "little")
    return parse_header(blob[8 : 8 + length], Path("x.safetensors"), len(blob))


@given(some_specs)
def test_reads_what_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec]
) -> None:
    path = tmp_path_factory.mktemp("st") / "model.safetensors"
    path.write_bytes(library_bytes(specs, {"format": "pt"}))
    with SafetensorsFile(path) as file:
        assert dict(file.header.specs) == {spec.name: spec for spec in specs}
        assert file.header.metadata == {"format": "pt"}
        for name, rows in contents(specs).items():
            read = file.read(name, 0, len(rows))
            assert read.dtype == rows.dtype
            np.testing.assert_array_equal(read, rows)


@given(some_specs, st.dictionaries(names, names, min_size=1, max_size=1) | st.none())
def test_writes_the_bytes_that_the_library_writes(
    tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec], metadata: dict[str, str] | None
) -> None:
    folder = tmp_path_factory.mktemp("st")
    assert write_ours(folder, specs, metadata=metadata) == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == library_bytes(specs, metadata)


@given(
    some_specs, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3)), max_size=3)
)
def test_damaged_files_are_read_as_by_the_library_or_refused(
    specs: list[TensorSpec], edits: list[tuple[int, bytes, int]]
) -> None:
    blob = library_bytes(specs)
    for position, replacement, dropped in edits:
        blob = blob[:position] + replacement + blob[position + dropped :]
    agrees_with_library(blob)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
field_values = (
    st.sampled_from([*DTYPE_BY_CODE, "F4", "C64", "BF17"])
    | st.lists(st.integers(0, 9), max_size=10)
    | st.lists(st.integers(0, 40), min_size=2, max_size=2)
    | json_values
)


@given(some_specs.filter(bool), st.data())
def test_a_strange_field_is_read_as_by_the_library_or_refused(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    blob = library_bytes(specs)
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    fields = ["dtype", "shape", "data_offsets", "extra"]
    header[data.draw(st.sampled_from(sorted(header)))][data.draw(st.sampled_from(fields))] = data.draw(
        field_values
    )
    text = json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")
    agrees_with_library(framed(text, blob[8 + length :]))


@given(st.dictionaries(names | st.just("__metadata__"), json_values, max_size=3))
def test_strange_headers_are_read_as_by_the_library_or_refused(header: dict[str, object]) -> None:
    agrees_with_library(framed(json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")))


@given(st.binary(max_size=200))
def test_random_headers_never_raise_anything_but_corrupt_checkpoint(header: bytes) -> None:
    agrees_with_library(framed(header))


def agrees_with_library(blob: bytes) -> None:
    """Where we accept a file the library does too, with the same specs; where it accepts, we do."""
    expected = library_specs(blob)
    try:
        length = int.from_bytes(blob[:8], "little")
        found = dict(parse(blob).specs) if len(blob) >= 8 + length else None
    except QConvertError as error:
        stricter = (
            "appears twice",
            "not a list of up to 8 sizes",
            "larger than any file",
            "is not read here",
        )
        assert isinstance(error, CorruptCheckpoint | UnsupportedModel)
        assert expected is None or any(reason in error.fact for reason in stricter), error.fact
    else:
        laxer = (b"-0", b"Infinity")  # minus zero as a size; infinity in a list of an unknown field
        assert found == expected or (expected is None and any(text in blob for text in laxer))


@pytest.mark.parametrize(
    ("header", "fact"),
    [
        (b'{"a": {}, "a": {}}', "a appears twice"),
        (b'{"a": 7}', "a: its header entry is a number, not an object"),
        (b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', "a: dtype F4 is not read here"),
        (
            b'{"a": {"dtype": "U8", "shape": [0, 281474976710657], "data_offsets": [0, 0]}}',
            "a: shape [0, 281474976710657] is larger than any file",
        ),
    ],
)  # fmt: skip
def test_refusals_name_file_and_tensor(header: bytes, fact: str) -> None:
    with pytest.raises(QConvertError) as refused:
        parse(framed(header, b"\0"))
    assert refused.value.fact == f"x.safetensors: {fact}"


def test_oddities_are_warned_of_once() -> None:
    entry = '{"dtype": "U8", "shape": [], "data_offsets": [%d, %d], "note": 1}'
    header = f' {{"a": {entry % (0, 1)}, "b\u202e": {entry % (1, 2)}}}'
    assert parse(framed(header.encode(), b"\0\0")).warnings == (
        "x.safetensors: its header starts with white space, the format asks for '{'",
        "x.safetensors: unknown header fields of 2 tensors ignored, first in a",
    )


def test_bounds_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in (2**64 - 1, 2**63, 100_000_001, 100_000_000):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CorruptCheckpoint, match="claims a header of"):
            read_header(path)


def test_rows_beyond_the_end_are_not_read(tmp_path: Path) -> None:
    write_ours(tmp_path, [TensorSpec("w", DType.F32, (6, 3))])
    with (
        SafetensorsFile(tmp_path / "model.safetensors") as file,
        pytest.raises(ValueError, match=r"rows \[5, 7\) of 6"),
    ):
        file.read("w", 5, 7)


def test_a_file_cut_short_after_opening_is_an_error(tmp_path: Path) -> None:
    write_ours(tmp_path, [TensorSpec("w", DType.U8, (1000,))])
    path = tmp_path / "model.safetensors"
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        assert len(file.read("w", 0, 999)) == 999
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors: ends at byte \d+, 1 bytes short"):
            file.read("w", 0, 1000)


def test_threads_share_one_open_file(tmp_path: Path) -> None:
    spec = TensorSpec("w", DType.U32, (4000, 8))
    write_ours(tmp_path, [spec])
    expected = contents([spec])["w"]
    with SafetensorsFile(tmp_path / "model.safetensors") as file, ThreadPoolExecutor(4) as pool:
        starts = range(0, 4000, 50)
        blocks = list(pool.map(lambda start: file.read("w", start, start + 50), starts))
    np.testing.assert_array_equal(np.concatenate(blocks), expected)


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    write_ours(tmp_path, [TensorSpec("w", DType.U8, (1,))])
    (tmp_path / "bad.safetensors").write_bytes(b"\1" * 20)
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        SafetensorsFile(tmp_path / "model.safetensors")
        read_header(tmp_path / "model.safetensors")
        with pytest.raises(CorruptCheckpoint):
            read_header(tmp_path / "bad.safetensors")
    assert len(list(Path("/dev/fd").iterdir())) <= before + 1


sizes = st.lists(st.integers(0, 9), max_size=12)


@given(sizes, st.integers(1, 12))
def test_shards_are_split_as_by_huggingface_hub(sizes: list[int], limit: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    specs = [TensorSpec(f"t{i}", DType.U8, (size,)) for i, size in enumerate(sizes)]
    expected = split_state_dict_into_shards_factory(
        {spec.name: spec for spec in specs},
        get_storage_size=lambda spec: spec.nbytes,
        get_storage_id=lambda spec: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    expected_files = {
        name: sorted(tensors) for name, tensors in expected.filename_to_tensors.items() if tensors
    }
    files = plan_files(specs, shard_size=limit)
    assert {f.name: sorted(f.specs) for f in files if f.specs} == (expected_files if sizes else {})


def test_an_index_lists_the_shards(tmp_path: Path) -> None:
    specs = [TensorSpec(f"t{i}", DType.F32, (2, 2)) for i in range(5)]
    written = write_ours(tmp_path, specs, shard_size=32, metadata={"format": "pt"}, total_parameters=20)
    assert written == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX_FILE]
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_parameters": 20, "total_size": 80}
    for name, rows in contents(specs).items():
        loaded = safetensors.numpy.load_file(tmp_path / index["weight_map"][name])
        np.testing.assert_array_equal(loaded[name], rows)


def test_headers_that_no_reader_takes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The library's bound is 100 MB; a shard less than that is read by it."""
    specs = [TensorSpec(f"t{i}", DType.U8, (1,)) for i in range(2)]
    longest = 100_000_000 - len(
        '{"__metadata__":{"k":""},"t0":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    plan_files(specs[:1], metadata={"k": "x" * longest})
    with pytest.raises(UnsupportedModel, match=r"a file of 2 tensors would have 100,000,0\d\d bytes"):
        plan_files(specs, metadata={"k": "x" * longest})
    with pytest.raises(UnsupportedModel, match="1 metadata in 100,000,001 bytes"):
        plan_files(specs, metadata={"k": "x" * 100_000_000})
    many = {f"k{i}": "" for i in range((1 << 16) + 1)}
    with pytest.raises(UnsupportedModel, match=r"65,537 metadata in .* 65,536 in 100,000,000 bytes are read"):
        plan_files(specs, metadata=many)
    files = plan_files(specs[:1], metadata={"k": "x" * longest})
    path = tmp_path / files[0].name
    path.write_bytes(b"".join(files[0].head_parts()) + b"\0")
    assert safetensors.numpy.load_file(path)["t0"].tolist() == [0]


def test_an_empty_model_is_one_empty_file(tmp_path: Path) -> None:
    assert write_ours(tmp_path, []) == ["model.safetensors"]
    assert safetensors.numpy.load_file(tmp_path / "model.safetensors") == {}


@pytest.mark.parametrize("width", [6, 5000])  # a window of whole rows, and one call for each row
def test_columns_are_read_alone(tmp_path: Path, width: int) -> None:
    array = np.arange(9 * width, dtype=np.int32).reshape(9, width)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        found = file.read("a", 2, 8, columns=(1, 4))
        np.testing.assert_array_equal(found, array[2:8, 1:4])
        assert found.flags.c_contiguous
        with pytest.raises(ValueError, match="columns"):
            file.read("a", 2, 8, columns=(1, width + 1))
