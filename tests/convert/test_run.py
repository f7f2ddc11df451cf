"""The laws of a conversion, end to end on real files: exact, repeatable, bounded, all or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qconvert.cli import options
from qconvert.convert.outcome import BlockDone
from qconvert.convert.runner import run
from tests.support.commands import files_of, made, qconvert
from tests.support.models import EMBED, HEAD, stored, tiny

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
    assert {file["name"]: file["bytes"] for file in planned["files"]} == found
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
def test_an_end_at_any_block_leaves_nothing_but_what_can_be_gone_on_with(
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
            assert qconvert(*wish, "-o", tmp_path / "out", "--restart").code in (1, 130)
        kept = {"out.partial"} if at and error is not Stop else set()
        assert {path.name for path in tmp_path.iterdir()} == {"whole", *kept}
    monkeypatch.setattr(module, "run", run)
    made(*wish, "-o", tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


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
    before, suspend, seen = threading.active_count(), FileSink.suspend, []

    def watched(sink: FileSink) -> None:
        seen.append(threading.active_count())
        suspend(sink)

    def fails(done: BlockDone) -> None:
        raise Stop

    monkeypatch.setattr(FileSink, "suspend", watched)
    with pytest.raises(Stop):
        execute(job, tmp_path / "out", fails)
    assert seen == [before] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_what_the_next_run_goes_on_with(
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
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(kind)
        _, err = process.communicate(timeout=10)
    assert not (tmp_path / "out").exists()
    if kind is not signal.SIGKILL:
        assert process.returncode == 128 + kind
        assert err.endswith("stopped at 99 %; run the same command to continue\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    ran = qconvert("fuse", models / "odd", "-o", tmp_path / "out")
    assert ran.code == 0 and f"resuming {tmp_path / 'out.partial'}: 99 % was done\n" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
