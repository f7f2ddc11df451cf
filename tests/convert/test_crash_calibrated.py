"""A calibrated run killed at any moment: what is done is not rounded again, and the bytes are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.calibration import Calibration, Method
from qconvert.convert import calibrated
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import Job, RunOptions
from qconvert.convert.outcome import BlockDone
from qconvert.core.schemes import parse_scheme
from qconvert.plan.passes.transcode import Target
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import GGUFTarget, Request
from tests.support.crashes import KILLED, MOMENTS, asked, calls_of, groups_of, journal_of, killed, tree
from tests.support.models import tiny

# `make crash` kills more often.
KILLS = asked(range(25), range(4))
VOCAB = 320
# So few tokens that dampings are chosen, in the first layer, for all others.
TOKENS = np.random.default_rng(3).zipf(1.3, (24, 32)) % VOCAB
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
INT4 = parse_scheme("int4-g32")
CASES: dict[str, tuple[str, dict[str, Any], Request, Method]] = {
    "int4": ("qwen3", {}, Request("quantize", Recipe(scheme=INT4, fuse=("qkv",))), "feedback"),
    "gguf": ("llama", {}, Request("to-gguf", target=GGUFTarget("q4_0", pure=True)), "feedback"),
    "gptq": (
        "llama",
        {"tied": False},
        Request("quantize", Recipe(scheme=INT4, layout="gptq"), target=Target("gptq")),
        "feedback",
    ),
    "nvfp4": (
        "llama",
        {"tied": False},
        Request("convert", target=Target("compressed-tensors", table="nvfp4")),
        "feedback",
    ),
    "experts": ("qwen3moe", {"tied": False}, Request("quantize", Recipe(scheme=INT4)), "two-sided"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with groups_of(4000):
        yield
    torch.set_num_threads(threads)


def job_of(source: Path, case: str, **options: Any) -> Job:
    _, _, request, method = CASES[case]
    calibration = Calibration(TOKENS, method=method, gradient_tokens=256, output_rows=64)
    return prepare(open_model(str(source)), request, RunOptions(**options), calibration=calibration)


def source_of(folder: Path, case: str) -> Path:
    family, how, _, _ = CASES[case]
    if family == "qwen3moe":
        from tests.support.gguf_models import transformers_model

        return transformers_model(folder / "m", family, "float32")
    return tiny(folder / "m", family, **SIZES, **how)


@pytest.mark.parametrize("case", CASES)
def test_a_calibrated_run_killed_at_any_call_goes_on_with_the_same_bytes(case: str, tmp_path: Path) -> None:
    source, name = source_of(tmp_path, case), "m.gguf" if case == "gguf" else "out"
    for each in ("whole", "count"):
        (tmp_path / each).mkdir()
    execute(job_of(source, case, jobs=1), tmp_path / "whole" / name)
    whole, resumed = tree(tmp_path / "whole"), 0

    def run(folder: Path) -> Any:
        return lambda: execute(job_of(source, case, jobs=1), folder / name)

    calls, rng = calls_of(run(tmp_path / "count")), random.Random(case)
    assert tree(tmp_path / "count") == whole
    for number in KILLS:
        folder = tmp_path / str(number)
        folder.mkdir()
        code = killed(run(folder), rng.randrange(20, calls), rng.choice(MOMENTS))
        journal = journal_of(folder / name)
        if code == 0 or (folder / name).exists():
            continue
        assert code == KILLED
        resumed += journal is not None and bool(journal.records)
        if rng.random() < 0.5:  # killed as it goes on
            assert killed(run(folder), rng.randrange(5, calls // 2), rng.choice(MOMENTS)) in (KILLED, 0)
        if not (folder / name).exists():
            execute(job_of(source, case, jobs=2, max_memory=50_000_000), folder / name)
        assert tree(folder) == whole, number
    assert resumed > len(KILLS) // 3


def test_layers_that_are_done_are_not_measured_or_rounded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = source_of(tmp_path, "int4"), tmp_path / "out"
    measured: list[int | None] = []
    waves = calibrated.waves

    def watched(*args: Any) -> Any:
        for wave in waves(*args):
            if wave.moments:
                measured.append(wave.layer)
            yield wave

    def stop(done: BlockDone) -> None:
        if "layers.1.mlp.gate" in done.unit.output.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(calibrated, "waves", watched)
    with pytest.raises(KeyboardInterrupt):
        execute(job_of(source, "int4", jobs=1), out, stop)
    assert set(measured) == {0, 1}
    measured.clear()
    execute(job_of(source, "int4", jobs=1), out)
    assert set(measured) == {1}
