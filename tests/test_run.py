"""The laws of a conversion, end to end on real files: exact, repeatable, bounded, all or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.cli import options
from qconvert.convert.runner import BlockDone, Terms, cut, run
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Unquantized
from qconvert.core.protocols import ArrayRows, Reader
from qconvert.core.values import Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.layouts.compressed_tensors import CompressedTensors
from qconvert.ops import Cast, CheckFinite, Quantize, TransposeBlocks
from qconvert.plan.plan import Plan, RowSlice, Unit, whole
from tests.commands import files_of, made, qconvert
from tests.models import EMBED, HEAD, stored, tiny

# q has 18 rows, k and v 6 each, gate and up 50: no number of rows fills the words of zero points.
ODD = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "hidden_size": 64,
    "intermediate_size": 50,
}
# The same, but every row is a multiple of 32 columns.
GROUPED = ODD | {"num_attention_heads": 16, "head_dim": 6, "intermediate_size": 96, "vocab_size": 77}
SCHEMES = ["int4-g32", "int4-asym-g32", "int8-asym-g32", "int3-asym-g32", "int5-asym-g32", "int8-g32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models: odd, grouped, and one of each family, some in several shards."""
    root = tmp_path_factory.mktemp("models")
    tiny(root / "odd", "qwen2", **ODD)
    tiny(root / "grouped", "qwen2", **GROUPED)
    tiny(root / "qwen3", "qwen3", shards=3)
    tiny(root / "qwen2-f32", "qwen2", dtype="f32")
    tiny(root / "llama-f16", "llama", tied=False, biases=True, dtype="f16", shards=2)
    tiny(root / "mistral", "mistral", tied=False)
    tiny(root / "untied", "qwen3", tied=False)
    return root


def weights(folder: Path) -> bytes:
    """The one weight file of a folder."""
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model", ["odd", "qwen3", "qwen2-f32", "llama-f16", "mistral"])
@pytest.mark.parametrize("fusion", ["fuse", "fuse-qkv"])
def test_unfusing_restores_the_bytes(models: Path, tmp_path: Path, model: str, fusion: str) -> None:
    fused = made(fusion, models / model, "-o", tmp_path / "fused")
    assert stored(fused) != stored(models / model)
    back = made("unfuse", fused, "-o", tmp_path / "back")
    assert stored(back) == stored(models / model)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (models / model / "config.json").read_text()
    )


def test_fused_rows_are_the_parts_rows_in_order(models: Path, tmp_path: Path) -> None:
    fused = stored(made("fuse", models / "odd", "-o", tmp_path / "f"))
    parts = stored(models / "odd")
    for prefix, whole_name, names in (
        ("model.layers.1.self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.1.mlp.", "gate_up_proj", ("gate_proj", "up_proj")),
    ):
        for kind in ("weight", "bias") if "attn" in prefix else ("weight",):
            held = [parts[f"{prefix}{name}.{kind}"] for name in names]
            dtype, shape, data = fused[f"{prefix}{whole_name}.{kind}"]
            assert data == b"".join(part[2] for part in held)
            assert (dtype, shape[0], shape[1:]) == ("BF16", sum(p[1][0] for p in held), held[0][1][1:])


@pytest.mark.parametrize("scheme", [*SCHEMES, "int4-asym-channel", "int7-channel"])
def test_unfusing_restores_the_bytes_of_a_quantized_checkpoint(
    models: Path, tmp_path: Path, scheme: str
) -> None:
    model = models / ("odd" if "channel" in scheme else "grouped")
    quantized = made("quantize", model, "--scheme", scheme, "--min-max", "-o", tmp_path / "q")
    fused = made("fuse", quantized, "-o", tmp_path / "f")
    at_once = made(
        *("quantize", model, "--scheme", scheme, "--min-max", "-o", tmp_path / "qf"),
        *("--fuse", "qkv", "--fuse", "gate_up"),
    )
    assert weights(fused) == weights(at_once)
    assert (fused / "config.json").read_text() == (at_once / "config.json").read_text()
    back = made("unfuse", fused, "-o", tmp_path / "back")
    assert weights(back) == weights(quantized)
    assert (back / "config.json").read_text() == (quantized / "config.json").read_text()


