"""Evaluations of models larger than memory: the figures of a run in memory, within what was asked for."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.memory_limit import MemoryLimit
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.errors import BadRecipe
from qconvert.evaluate.in_turn import LayersInTurn
from qconvert.evaluate.lockstep import Track, run_lockstep
from qconvert.evaluate.memory import EvalMemory, EvalWork, fitted
from qconvert.evaluate.model_bytes import HeadForm, ModelBytes
from qconvert.evaluate.models import open_model
from qconvert.evaluate.protocols import Window, protocol_named
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from tests.calibrate.test_calibration_memory import GB, LLAMA_8B
from tests.support.commands import qconvert, strict_json
from tests.support.models import byte_tokenizer, tiny, tiny_config, tiny_shapes

IDS_N = np.random.default_rng(0).integers(0, 320, 150)
LLAMA = ModelBytes.of_float32(DecoderConfig.from_hf(LLAMA_8B))
FORMS = {
    "int4": ("quantize", "--bits", 4),
    "two bits": ("quantize", "--bits", 2, "--fuse", "qkv"),
    "gguf": ("to-gguf", "--type", "q4_k_m"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {"bf16": tiny(folder / "m", "qwen3"), "untied": tiny(folder / "u", "qwen2", tied=False)}
    for name, (command, *how) in FORMS.items():
        found[name] = folder / (f"{name}.gguf" if name == "gguf" else name)
        ran = qconvert(command, found["bf16"], *how, "-o", found[name], "-q")
        assert ran.code == 0, ran.err
    return found


def scores(
    paths: list[Path], windows: list[Window], memory: EvalMemory | None, scratch: Path, **how: Any
) -> list[np.ndarray]:
    """All scores of a run, with the first model again as its echo."""
    opened = [
        open_model(open_checkpoint(path), path.name, in_turn=memory is not None, **how) for path in paths
    ]
    tracks = [*map(Track, opened), Track(opened[0], echo=True)]
    run = {} if memory is None else {"run": LayersInTurn(memory, scratch)}
    told: list[float] = []
    done = run_lockstep(
        tracks,
        IDS_N,
        windows,
        compared=True,
        batch_tokens=48,
        progress=lambda done, total: told.append(done),
        **run,  # type: ignore[arg-type]
    )
    assert done == len(windows) == told[-1] and told == sorted(told)
    assert all(track.tokens == sum(w.stop - w.start for w in windows) for track in tracks)
    return [np.concatenate(kind) for track in tracks for kind in (track.nll, track.top, track.kl) if kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["untied", *FORMS])
def test_scores_are_those_of_a_run_in_memory_to_the_bit(
    name: str, dtype: torch.dtype, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is held: with several parts, windows of two shapes, and a last one of two scored tokens."""
    monkeypatch.setattr("qconvert.evaluate.memory.PART_TOKENS", 100)
    windows = protocol_named("hf-stride", 16).windows(75)
    windows[-1] = replace(windows[-1], scored=windows[-1].stop - 2)
    windows += [Window(75, 99, 98), Window(99, 123, 122)]
    paths = [models["untied" if name == "untied" else "bf16"], models[name]]
    wanted = scores(paths, windows, None, tmp_path, dtype=dtype)
    plan = fitted(EvalWork([LLAMA], 1, 16, 75), MemoryLimit(1 << 40))
    for heads, holds in ((HeadForm.PLACED, True), (HeadForm.STORED, False), (HeadForm.STREAMED, False)):
        memory = replace(plan, heads=heads, holds_states=holds)
        found = scores(paths, windows, memory, tmp_path, dtype=dtype)
        assert len(found) == len(wanted) == 8
        assert all(map(np.array_equal, found, wanted)), (heads, holds)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_keeps_what_it_has_scored(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the layers of the second part pass; nothing is left on disk."""
    monkeypatch.setattr("qconvert.evaluate.memory.PART_TOKENS", 32)
    windows = [Window(at, at + 16, at + 1) for at in range(0, 96, 16)]

    def run(stop: float) -> tuple[int, np.ndarray]:
        track = Track(open_model(open_checkpoint(models["bf16"]), "m", in_turn=True))
        memory = fitted(EvalWork([LLAMA], 1, 16, 96), MemoryLimit(1 << 40))

        def tell(done: float, total: int) -> None:
            if done > stop:
                raise KeyboardInterrupt

        how = LayersInTurn(replace(memory, holds_states=False), tmp_path)
        done = run_lockstep([track], IDS_N, windows, compared=False, batch_tokens=16, progress=tell, run=how)
        return done, np.concatenate(track.nll)

    (some, first), (every, whole) = run(2.2), run(100)
    assert (some, every) == (2, 6) and np.array_equal(first, whole[: len(first)])
    with pytest.raises(KeyboardInterrupt):
        run(0.1)
    assert not list(tmp_path.iterdir())


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A bf16 checkpoint of zeros in one file that takes no disk."""
    header, at = {}, 0
    for name, shape in tiny_shapes(config).items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + 2 * int(np.prod(shape)))}
        at = header[name]["data_offsets"][1]
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


