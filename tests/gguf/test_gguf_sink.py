"""GGUF writing: byte for byte what gguf.GGUFWriter writes, in any order, from any thread, or nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qconvert.core.ggml_types import KV, ArrayOf, GGMLType, GGUFTensor, KVType
from qconvert.errors import BadRecipe, OutputExists, QConvertError
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.gguf.writer import GGUFSink, pack_kv, plan_files

gguf = pytest.importorskip("gguf")

KVS = (
    KV.text("general.architecture", "llama"),
    KV("a.u8", KVType.U8, 255),
    KV("a.i8", KVType.I8, -128),
    KV.u16("a.u16", 65535),
    KV("a.i16", KVType.I16, -2),
    KV.u32("a.u32", 4294967295),
    KV.i32("a.i32", -3),
    KV.f32("a.f32", 1e-6),
    KV("a.u64", KVType.U64, 1 << 63),
    KV("a.i64", KVType.I64, -(1 << 62)),
    KV("a.f64", KVType.F64, 1 / 3),
    KV.flag("a.flag", value=False),
    KV.text("a.text", "Grüße \N{ROCKET}"),
    KV.texts("a.texts", ["", "Ġ Ġ", "▁"]),
    KV.i32s("a.i32s", [1, -1, 5]),
    KV.f32s("a.f32s", [0.0, -31740.0]),
    KV.u8s("a.u8s", b"\0\1\xff"),
)
TENSORS = (
    GGUFTensor("output.weight", GGMLType.Q6_K, (9, 256)),
    GGUFTensor("blk.0.ffn_down_exps.weight", GGMLType.Q4_0, (2, 3, 32)),
    GGUFTensor("blk.0.attn_norm.weight", GGMLType.F32, (5,)),
    GGUFTensor("blk.0.attn_q.weight", GGMLType.BF16, (4, 6)),
    GGUFTensor("blk.0.attn_k.weight", GGMLType.F16, (2, 6)),
)


def contents(tensor: GGUFTensor, rng: np.random.Generator) -> np.ndarray:
    """Rows of random bytes in the carrier type."""
    spec = tensor.stored
    return rng.integers(0, 256, spec.nbytes, np.uint8).view(spec.dtype.carrier).reshape(spec.rows, spec.width)


@pytest.fixture
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {tensor.name: contents(tensor, rng) for tensor in TENSORS}


def write_theirs(folder: Path, data: dict[str, np.ndarray], split_max_size: int = 0) -> None:
    """The same content through gguf.GGUFWriter."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_size=split_max_size)
    for entry in KVS[1:]:
        if isinstance(entry.type, ArrayOf):
            kind, item = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(entry.type.item.number)
            writer.add_key_value(entry.key, entry.value, kind, sub_type=item)
        else:
            writer.add_key_value(entry.key, entry.value, gguf.GGUFValueType(entry.type.number))
    for tensor in TENSORS:
        spec = tensor.stored
        rows = data[tensor.name].reshape(spec.shape)
        kind = gguf.GGMLQuantizationType(tensor.type.number)
        raw_shape = None if tensor.type.is_quantized else spec.shape
        writer.add_tensor(tensor.name, rows, raw_shape=raw_shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ours(
    folder: Path, data: dict[str, np.ndarray], threads: int, max_part_bytes: int | None = None
) -> None:
    """Single rows in a shuffled order."""
    jobs = [(t.name, row) for t in TENSORS for row in range(t.stored.rows)]
    np.random.default_rng(threads).shuffle(jobs)  # type: ignore[arg-type]
    sink = GGUFSink(folder, plan_files("m.gguf", KVS, TENSORS, max_part_bytes=max_part_bytes))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: sink.write(job[0], int(job[1]), data[job[0]][int(job[1])][None]), jobs))
    sink.commit()
    sink.publish()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("limit", [None, 2000])
def test_bytes_equal_those_of_gguf(
    tmp_path: Path, data: dict[str, np.ndarray], threads: int, limit: int | None
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    write_ours(ours, data, threads, limit)
    write_theirs(theirs, data, limit or 0)
    assert files_in(ours) == files_in(theirs)
    assert len(files_in(ours)) == (1 if limit is None else 2)


def test_plan_totals_equal_bytes_on_disk(tmp_path: Path, data: dict[str, np.ndarray]) -> None:
    write_ours(tmp_path, data, 1, 2000)
    plans = plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000)
    assert {plan.name: plan.size for plan in plans} == {n: len(b) for n, b in files_in(tmp_path).items()}