def test_tying_and_untying_restores_the_bytes(tmp_path: Path) -> None:
    tied = tiny(tmp_path / "tied")
    untied = made("untie", tied, "-o", tmp_path / "untied")
    arrays = stored(untied)
    assert arrays[HEAD] == arrays[EMBED]
    assert weights(made("tie", untied, "-o", tmp_path / "again")) == weights(tied)
    assert weights(made("untie", tmp_path / "again", "-o", tmp_path / "twice")) == weights(untied)


def test_tying_works_on_a_quantized_checkpoint(models: Path, tmp_path: Path) -> None:
    recipe = ("--bits", 4, "--group-size", 64, "--rule", "embed=int8-g64")
    tied = made("quantize", models / "qwen3", *recipe, "-o", tmp_path / "q")
    untied = made("untie", tied, "-o", tmp_path / "u")
    assert stored(untied)[f"{HEAD}_packed"] == stored(untied)[f"{EMBED}_packed"]
    assert weights(made("tie", untied, "-o", tmp_path / "t")) == weights(tied)


@pytest.mark.parametrize("model", ["odd", "qwen3", "llama-f16"])
@pytest.mark.parametrize("shard_size", ["5GB", "200KB"])
def test_the_plan_tells_every_file_to_the_byte(
    models: Path, tmp_path: Path, model: str, shard_size: str
) -> None:
    wish = ("quantize", models / model, "--scheme", "int4-asym-channel", "--shard-size", shard_size)
    planned = qconvert(*wish, "--dry-run", "--json").json
    out = made(*wish, "-o", tmp_path / "out")
    found = {path.name: path.stat().st_size for path in out.glob("model*")}
    assert {file["name"]: file["bytes"] for file in planned["output"]["files"]} == found
    shapes = 16 * sum(name.endswith("_shape") for name in stored(out))
    assert planned["output"]["bytes"] == sum(len(data) for _, _, data in stored(out).values()) - shapes
    manifest = json.loads((out / "qconvert.json").read_text())
    assert {file["name"]: file["bytes"] for file in manifest["files"]} == found
    assert manifest["totals"]["bytes"] == planned["output"]["bytes"]