def test_8b_models_are_compared_in_4_gb(tmp_path: Path) -> None:
    """A bf16 checkpoint of that shape beside another one, on 64 windows of 2,048 tokens."""
    folder = sparse_checkpoint(tmp_path / "8b", LLAMA_8B | {"head_dim": 128})
    config, weights = DecoderConfig.from_hf(LLAMA_8B), CheckpointWeights(open_checkpoint(folder))
    model = ModelBytes.of(config, weights, torch.float32, Layout.REFERENCE)
    layer, table = 4 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096), 128256 * 4096
    assert model.layer == layer and model.heads[HeadForm.STORED] == 2 * table
    assert model.weights == 32 * layer // 2 + 2 * table and model.reading == 2 * 2 * 2 * 14336 * 4096
    work = EvalWork([model, model], tracks=2, window=2048, tokens=64 * 2048)
    memory = fitted(work, MemoryLimit(4 * GB, 500_000_000))
    assert memory.peak <= 4 * GB and memory.heads is HeadForm.STORED and not memory.holds_states
    assert memory.states == 2 * 64 * 2048 * 4096 * 4 and "in a file" in memory.lines[1]
    ample = fitted(work, MemoryLimit(100 * GB, 500_000_000))
    assert ample.heads is HeadForm.PLACED and ample.holds_states
    with pytest.raises(BadRecipe) as refused:
        fitted(work, MemoryLimit(2 * GB, 500_000_000))
    needed = int(refused.value.hint.split("--max-memory ")[1].split("MB")[0]) * 1_000_000
    assert re.search(r"evaluating needs at least 3,\d{3} MB, 2,000 MB was asked", refused.value.fact)
    assert fitted(work, MemoryLimit(needed, 500_000_000)).heads is HeadForm.STREAMED
    with pytest.raises(BadRecipe):
        fitted(work, MemoryLimit(needed - 70_000_000, 500_000_000))


# The command line, then the most that was resident, on stderr: what the system counts, not what is reported.
PEAK = """
import re, sys
from qconvert.cli import main
try:
    main(sys.argv[1:])
finally:
    kilobytes = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    print(int(kilobytes) * 1024, file=sys.stderr)
"""


def test_the_command_keeps_within_what_was_asked(tmp_path: Path) -> None:
    """0.9 GB of weights in float32, for which a process of 0.4 GB that was given 0.75 has no room."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14}
    model = sparse_checkpoint(tmp_path / "m", tiny_config("qwen3", **sizes))
    byte_tokenizer().save(str(model / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(8)))
    words = ("eval", "perplexity", model, "--text", tmp_path / "text.txt", "--context", 16, "--json")
    held_to = ("--max-memory", "750MB", "-o", tmp_path / "report")
    whole, held = (
        subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, (*words, *how))],
            check=False, capture_output=True, text=True, timeout=240,
        )
        for how in ((), held_to)
    )  # fmt: skip
    little = qconvert(*words, "--max-memory", "100MB", "-o", tmp_path / "report")
    assert little.code == 1 and "--max-memory: evaluating needs at least" in little.out
    assert "Hint" in little.out or "write --max-memory" in little.out
    records = [strict_json(each.stdout) for each in (whole, held)]
    peaks = [int(each.stderr.rsplit(maxsplit=1)[-1]) for each in (whole, held)]
    assert peaks[1] < 1.1 * 750_000_000 < peaks[0], peaks
    memory = records[1].pop("memory")
    assert memory["asked_bytes"] == 750_000_000 >= memory["expected_bytes"] >= memory["peak_bytes"]
    assert memory["peak_bytes"] <= peaks[1] and "memory" not in records[0]
    for record in records:
        for name in ("date", "command", "request"):
            del record[name]
        del record["models"][0]["tokens_per_second"]
    assert records[0] == records[1]
    page = (tmp_path / "report.md").read_text()
    assert "layers read in turn" in page


def test_what_needs_whole_models_is_refused(models: dict[str, Path]) -> None:
    words = ("eval", "perplexity", models["bf16"], "--text", "stdlib", "--max-memory", "4GB")
    ran = qconvert(*words, "--samples")
    assert ran.code == 1 and "--samples would read the whole model for every token" in ran.err
    ran = qconvert(*words, "--device", "cuda")
    assert ran.code == 1 and "--max-memory: is not held on cuda" in ran.err