def test_what_is_written_reads_back(tmp_path: Path, data: dict[str, np.ndarray]) -> None:
    write_ours(tmp_path, data, 2)
    with GGUFFile(tmp_path / "m.gguf") as file:
        single = {"a.f32", "a.f32s"}
        assert [entry for entry in file.kv.values() if entry.key not in single] == [
            entry for entry in KVS if entry.key not in single
        ]
        assert file.kv["a.f32"].value == np.float32(1e-6)
        assert tuple(file.tensors.values()) == TENSORS
        for name, rows in data.items():
            assert file.read(name, 0, len(rows)).tobytes() == rows.tobytes()


def test_the_first_of_several_parts_may_hold_metadata_only() -> None:
    plans = plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000, metadata_first=True)
    assert [len(plan.specs) for plan in plans] == [0, 2, 3]
    (alone,) = plan_files("m.gguf", KVS, TENSORS, metadata_first=True)
    assert len(alone.specs) == 5


def test_a_header_of_llama_quantize_is_planned_to_the_byte(assets: Path) -> None:
    path = assets / "fixtures" / "gguf" / "tiny-qwen3-Q4_K_M.gguf"
    with GGUFFile(path) as file:
        (plan,) = plan_files(path.name, tuple(file.kv.values()), tuple(file.tensors.values()))
    raw = path.read_bytes()
    assert raw[: len(plan.head)] == plan.head
    assert len(raw) == plan.size


def test_nothing_appears_before_it_is_published(tmp_path: Path, data: dict[str, np.ndarray]) -> None:
    sink = GGUFSink(tmp_path, plan_files("m.gguf", KVS, TENSORS))
    assert list(files_in(tmp_path)) == ["m.gguf.partial"]
    with pytest.raises(ValueError, match="bytes are missing"):
        sink.commit()
    sink.abort()
    assert not files_in(tmp_path)


def test_a_leftover_of_a_killed_run_is_replaced(tmp_path: Path, data: dict[str, np.ndarray]) -> None:
    (tmp_path / "m.gguf.partial").write_bytes(b"half")
    write_ours(tmp_path, data, 1)
    assert list(files_in(tmp_path)) == ["m.gguf"]


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"precious")
    plans = plan_files("m.gguf", KVS, TENSORS)
    with pytest.raises(OutputExists, match=r"m\.gguf: already exists \(8 bytes\)"):
        GGUFSink(tmp_path, plans)
    GGUFSink(tmp_path, plans, overwrite=True).abort()
    assert files_in(tmp_path) == {"m.gguf": b"precious"}


def test_two_runs_do_not_meet(tmp_path: Path, data: dict[str, np.ndarray]) -> None:
    plans = plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000)
    first = GGUFSink(tmp_path, plans)
    for overwrite in (False, True):
        with pytest.raises(QConvertError, match="another run is writing it"):
            GGUFSink(tmp_path, plans, overwrite=overwrite)
    for name, rows in data.items():
        first.write(name, 0, rows)
    first.commit()  # verification reads the files between this and their names
    with pytest.raises(QConvertError, match="another run is writing it"):
        GGUFSink(tmp_path, plans)
    first.publish()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_theirs(theirs, data, 2000)
    found = files_in(theirs)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("m-*")} == found
    GGUFSink(tmp_path, plans, overwrite=True).abort()


WRITER = """
import sys, time
from pathlib import Path
from qconvert.formats.gguf.writer import GGUFSink, plan_files
from qconvert.core.ggml_types import GGMLType, GGUFTensor
GGUFSink(Path(sys.argv[1]), plan_files("m.gguf", [], [GGUFTensor("a", GGMLType.F32, (9, 9))]))
print("half", flush=True)
time.sleep(60)
"""


def test_what_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    plans = plan_files("m.gguf", [], [GGUFTensor("a", GGMLType.F32, (9, 9))])
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"half\n"
        with pytest.raises(QConvertError, match=r"m\.gguf\.partial: another run is writing it"):
            GGUFSink(tmp_path, plans)
        run.kill()
    assert list(files_in(tmp_path)) == ["m.gguf.partial"]
    sink = GGUFSink(tmp_path, plans)
    sink.write("a", 0, np.ones((9, 9), "<f4"))
    sink.commit()
    sink.publish()
    assert list(files_in(tmp_path)) == ["m.gguf"] and (tmp_path / "m.gguf").stat().st_size == plans[0].size


