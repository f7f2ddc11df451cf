"""The runner alone, on arrays in memory: blocks, budgets, events, and numbers that are none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.convert import runner
from qconvert.convert.batches import batches
from qconvert.convert.blocks import Block
from qconvert.convert.outcome import BlockDone
from qconvert.convert.runner import Terms, cut, run
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Unquantized
from qconvert.core.protocols import ArrayRows, Reader
from qconvert.core.values import Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.layouts.compressed_tensors import CompressedTensors
from qconvert.ops import Cast, CheckFinite, Quantize, TransposeBlocks
from qconvert.plan.plan import Plan, RowSlice, Unit, whole
from tests.support.commands import made, qconvert
from tests.support.models import tiny


class Arrays:
    """A source and a sink in memory; every written row is counted."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self.arrays = dict(arrays or {})
        self.written: dict[str, list[tuple[int, np.ndarray]]] = {}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(name, DType.F32, array.shape) for name, array in self.arrays.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        spec = self.specs[name]
        return self.arrays[name].reshape(spec.rows, spec.width)[start:stop].copy()

    def write(self, name: str, start: int, rows: np.ndarray, column: int = 0) -> None:
        assert column == 0, "packed layouts write whole rows"
        self.written.setdefault(name, []).append((start, rows.copy()))

    def write_all(self, arrays: Iterable[ArrayRows]) -> None:
        for each in arrays:
            self.write(each.name, each.start, each.rows, each.column)

    def array(self, name: str) -> np.ndarray:
        """What was written under a name, which must be all its rows, each once."""
        runs = sorted(self.written[name], key=lambda item: item[0])
        assert [start for start, _ in runs] == list(np.cumsum([0, *[len(rows) for _, rows in runs]])[:-1])
        return np.concatenate([rows for _, rows in runs])

    def commit(self) -> None: ...

    def abort(self) -> None: ...


def logical(name: str, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(name, shape, Unquantized(DType.F32))


TERMS = Terms(
    jobs=2,
    max_memory=1 << 30,
    block_bytes=16 << 20,
    checksums=True,
    allow_nonfinite=False,
    most_code_error=0.1,
)


def carried_out(plan: Plan, source: Arrays, **how: Any) -> Arrays:
    sink, layout = Arrays(), CompressedTensors()
    if "max_memory" in how:
        how["block_bytes"] = max(1, how["max_memory"] // 4)
    for _ in run(plan, Reader(source, layout), layout, sink, replace(TERMS, **how)):
        pass
    return sink


def test_stacking_and_cutting_meet_the_right_rows_whatever_the_blocks() -> None:
    random = np.random.default_rng(0)
    source = Arrays({n: random.random((rows, 5), "f4") for n, rows in (("a", 7), ("b", 1), ("c", 30))})
    a, b, c = (logical(n, s.shape) for n, s in source.specs.items())
    pieces = (RowSlice(a, 2, 7), whole(b), RowSlice(c, 10, 13), RowSlice(c, 0, 30))
    unit = Unit(pieces, (), logical("out", (39, 5)))
    arrays = source.arrays
    wanted = np.concatenate([arrays["a"][2:], arrays["b"], arrays["c"][10:13], arrays["c"]])
    for max_memory in (1, 200, 500, 1000, 1 << 20):
        sink = carried_out(Plan((unit,)), source, max_memory=max_memory)
        assert np.array_equal(sink.array("out"), wanted)


@pytest.mark.parametrize("max_memory", [1, 20_000, 1 << 20])
def test_rows_that_are_turned_come_from_other_rows(max_memory: int) -> None:
    """Every 6 rows of 8 become 8 rows of 6, however the tensor is cut for memory."""
    source = Arrays({"x": np.random.default_rng(0).random((6 * 40, 8), "f4")})
    read = Unit((RowSlice(logical("x", (240, 8)), 6, 240),), (), logical("y", (234, 8)))
    turned = read.then(TransposeBlocks(6, 8))
    turned = turned._replace(output=replace(turned.output, shape=(39, 8, 6)))
    checked = turned._replace(ops=(CheckFinite(), *turned.ops))
    found = carried_out(Plan((checked,)), source, max_memory=max_memory).array("y")
    wanted = source.arrays["x"][6:].reshape(39, 6, 8).swapaxes(1, 2)
    assert np.array_equal(found.reshape(39, 8, 6), wanted)


def test_empty_tensors_and_scalars_pass() -> None:
    source = Arrays(
        {"none": np.zeros((0, 4), "f4"), "wide": np.zeros((3, 0), "f4"), "one": np.ones((1,), "f4")}
    )
    units = tuple(
        Unit((whole(t),), (CheckFinite(),), t) for t in (logical(n, s.shape) for n, s in source.specs.items())
    )
    sink = carried_out(Plan(units), source)
    assert sink.array("none").shape == (0, 4) and sink.array("wide").shape == (3, 0)
    assert sink.array("one").tolist() == [[1.0]]


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8])
def test_blocks_cover_all_rows_and_start_on_whole_words(bits: int) -> None:
    encoding = AffineInt(bits, 32, symmetric=False, scale_dtype=DType.F32)
    tensor = logical("w.weight", (1000, 64))
    unit = Unit((whole(tensor),), (), tensor).then(Quantize(encoding, search=False))
    for limit in (1, 10_000, 100_000, 1 << 24):
        blocks = cut(unit, CompressedTensors(), limit)
        assert [block.start for block in blocks] == [0, *[block.stop for block in blocks[:-1]]]
        assert blocks[-1].stop == 1000 and all(block.start * bits % 32 == 0 for block in blocks)
        least = CompressedTensors().row_alignment(unit.output)
        assert all(block.cost <= limit or block.stop - block.start <= least for block in blocks)


