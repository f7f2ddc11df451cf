"""Evaluations of models larger than memory: the figures of a run in memory, within what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.memory_limit import MemoryLimit
from qconvert.evaluate.in_turn import LayersInTurn
from qconvert.evaluate.lockstep import Track, run_lockstep
from qconvert.evaluate.memory import EvalMemory, EvalWork, fitted
from qconvert.evaluate.model_bytes import HeadForm, ModelBytes
from qconvert.evaluate.models import open_model
from qconvert.evaluate.protocols import Window, protocol_named
from qconvert.runtime.config import DecoderConfig
from tests.commands import qconvert
from tests.models import tiny
from tests.test_calibration_memory import LLAMA_8B

IDS_N = np.random.default_rng(0).integers(0, 320, 150)
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
    opened = [open_model(path, path.name, in_turn=memory is not None, **how) for path in paths]
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
    plan = fitted(
        EvalWork([ModelBytes.of_float32(DecoderConfig.from_hf(LLAMA_8B))], 1, 16, 75), MemoryLimit(1 << 40)
    )
    for heads, holds in ((HeadForm.PLACED, True), (HeadForm.STORED, False), (HeadForm.STREAMED, False)):
        memory = replace(plan, heads=heads, holds_states=holds)
        found = scores(paths, windows, memory, tmp_path, dtype=dtype)
        assert len(found) == len(wanted) == 8
        assert all(map(np.array_equal, found, wanted)), (heads, holds)
    assert not list(tmp_path.iterdir())
