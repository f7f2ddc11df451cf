"""Planned files: any order, any number of threads, all rows or none."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import QConvertError
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io import planned_files
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.io.planned_files import FilePlan, FileSink

SPECS = [
    TensorSpec("a", DType.F32, (50, 7)),
    TensorSpec("b", DType.U8, (301,)),
    TensorSpec("c", DType.I8, (0, 3)),
]


def rows_of(spec: TensorSpec) -> np.ndarray:
    return np.arange(spec.count).astype(spec.dtype.carrier).reshape(spec.rows, spec.width)


def fill(sink: FileSink, threads: int) -> None:
    """Write all rows in pieces of three, in an order that depends on the number of threads."""
    pieces = [(spec, start) for spec in SPECS for start in range(0, spec.rows, 3)]
    random.Random(threads).shuffle(pieces)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p: sink.write(p[0].name, p[1], rows_of(p[0])[p[1] : p[1] + 3]), pieces))


def test_the_bytes_do_not_depend_on_threads_or_order(tmp_path: Path) -> None:
    written = []
    for threads in (1, 2, 8):
        folder = tmp_path / str(threads)
        folder.mkdir()
        sink = FileSink(folder, plan_files(SPECS, shard_size=400))
        fill(sink, threads)
        sink.commit()
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1] == written[2]
    assert {name: len(blob) for name, blob in written[0].items()} == {
        file.name: file.size for file in plan_files(SPECS, shard_size=400)
    }


def test_commit_asks_for_every_row_once(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, plan_files(SPECS))
    with pytest.raises(ValueError, match="a: 1400 of 1400 bytes are missing"):
        sink.commit()
    fill(sink, 1)
    sink.write("b", 300, rows_of(SPECS[1])[:1])
    with pytest.raises(ValueError, match="b: -1 of 301 bytes are missing"):
        sink.commit()
    sink.abort()


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 2, 0, 6), (0, 2, 0, 6)],  # row, rows, column, columns
        [(0, 3, 0, 6), (2, 1, 0, 6)],
        [(1, 3, 0, 6), (3, 1, 0, 6)],
        [(0, 4, 0, 2), (0, 4, 0, 4)],
        [(0, 4, 0, 4), (0, 4, 3, 2)],
        [(0, 2, 0, 3), (0, 2, 0, 3), (0, 4, 3, 3)],
    ],
)
def test_rows_written_twice_do_not_stand_for_others(
    tmp_path: Path, runs: list[tuple[int, int, int, int]]
) -> None:
    sink = FileSink(tmp_path, plan_files([TensorSpec("w", DType.F32, (4, 6))]))
    for row, rows, column, columns in runs:
        sink.write("w", row, np.ones((rows, columns), "<f4"), column)
    with pytest.raises(ValueError, match=r"w: row \d, column \d where \d, \d was missing"):
        sink.commit()
    sink.abort()


@pytest.mark.parametrize(
    ("name", "start", "rows"),
    [
        ("a", 49, np.zeros((2, 7), "<f4")),
        ("a", -1, np.zeros((1, 7), "<f4")),
        ("a", 0, np.zeros((1, 8), "<f4")),
        ("a", 0, np.zeros(7, "<f4")),
        ("a", 0, np.zeros((1, 7), "<f8")),
        ("a", 0, np.zeros((1, 7), "<i4")),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, name: str, start: int, rows: np.ndarray) -> None:
    sink = FileSink(tmp_path, plan_files(SPECS))
    with pytest.raises(ValueError, match="a: "):
        sink.write(name, start, rows)
    sink.abort()


def test_rows_need_not_be_contiguous(tmp_path: Path) -> None:
    spec = TensorSpec("w", DType.F32, (4, 6))
    sink = FileSink(tmp_path, plan_files([spec]))
    sink.write("w", 0, np.asfortranarray(rows_of(spec)))
    sink.commit()
    assert (tmp_path / "model.safetensors").read_bytes().endswith(rows_of(spec).tobytes())


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    sink = FileSink(tmp_path, plan_files(SPECS, shard_size=400))
    assert len(list(tmp_path.iterdir())) == 4
    sink.abort()
    sink.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_files_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00002.safetensors").touch()
    with pytest.raises(
        QConvertError, match=r"model-00002-of-00002\.safetensors: cannot be created: File exists"
    ):
        FileSink(tmp_path, plan_files(SPECS, shard_size=1400))
    with pytest.raises(QConvertError, match=r"needs \d+\.\d\d GB, \d+\.\d\d GB free"):
        FileSink(tmp_path, [FilePlan("huge", tuple, ArrayTable(), 10**18)])
    assert [path.name for path in tmp_path.iterdir()] == ["model-00002-of-00002.safetensors"]


def test_columns_are_written_side_by_side(tmp_path: Path) -> None:
    spec = TensorSpec("w", DType.F32, (4, 6))
    sink = FileSink(tmp_path, plan_files([spec]))
    rows = rows_of(spec)
    sink.write("w", 0, rows[:, 4:], 4)
    with pytest.raises(ValueError, match="w: "):
        sink.write("w", 0, rows[:, 4:], 5)
    sink.write("w", 0, rows[:2, :4])
    sink.write("w", 2, rows[2:, :4], 0)
    sink.commit()
    assert (tmp_path / "model.safetensors").read_bytes().endswith(rows.tobytes())


def test_files_that_were_written_are_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(planned_files, "sync_data", lambda fd, file: flushed.append(file))
    sink = FileSink(tmp_path, plan_files(SPECS, shard_size=1400))
    sink.flush()
    assert len(set(flushed)) == len(flushed) == 3  # two headers, and the index
    flushed.clear()
    sink.write("b", 0, rows_of(SPECS[1]))
    sink.flush()
    sink.flush()
    assert flushed == ["model-00002-of-00002.safetensors"]
    sink.abort()


def test_what_was_written_is_read_back_and_gone_on_with(tmp_path: Path) -> None:
    spec, plans = TensorSpec("w", DType.F32, (4, 6)), plan_files([TensorSpec("w", DType.F32, (4, 6))])
    rows, sink = rows_of(spec), FileSink(tmp_path, plans)
    sink.write("w", 0, rows[:, :4])
    sink.suspend()
    sink = FileSink(tmp_path, plans, resumed=True)
    assert np.array_equal(sink.read("w", 1, 3, columns=(1, 4)), rows[1:3, 1:4])
    with pytest.raises(ValueError, match="bytes are missing"):
        sink.commit()
    sink.restore("w", 0, 4, 4)
    sink.write("w", 0, rows[:, 4:], 4)
    assert np.array_equal(sink.read("w", 0, 4), rows)
    sink.commit()
    assert (tmp_path / "model.safetensors").read_bytes().endswith(rows.tobytes())
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(QConvertError, match="has 5 bytes, not"):
        FileSink(tmp_path, plans, resumed=True)