@pytest.fixture
def any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-memory small enough to cut these small models into many blocks."""
    monkeypatch.setattr(options.MEMORY, "least", "0B")


@pytest.mark.usefixtures("any_memory")
@pytest.mark.parametrize(
    "wish",
    [
        ("quantize", "--scheme", "int3-asym-g32", "--rule", "embed=int8-g32", "--shard-size", "60KB"),
        ("fuse", "--dtype", "f16"),
    ],
    ids=["quantize", "fuse"],
)
def test_threads_and_memory_change_no_byte(models: Path, tmp_path: Path, wish: tuple[str, ...]) -> None:
    outputs = []
    for jobs, memory in ((1, "1GB"), (2, "1GB"), (8, "1GB"), (1, "1KB"), (8, "50KB")):
        folder = tmp_path / f"{jobs}-{memory}" / "out"
        how = ("-j", jobs, "--max-memory", memory, "-o", folder)
        outputs.append(files_of(made(wish[0], models / "grouped", *wish[1:], *how)))
    assert len(outputs[0]) > 5
    for other in outputs[1:]:
        assert {n for n in other if other[n] != outputs[0][n]} == set()


def test_shards_are_named_and_indexed_like_the_hubs(models: Path, tmp_path: Path) -> None:
    out = made("fuse", models / "qwen3", "--shard-size", "500KB", "-o", tmp_path / "out")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(out)) and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in stored(out).values())
    assert stored(made("unfuse", out, "-o", tmp_path / "back")) == stored(models / "qwen3")


class Stop(BaseException):
    """Something that no error handling expects."""


@pytest.mark.usefixtures("any_memory")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, Stop])
def test_an_end_at_any_block_leaves_nothing(
    models: Path, tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.convert import execute as module

    blocks = 0

    def events(*args: Any, **kwargs: Any) -> Iterator[BlockDone]:
        nonlocal blocks
        for done in run(*args, **kwargs):
            blocks += 1
            yield done

    def ending(at: int) -> Any:
        def events_until(*args: Any, **kwargs: Any) -> Iterator[BlockDone]:
            for number, done in enumerate(run(*args, **kwargs)):
                if number == at:
                    raise error
                yield done

        return events_until

    monkeypatch.setattr(module, "run", events)
    wish = ("quantize", models / "odd", "--scheme", "int4-channel", "-j", 2, "--max-memory", "20KB", "-q")
    assert qconvert(*wish, "-o", tmp_path / "whole").code == 0
    assert blocks > 30
    for at in range(0, blocks, 7):
        monkeypatch.setattr(module, "run", ending(at))
        with contextlib.suppress(Stop):
            assert qconvert(*wish, "-o", tmp_path / "out").code in (1, 130)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_no_thread_is_left_when_the_files_are_taken_away(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qconvert.convert.execute import execute, open_model, prepare
    from qconvert.convert.job import RunOptions
    from qconvert.formats.io.planned_files import FileSink
    from qconvert.plan.recipe import Recipe
    from qconvert.plan.request import Request

    request = Request("fuse", Recipe(fuse=("qkv",)))
    job = prepare(open_model(str(models / "untied")), request, RunOptions(jobs=2))
    before, abort, seen = threading.active_count(), FileSink.abort, []

    def watched(sink: FileSink) -> None:
        seen.append(threading.active_count())
        abort(sink)

    def fails(done: BlockDone) -> None:
        raise Stop

    monkeypatch.setattr(FileSink, "abort", watched)
    with pytest.raises(Stop):
        execute(job, tmp_path / "out", fails)
    assert seen == [before] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_and_the_next_run_succeeds(
    models: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    script = (
        "import qconvert.convert.containers.safetensors_folder as c, time\n"
        "real = c.verify_files\n"
        "c.verify_files = lambda *a: (print('writing', flush=True), time.sleep(20))\n"
        "from qconvert.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "fuse", str(models / "odd"), "-o", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(kind)
        _, err = process.communicate(timeout=10)
    assert not (tmp_path / "out").exists()
    if kind is not signal.SIGKILL:
        assert process.returncode == 130 and "Interrupted" in err and not list(tmp_path.iterdir())
    made("fuse", models / "odd", "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The runner alone, on arrays in memory.


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

    def array(self, name: str) -> np.ndarray:
        """What was written under a name, which must be all its rows, each once."""
        runs = sorted(self.written[name], key=lambda item: item[0])
        assert [start for start, _ in runs] == list(np.cumsum([0, *[len(rows) for _, rows in runs]])[:-1])
        return np.concatenate([rows for _, rows in runs])

    def commit(self) -> None: ...

    def abort(self) -> None: ...


def logical(name: str, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(name, shape, Unquantized(DType.F32))


TERMS = Terms(jobs=2, max_memory=1 << 30, checksums=True, allow_nonfinite=False, most_code_error=0.1)


def carried_out(plan: Plan, source: Arrays, **how: Any) -> Arrays:
    sink, layout = Arrays(), CompressedTensors()
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
    turned = replace(turned, output=replace(turned.output, shape=(39, 8, 6)))
    checked = replace(turned, ops=(CheckFinite(), *turned.ops))
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
    terms = replace(TERMS, jobs=jobs, max_memory=max_memory)
    for _ in run(Plan(units), Reader(source, watched), watched, Arrays(), terms):
        pass
    row = 64 * 4  # a row's bytes are the least that it can cost
    assert watched.rows == 0 and 1 <= watched.most <= max(1, max_memory // row)


def test_events_add_up_and_the_last_of_each_unit_is_marked() -> None:
    source = Arrays({"a": np.ones((100, 8), "f4"), "b": np.ones((3, 8), "f4")})
    units = tuple(Unit((whole(t),), (), t) for t in (logical(n, s.shape) for n, s in source.specs.items()))
    layout = CompressedTensors()
    terms = replace(TERMS, jobs=4, max_memory=2000)
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