class Killed(BaseException):
    """What no run survives."""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("calls", range(8))
def test_a_rerun_finishes_what_was_killed_while_parts_were_named(
    tmp_path: Path, data: dict[str, np.ndarray], calls: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the n-th call that names or removes a file, whatever it is."""
    write_ours(tmp_path, data, 1, 2000)
    wanted = files_in(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"old") if overwrite else path.unlink()
    left = calls
    with monkeypatch.context() as patched:
        for owner, name in ((os, "link"), (os, "rename"), (os, "replace"), (os, "unlink")):

            def counted(*words: object, _call: object = getattr(owner, name), **options: object) -> object:
                nonlocal left
                if not left:
                    raise Killed
                left -= 1
                return _call(*words, **options)  # type: ignore[operator]

            patched.setattr(owner, name, counted)
        sink = started(tmp_path, data, overwrite)
        with contextlib.suppress(Killed):
            sink.publish()
    for lock in sink._locks.values():  # as the end of its process does
        os.close(lock)
    found = files_in(tmp_path)
    if {name: found.get(name) for name in wanted} == wanted:
        with pytest.raises(OutputExists, match="already exists"):
            started(tmp_path, data, overwrite=False)
    else:
        started(tmp_path, data, overwrite).publish()
    assert files_in(tmp_path) == wanted


def started(folder: Path, data: dict[str, np.ndarray], overwrite: bool) -> GGUFSink:
    plans = plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000)
    sink = GGUFSink(folder, plans, overwrite=overwrite)
    for name, rows in data.items():
        sink.write(name, 0, rows)
    sink.commit()
    return sink


@pytest.mark.parametrize("links", [True, False])
def test_a_name_taken_meanwhile_is_not_overwritten(
    tmp_path: Path, data: dict[str, np.ndarray], links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuses)
    sink = GGUFSink(tmp_path, plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000))
    for name, rows in data.items():
        sink.write(name, 0, rows)
    sink.commit()
    sink.final[0].write_bytes(b"precious")
    with pytest.raises(OutputExists, match=r"m-00001-of-00002\.gguf: already exists \(8 bytes\)"):
        sink.publish()
    sink.abort()
    assert files_in(tmp_path) == {"m-00001-of-00002.gguf": b"precious"}


def test_a_kill_while_parts_are_replaced_leaves_no_mixture(
    tmp_path: Path, data: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plan_files("m.gguf", KVS, TENSORS, max_part_bytes=2000)
    write_ours(tmp_path, data, 1, 2000)
    old = files_in(tmp_path)
    sink = GGUFSink(tmp_path, plans, overwrite=True)
    for tensor in TENSORS:
        sink.write(tensor.name, 0, contents(tensor, np.random.default_rng(1)))
    sink.commit()
    seen: list[set[str]] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append({name for name, raw in files_in(tmp_path).items() if old.get(name) == raw})
        made = replace(self, target)
        seen.append({name for name, raw in files_in(tmp_path).items() if old.get(name) == raw})
        return made

    monkeypatch.setattr(Path, "replace", watched)
    sink.publish()
    assert seen == [{"m-00002-of-00002.gguf"}, set(), set(), set()]
    assert set(files_in(tmp_path)) == set(old)


@pytest.mark.parametrize(
    ("kv", "tensors", "names"),
    [
        ([KV.u32("a", 1), KV.u32("a", 2)], [], "a: this metadata key would be written twice"),
        ([KV.u32("general.alignment", 64)], [], "general.alignment"),
        ([], list(itertools.repeat(TENSORS[0], 2)), "output.weight: this tensor would be written twice"),
        ([], [GGUFTensor("w" * 64, GGMLType.F32, (1,))], "64 bytes; GGUF holds 63"),
        ([], [GGUFTensor("w", GGMLType.F32, (1, 1, 1, 1, 1))], "1 to 4 dimensions"),
        ([], [GGUFTensor("w", GGMLType.Q4_K, (1, 128))], "rows of 128 are not a multiple of q4_k's 256"),
        ([KV.u32("a", -1)], [], "a: -1 does not fit its type"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(kv: list[KV], tensors: list[GGUFTensor], names: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        plan_files("m.gguf", kv, tensors)
    assert names in caught.value.fact


def test_a_metadata_entry_is_spelled_as_the_format_says() -> None:
    assert pack_kv(KV.u16("k", 258)) == b"\1\0\0\0\0\0\0\0k" + b"\2\0\0\0" + b"\2\1"
