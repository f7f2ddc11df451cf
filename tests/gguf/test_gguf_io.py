"""GGUF reading: what gguf writes is read back, what is broken is refused by name, splits are one file."""

from __future__ import annotations

import hashlib
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.ggml_types import (
    KV,
    TYPE_BY_NUMBER,
    ArrayOf,
    GGMLType,
    GGUFTensor,
    KVType,
    parse_ggml_type,
)
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.gguf.reader import GGUFFile, check_vocabulary
from qconvert.formats.gguf.writer import plan_files

gguf = pytest.importorskip("gguf")

SOME_KV = (
    KV.text("general.architecture", "qwen3"),
    KV.u32("qwen3.block_count", 1),
    KV.texts("tokenizer.ggml.tokens", ("a", "b", "ü")),
    KV.flag("x.flag", value=True),
)
SOME_TENSORS = (
    GGUFTensor("token_embd.weight", GGMLType.Q8_0, (3, 64)),
    GGUFTensor("blk.0.ffn_up.weight", GGMLType.F32, (5, 2)),
    GGUFTensor("output_norm.weight", GGMLType.F32, (7,)),
)


def write(folder: Path, kv: tuple[KV, ...] = SOME_KV, tensors: tuple[GGUFTensor, ...] = SOME_TENSORS) -> Path:
    """A GGUF file with this header and data bytes that count up."""
    (plan,) = plan_files("some.gguf", kv, tensors)
    path = folder / plan.name
    path.write_bytes(plan.head + bytes(i % 251 for i in range(plan.size - len(plan.head))))
    return path


def refused(path: Path) -> str:
    with pytest.raises(QConvertError) as caught:
        GGUFFile(path)
    assert path.name in caught.value.fact
    return caught.value.fact


def test_block_sizes_are_those_of_gguf() -> None:
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        ours = TYPE_BY_NUMBER[int(kind)]
        assert (ours.name, ours.block) == (kind.name, block)
        # ggml's block_q8_1 is two halves and 32 bytes; gguf counted the halves as floats until 0.20.
        assert ours.block_bytes == (36 if kind.name == "Q8_1" else nbytes)


def test_an_unknown_type_name_is_answered_with_the_names() -> None:
    assert parse_ggml_type("q4_k") is GGMLType.Q4_K
    with pytest.raises(QConvertError) as caught:
        parse_ggml_type("q9")
    assert "q4_k" in (caught.value.hint or "")


def test_reads_what_gguf_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_array("a.texts", ["x", "ÿ", ""])
    writer.add_array("a.i32s", [-1, 2])
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("plain", plain)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile(path) as file:
        values = {key: entry.value for key, entry in file.kv.items()}
        assert values == {
            "general.architecture": "llama",
            "a.u32": 7,
            "a.f32": 0.5,
            "a.bool": True,
            "a.u64": 1 << 40,
            "a.texts": ("x", "ÿ", ""),
            "a.i32s": (-1, 2),
        }
        assert file.kv["a.u64"].type is KVType.U64
        assert file.kv["a.i32s"].type == ArrayOf(KVType.I32)
        assert file.tensors["blocks"] == GGUFTensor("blocks", GGMLType.Q4_0, (2, 64))
        assert np.array_equal(file.read("plain", 1, 3), plain[1:3])
        assert np.array_equal(file.read("blocks", 0, 2), blocks)
        assert np.array_equal(file.read("plain", 0, 3, columns=(1, 3)), plain[:, 1:3])


def test_rows_are_the_same_from_any_thread(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path)) as file:
        whole = file.read("token_embd.weight", 0, 3)
        assert whole.shape == (3, 2 * 34)
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda i: file.read("token_embd.weight", i % 3, i % 3 + 1), range(60)))
    assert all(np.array_equal(part[0], whole[i % 3]) for i, part in enumerate(parts))


def test_a_file_cut_short_after_opening_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    with GGUFFile(path) as file:
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(CorruptCheckpoint, match=r"some\.gguf: ends at byte"):
            file.read("output_norm.weight", 0, 7)


def test_the_corpus_of_broken_files(assets: Path) -> None:
    folder = assets / "fixtures" / "bad"
    items = json.loads((folder / "MANIFEST.json").read_text())["items"]
    # What only a reader of the model's names or numbers can see is told by test_bad_gguf.
    later = {"gguf-no-arch", "gguf-arch-not-string", "gguf-unknown-arch", "gguf-vocab-mismatch"}
    later |= {"gguf-missing-tensor", "gguf-nan", "gguf-q8-inf-scale"}
    for path in sorted(folder.glob("gguf-*.gguf")):
        item = items[path.name]
        if item["expect"] == "accept" or path.stem in later:
            GGUFFile(path).close()
            continue
        fact = refused(path)
        named = [text for text in item.get("must_name", []) if "tensor past" not in text]
        assert all(text in fact for text in named), fact


def test_tokens_must_be_as_many_as_embedding_rows(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path)) as file:
        check_vocabulary(file.kv, file.tensors, file.name)
        with pytest.raises(CorruptCheckpoint, match=r"2 tokens.*3 rows"):
            short = {**file.kv, "tokenizer.ggml.tokens": KV.texts("tokenizer.ggml.tokens", ("a", "b"))}
            check_vocabulary(short, file.tensors, file.name)


def replaced(path: Path, old: bytes, new: bytes) -> Path:
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