class Watched(CompressedTensors):
    """Counts the rows that are between reading and writing, all threads together."""

    def __init__(self) -> None:
        self.rows = self.most = 0
        self.lock = threading.Lock()

    def _count(self, rows: int) -> None:
        with self.lock:
            self.rows += rows
            self.most = max(self.most, self.rows)

    def decode(self, tensor: ModelTensor, source: Any, start: int, stop: int) -> Value:
        self._count(stop - start)
        time.sleep(0.001)
        return super().decode(tensor, source, start, stop)

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        yield from super().encode(tensor, start, value)
        self._count(-value.rows)


@pytest.mark.parametrize("jobs", [1, 3, 8])
@pytest.mark.parametrize("max_memory", [1, 10_000, 1_000_000])
def test_no_more_rows_are_in_flight_than_the_budget_holds(jobs: int, max_memory: int) -> None:
    source = Arrays({"w": np.ones((70, 64), "f4"), "v": np.ones((70, 64), "f4")})
    units = tuple(Unit((whole(t),), (), t) for t in (logical(n, s.shape) for n, s in source.specs.items()))
    watched = Watched()
    terms = replace(TERMS, jobs=jobs, max_memory=max_memory, block_bytes=max_memory // (2 * jobs))
    for _ in run(Plan(units), Reader(source, watched), watched, Arrays(), terms):
        pass
    row = 64 * 4  # a row's bytes are the least that it can cost
    assert watched.rows == 0 and 1 <= watched.most <= max(1, max_memory // row)


def test_events_add_up_and_the_last_of_each_unit_is_marked() -> None:
    source = Arrays({"a": np.ones((100, 8), "f4"), "b": np.ones((3, 8), "f4")})
    units = tuple(Unit((whole(t),), (), t) for t in (logical(n, s.shape) for n, s in source.specs.items()))
    layout = CompressedTensors()
    terms = replace(TERMS, jobs=4, max_memory=2000, block_bytes=250)
    events = list(run(Plan(units), Reader(source, layout), layout, Arrays(), terms))
    assert len(events) > 5 and sum(event.bytes_read for event in events) == 103 * 8 * 4
    ends = [event.unit.output.name for event in events if event.last]
    assert sorted(ends) == ["a", "b"]
    assert sum(part.rows for event in events for part in event.parts) == 103


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_number_that_is_none_is_found_in_the_tensor_that_was_read(bad: float, quantized: bool) -> None:
    source = Arrays({"a": np.ones((40, 32), "f4"), "b": np.ones((40, 32), "f4")})
    source.arrays["b"][33, 7] = bad
    a, b = (logical(n, s.shape) for n, s in source.specs.items())
    encoding = AffineInt(4, 32, symmetric=True, scale_dtype=DType.F32)
    op = Quantize(encoding, search=False) if quantized else CheckFinite()
    unit = Unit((RowSlice(a, 5, 40), RowSlice(b, 10, 40)), (), logical("w.weight", (65, 32))).then(op)
    for max_memory in (1, 1 << 30):
        with pytest.raises(
            CorruptCheckpoint, match=r"^b: NaN or Inf at row 33, column 7 \(flat index 1063\)"
        ):
            carried_out(Plan((unit,)), source, max_memory=max_memory)
    carried_out(Plan((unit,)), source, allow_nonfinite=True)


def test_what_a_narrower_type_cannot_hold_is_refused() -> None:
    source = Arrays({"w": np.full((4, 32), 1e6, "f4")})
    unit = Unit((whole(logical("w", (4, 32))),), (), logical("w", (4, 32))).then(Cast(DType.F16))
    with pytest.raises(BadRecipe, match=r"^w: 128 numbers do not fit f16") as caught:
        carried_out(Plan((unit,)), source)
    assert "--dtype bf16" in str(caught.value.hint)


@pytest.mark.parametrize("scheme", ["int8-g32", "int4-asym-g64", "int3-channel"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_numbers_beyond_the_largest_are_refused_though_their_scales_are_finite(
    tmp_path: Path, scheme: str, dtype: str
) -> None:
    from safetensors.torch import load_file, save_file

    model = made(
        "quantize", tiny(tmp_path / "m", num_hidden_layers=1), "--scheme", scheme, "-o", tmp_path / "q"
    )
    arrays = load_file(model / "model.safetensors")
    arrays["model.layers.0.self_attn.q_proj.weight_scale"][3] = 3e38
    save_file(arrays, model / "model.safetensors", {"format": "pt"})
    ran = qconvert("dequantize", model, "--dtype", dtype, "-q", "-o", tmp_path / "out")
    assert ran.code == 1 and "self_attn.q_proj.weight: NaN or Inf at row 3, column " in ran.err
    assert not (tmp_path / "out").exists()
    if dtype != "f16":  # which does not hold the finite ones among them either
        made("dequantize", model, "--dtype", dtype, "-o", tmp_path / "out", "--allow-nonfinite")


@pytest.mark.parametrize(("value", "command"), [(1e6, "dequantize"), (3e38, "dequantize"), (1e6, "fuse")])
def test_float16_is_refused_wherever_it_is_too_narrow(tmp_path: Path, value: float, command: str) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    model = tiny(tmp_path / "m", num_hidden_layers=1, changes={name: np.full((256, 256), value, "f4")})
    if command == "dequantize":
        model = made("quantize", model, "--bits", 8, "-o", tmp_path / "q")
    ran = qconvert(command, model, "--dtype", "f16", "-q", "-o", tmp_path / "out")
    assert ran.code == 1 and f"Error: {name}" in ran.err and " do not fit f16" in ran.err
    assert not (tmp_path / "out").exists()


SMALL = {
    "symmetric": Quantize(AffineInt(4, 32, symmetric=True, scale_dtype=DType.BF16), search=False),
    "searched": Quantize(AffineInt(3, 32, symmetric=False, scale_dtype=DType.F16), search=True),
    "no whole words": Quantize(AffineInt(3, None, symmetric=True, scale_dtype=DType.F32), search=False),
    "checked": CheckFinite(),
    "cast": Cast(DType.F16),
}


def small_units(source: Arrays) -> tuple[Unit, ...]:
    """Units of the kinds above by turns, each of a tensor of its own, of two shapes."""
    random, units = np.random.default_rng(0), []
    for number in range(60):
        kind, shape = list(SMALL)[number % len(SMALL)], ((32, 64), (96, 32))[number % 2]
        shape = (32, 36) if kind == "no whole words" else shape
        source.arrays[f"{number}"] = random.normal(0, 1 + number, shape).astype("f4")
        tensor = logical(f"{number}", shape)
        units.append(Unit((whole(tensor),), (), replace(tensor, name=f"{number}.w")).then(SMALL[kind]))
    return tuple(units)


@pytest.mark.parametrize("block_bytes", [1 << 24, 1 << 19])
def test_tensors_made_together_are_those_made_alone(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    source, layout = Arrays(), CompressedTensors()
    plan, terms = Plan(small_units(source)), replace(TERMS, block_bytes=block_bytes)
    runs, sizes = [], []
    for together in (True, False):
        sink = Arrays()
        if not together:
            monkeypatch.setattr(runner, "batches", lambda blocks, limit: blocks)
        else:
            sizes = [len(each.alone) for each in batches(ready(plan, layout, block_bytes), block_bytes)]
        events = list(run(plan, Reader(source, layout), layout, sink, terms))
        runs.append((sorted(map(said, events)), {name: sink.array(name).tolist() for name in sink.written}))
    assert runs[0] == runs[1]
    assert sum(sizes) == len(plan.units) and max(sizes) >= 5


def ready(plan: Plan, layout: CompressedTensors, limit: int) -> list[Block]:
    return [block for unit in plan.units for block in cut(unit, layout, limit)]


def said(done: BlockDone) -> str:
    """All that an event says, but the time that it took."""
    return f"{done.unit.output.name} {replace(done, unit=None, seconds=0.0)}"  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [37, 33])
def test_of_tensors_made_together_the_one_with_a_flaw_is_named(bad: int) -> None:
    source = Arrays()
    plan = Plan(small_units(source))
    source.arrays[f"{bad}"][5, 7] = np.nan
    with pytest.raises(CorruptCheckpoint, match=rf"^{bad}: NaN or Inf at row 5, column 7 "):
        carried_out(plan, source, jobs=1)
    carried_out(plan, source, allow_nonfinite=True)


def test_of_tensors_made_together_one_that_does_not_fit_is_refused() -> None:
    source = Arrays()
    plan = Plan(small_units(source))
    source.arrays["34"][:] = 1e6
    with pytest.raises(BadRecipe, match=r"^34: \d+ numbers do not fit f16"):
        carried_out(plan, source, jobs=1)