U32, TEXT, ARRAY = (struct.pack("<I", number) for number in (4, 8, 9))


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "byte order"),
        (b"GGUF\3\0\0\0", b"FUGG\3\0\0\0", "byte order"),
        (b"GGUF\3\0\0\0", b"GGUF\4\0\0\0", "version 4"),
        (text("x.flag") + struct.pack("<I", 7), text("x.flag") + struct.pack("<I", 99), "x.flag"),
        (TEXT + struct.pack("<Q", 3), TEXT + struct.pack("<Q", 1 << 62), "tokenizer.ggml.tokens"),
        (ARRAY + TEXT + struct.pack("<Q", 3), ARRAY + ARRAY + struct.pack("<Q", 3), "tokenizer.ggml.tokens"),
        (struct.pack("<QQI", 2, 5, 0), struct.pack("<QQI", 1 << 62, 5, 0), "blk.0.ffn_up.weight"),
        (struct.pack("<QQI", 64, 3, 8), struct.pack("<QQI", 63, 3, 8), "token_embd.weight"),
        (struct.pack("<QQI", 64, 3, 8), struct.pack("<QQI", 64, 3, 77), "token_embd.weight"),
        (struct.pack("<QQI", 64, 3, 8), struct.pack("<QqI", 64, -3, 8), "token_embd.weight"),
        (struct.pack("<QIQ", 7, 0, 288), struct.pack("<QIQ", 7, 0, 289), "output_norm.weight"),
        (struct.pack("<QIQ", 7, 0, 288), struct.pack("<QIQ", 7, 0, 0), "output_norm.weight"),
    ],
)
def test_one_wrong_field_is_named(tmp_path: Path, old: bytes, new: bytes, names: str) -> None:
    assert names in refused(replaced(write(tmp_path), old, new))


def test_twice_the_same_name_is_refused(tmp_path: Path) -> None:
    kv = (*SOME_KV, KV.u32("qwen3.block_cOunt", 2))
    path = replaced(write(tmp_path, kv=kv), b"block_cOunt", b"block_count")
    assert "qwen3.block_count appears twice" in refused(path)
    tensors = (*SOME_TENSORS, GGUFTensor("output_nOrm.weight", GGMLType.F32, (7,)))
    path = replaced(write(tmp_path, tensors=tensors), b"output_nOrm", b"output_norm")
    assert "output_norm.weight appears twice" in refused(path)


@given(cut=st.integers(0, 700), flip=st.integers(0, 700), bit=st.integers(0, 255))
def test_no_damage_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, bit: int
) -> None:
    path = write(tmp_path_factory.mktemp("damage"))
    raw = bytearray(path.read_bytes())
    raw[flip % len(raw)] ^= bit
    path.write_bytes(raw[: len(raw) - cut])
    try:
        GGUFFile(path).close()
    except (CorruptCheckpoint, UnsupportedModel) as error:
        assert path.name in error.fact


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    path = replaced(write(tmp_path), "ü".encode(), b"\xff\xfe")
    with GGUFFile(path) as file:
        kv = file.kv["tokenizer.ggml.tokens"]
        (again,) = plan_files("some.gguf", tuple(file.kv.values()), tuple(file.tensors.values()))
    assert kv.value == ("a", "b", b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert path.read_bytes().startswith(again.head)


def write_parts(folder: Path, max_part_bytes: int = 100) -> list[Path]:
    paths = []
    for plan in plan_files("some.gguf", SOME_KV, SOME_TENSORS, max_part_bytes=max_part_bytes):
        paths.append(folder / plan.name)
        paths[-1].write_bytes(plan.head + bytes(plan.size - len(plan.head)))
    return paths


def test_a_split_checkpoint_reads_as_one(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert [path.name for path in paths] == ["some-00001-of-00002.gguf", "some-00002-of-00002.gguf"]
    for path in paths:
        with GGUFFile(path) as file:
            assert tuple(file.tensors.values()) == SOME_TENSORS
            assert tuple(file.kv.values()) == SOME_KV
            assert file.read("output_norm.weight", 2, 5).shape == (3, 1)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_parts_that_nothing_refers_to_any_more_are_closed(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    before = open_files()
    files = [GGUFFile(parts[0]) for _ in range(4)]
    assert open_files() == before + 4 * len(parts)
    del files
    assert open_files() == before


def test_a_missing_or_misplaced_part_is_named(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    raw = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptCheckpoint, match="is in an earlier part too"):
        GGUFFile(first)
    second.write_bytes(raw.replace(b"split.no\2\0\0\0\1\0", b"split.no\2\0\0\0\0\0"))
    with pytest.raises(CorruptCheckpoint, match=r"split\.no is 0.*part 2 of 2"):
        GGUFFile(first)
    second.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"some-00002-of-00002\.gguf: missing"):
        GGUFFile(first)
    lone = first.rename(tmp_path / "lone.gguf")
    with pytest.raises(CorruptCheckpoint, match=r"split\.count is 2"):
        GGUFFile(lone)


def test_reads_llama_quantize_bytes(assets: Path) -> None:
    folder = assets / "fixtures" / "gguf"
    golden = json.loads((folder / "golden.json").read_text())["files"]["Q4_K_M"]
    with GGUFFile(folder / "tiny-qwen3-Q4_K_M.gguf") as file:
        assert file.tensors.keys() == golden["tensors"].keys()
        for name, tensor in file.tensors.items():
            expected = golden["tensors"][name]
            assert (tensor.type.name, list(tensor.shape)) == (expected["type"], expected["shape"])
            rows = file.read(name, 0, tensor.stored.rows)
            assert hashlib.sha256(rows.tobytes()).hexdigest() == expected["sha256"]
