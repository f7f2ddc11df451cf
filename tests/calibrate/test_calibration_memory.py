"""Calibration keeps within the memory that it is given, or says at once how much it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

import qconvert as qconvert_package
from qconvert.calibrate import activation_file, memory, memory_limit
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.fit import fitted, fitted_collection, fitted_weighing
from qconvert.calibrate.memory import Work, needs, weighing
from qconvert.calibrate.memory_limit import MemoryLimit
from qconvert.calibrate.savings import HessianForm, Savings
from qconvert.convert import runner
from qconvert.convert.calibration_memory import needed
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.core.schemes import parse_scheme
from qconvert.errors import BadRecipe, QConvertError
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
from qconvert.quant.hessian import factor, factor_and_shift, target_shift
from qconvert.quant.point_grid import PointGrid, grid_of_columns
from qconvert.runtime.config import DecoderConfig
from tests.convert.test_calibrated import VOCAB, WIDE, correlated_words, hidden, text
from tests.support.commands import qconvert
from tests.support.memory import memory_cgroup, own_cgroup
from tests.support.models import EMBED, tiny
from tests.support.savings import saving

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
GB = 1_000_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    return tiny(folder, "qwen3", changes={EMBED: correlated_words()}, **WIDE)


def work_of(tokens: int = 32768, window: int = 2048, **options: Any) -> Work:
    calibration = Calibration(np.zeros((tokens // window, window), np.int64), **options)
    return Work(DecoderConfig.from_hf(LLAMA_8B), calibration, jobs=2)


@pytest.mark.parametrize("method", ["feedback", "two-sided"])
def test_an_8b_model_is_calibrated_in_less_and_less(method: str) -> None:
    """What is saved costs time alone at first; the sums stay within what was asked at every size."""
    process, before = 400_000_000, 0.0
    for limit in (
        30 * GB,
        8 * GB,
        4 * GB,
        3 * GB,
        *((2 * GB, 1_100_000_000) if method == "feedback" else ()),
    ):
        savings, found = fitted(work_of(method=method), MemoryLimit(limit, process))  # type: ignore[arg-type]
        assert process + found.memory <= limit
        assert found.memory == max(found.phases.values()) == needs(work_of(method=method), savings).memory  # type: ignore[arg-type]
        columns = savings.form(14336).columns or 14336
        worse = 14336 / columns + (not savings.form(14336).shift) + savings.form(14336).single
        assert worse >= before
        before = worse
    assert before >= (8 if method == "feedback" else 2)


def test_an_8b_model_at_1_gb() -> None:
    """Its widest Hessian alone has 822 MB; windows of 2,048 tokens take 20 MB too much."""
    with pytest.raises(BadRecipe, match=r"needs at least 1,02\d MB, 1,000 MB was asked"):
        fitted(work_of(), MemoryLimit(GB, 350_000_000))
    savings, found = fitted(work_of(window=1024), MemoryLimit(GB, 350_000_000))
    assert savings.streamed and savings.batch_tokens <= 1024
    form = savings.form(14336)
    assert form.single and not form.shift and form.columns is not None and form.columns >= 256
    assert 350_000_000 + found.memory <= GB
    assert "blocks of" in savings.sentence and savings.record["weights"] == "read as they are needed"


def test_what_fits_is_not_changed() -> None:
    assert fitted(work_of(), MemoryLimit(100 * GB))[0] == Savings()
    assert Savings().record == {} and Savings().sentence == ""


def test_too_little_is_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(BadRecipe) as refused:
        fitted(work_of(), MemoryLimit(300_000_000, 200_000_000))
    needed = int(refused.value.hint.split("--max-memory ")[1].split("MB")[0]) * 1_000_000
    savings, found = fitted(work_of(), MemoryLimit(needed, 200_000_000))
    assert savings.streamed and 200_000_000 + found.memory <= needed
    with pytest.raises(BadRecipe):
        fitted(work_of(), MemoryLimit(needed - 20_000_000, 200_000_000))


def test_without_a_limit_nothing_is_saved_while_the_machine_has_the_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows may take says nothing of it; where memory is short, all is saved and nothing is refused."""
    request = Request("quantize", Recipe(scheme=parse_scheme("int4-g128")))

    def savings(available: int | None) -> Savings:
        monkeypatch.setattr(memory_limit, "available_memory", lambda: available)
        options = RunOptions(jobs=2, max_memory=1_000_000)
        job = prepare(open_model(str(model)), request, options, calibration=Calibration(text()))
        assert job.calibration is not None
        return job.calibration.savings

    enough = needs(Work(DecoderConfig.from_hf(LLAMA_8B), Calibration(text()), 2), Savings()).memory
    assert savings(None) == savings(2 * enough) == Savings()
    everything = savings(1)
    assert everything.streamed and everything.form(512).columns == 256
    monkeypatch.setattr(memory_limit, "available_memory", lambda: 5 * GB)
    limit = memory_limit.memory_limit(None)
    assert (limit.memory, limit.strict) == (4 * GB, False)
    assert fitted(work_of(), limit)[0] != Savings()
    assert fitted_collection(work_of(shift=False), 4096, MemoryLimit(1, strict=False)) == (2048, True)
    weighed = fitted_weighing(work_of(shift=False), MemoryLimit(1, strict=False), GB)
    assert weighed == (Savings(backward_tokens=None, streamed=True), 0)


def test_gradients_without_hessians_need_no_room_for_them() -> None:
    work = work_of(shift=False)
    limit = MemoryLimit(weighing(work, Savings()) + 1)
    assert fitted_weighing(work, limit) == (Savings(), 0)
    assert fitted_weighing(work, limit, GB)[0].streamed


def test_the_shares_of_rows_are_those_of_the_runner() -> None:
    assert memory.BLOCK_BYTES == runner.BLOCK_BYTES
    for taken in (1_000_000, 9_999_999, 1 << 40):
        layout: Any = SimpleNamespace(transposed=False)
        want = min(memory.BLOCK_BYTES, taken // memory.BLOCKS)
        assert runner.block_bytes(layout, layout, taken) == want


def test_available_memory_is_what_the_system_and_its_control_groups_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:  9000 kB\nMemAvailable:   2000 kB\nSwapFree:  0 kB\n")
    monkeypatch.setattr(memory_limit, "_CONTROL_GROUPS", ((tmp_path, "most", "taken", ("file",)),))
    available = memory_limit.available_memory
    assert available(system) == 2_048_000
    for most, found in (("max\n", 2_048_000), ("1000000\n", 400_000), ("5", 0), (str(1 << 62), 2_048_000)):
        (tmp_path / "most").write_text(most)
        (tmp_path / "taken").write_text("700000\n")
        (tmp_path / "memory.stat").write_text("anon 600000\nfile 100000\n")
        assert available(system) == found
    assert (available(tmp_path / "none") or 1 << 40) > 1 << 28
    assert 1 << 20 < memory_limit.resident() < 1 << 40


def test_the_command_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 400)
    how = ("--text", tmp_path / "words.txt", "--tokens", "2k", "--window", 64, "--max-memory", "50MB")
    for words in (("quantize", "embedded", "--bits", 4, "--method", "feedback"), ("calibrate", "embedded")):
        ran = qconvert(*words, *how, "-o", tmp_path / "out")
        assert ran.code == 1 and "--max-memory: calibrating needs at least" in ran.err
        assert "MB, 50 MB was asked" in ran.err
        assert "Hint: write --max-memory" in ran.err and not list(tmp_path.glob("out/*"))
    ran = qconvert("quantize", "embedded", "--bits", 4, "--method", "feedback", *how[:6], "--dry-run")
    assert ran.code == 0 and "calibrating on 2,048 tokens of text takes about" in ran.err
    assert "to keep within" not in ran.err


def test_transformers_holds_the_whole_model_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("def add(a, b):\n    return a + b\n\n\n" * 400)
    how = ("--text", tmp_path / "words.txt", "--tokens", "2k", "--window", 64, "--max-memory", "50MB")
    ran = qconvert("calibrate", "embedded", "--engine", "transformers", *how, "-o", tmp_path / "out")
    assert ran.code == 1 and "transformers, which holds the whole model, needs at least" in ran.err


SAVED = {
    "nothing": {},
    "parts of windows": {"batch_tokens": 24},
    "streamed": {"streamed": True},
    "float32": {"forms": {256: HessianForm(True), 512: HessianForm(True)}},
    "no shift": {"forms": {512: HessianForm(True, False)}},
    "blocks": {"forms": {512: HessianForm(True, False, 192)}},
}


@pytest.fixture(scope="module")
def lost(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, Any]]:
    """How far hidden states of unseen tokens are from the original's, and the manifests."""
    unseen, found = text(8, seed=9), {}
    wanted = hidden(model, unseen)
    for name, how in SAVED.items():
        out = tmp_path_factory.mktemp("outs") / "out"
        request = Request("quantize", Recipe(scheme=parse_scheme("int4-g128")))
        job = prepare(open_model(str(model)), request, RunOptions(jobs=2), calibration=Calibration(text()))
        result = execute(saving(job, **how), out)
        found[name] = float((hidden(out, unseen) - wanted).square().sum()), result
    return found


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_costs_little(name: str, lost: dict[str, tuple[float, Any]]) -> None:
    most = {"no shift": 1.35, "blocks": 1.6}.get(name, 1.03)
    assert lost[name][0] < most * lost["nothing"][0], lost[name][0] / lost["nothing"][0]
    assert len(lost[name][1].outcome.output_errors) == 14


def test_the_manifest_says_what_was_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "resident", lambda: 0)
    request = Request("quantize", Recipe(scheme=parse_scheme("int4-g128")))
    calibration = Calibration(text())
    ample = prepare(open_model(str(model)), request, RunOptions(jobs=6), calibration=calibration)
    room = needed(ample).memory - 50_000_000
    options = RunOptions(jobs=6, process_memory=memory_limit.KERNELS + room)
    job = prepare(open_model(str(model)), request, options, calibration=calibration)
    assert job.calibration is not None and needed(job).memory <= room
    execute(job, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "qconvert.json").read_text())
    assert said["calibration"]["savings"] == job.calibration.savings.record != {}
    schema = json.loads((Path(qconvert_package.__file__).parent / "manifest.schema.json").read_text())
    jsonschema.validate(said, schema)


def test_blocks_of_columns_have_the_grid_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for size, width in ((32, 256), (256, 256), (96, 288), (128, 300)):
        groups = -(-width // size)
        steps_RG, shifts_RG = rng.standard_normal((2, 3, groups)).astype(np.float32)
        grid = PointGrid(np.arange(4, dtype=np.float32), steps_RG, shifts_RG, size)
        for start, stop in ((0, 64), (64, 200), (200, width), (0, width)):
            part = grid_of_columns(grid, slice(start, stop))
            for k in range(start, stop):
                own = (k - start) // part.size
                assert np.array_equal(part.steps_RG[:, own], steps_RG[:, k // size])
                assert np.array_equal(part.shifts_RG[:, own], shifts_RG[:, k // size])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_factor_and_a_shift_of_one_factorization(dtype: Any) -> None:
    """To the bit those of two where it is in float64."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((900, 300)).astype(np.float32)
    h_II, mismatch_II = x.T @ x / 900, (0.1 * rng.standard_normal((300, 300))).astype(np.float32)
    order_I, factor_II, used = factor(h_II)
    want_II, made_II = target_shift(h_II, mismatch_II, used), mismatch_II.copy()
    found = factor_and_shift(h_II, made_II, dtype=dtype)
    assert np.array_equal(found[0], order_I) and found[2] == used
    exact = dtype is np.float64
    assert np.abs(found[1] - factor_II).max() <= (0 if exact else 1e-4)
    assert np.abs(made_II - want_II).max() <= (0 if exact else 1e-4)


def test_mean_squares_are_measured_in_less(model: Path) -> None:
    work = work_of(shift=False)
    enough = fitted_collection(work, 4096, MemoryLimit(100 * GB))
    assert enough == (4096, False)
    assert fitted_collection(work, 4096, MemoryLimit(GB * 3 // 2)) == (2048, True)
    with pytest.raises(BadRecipe, match="calibrating needs at least"):
        fitted_collection(work, 4096, MemoryLimit(GB // 10))


def test_a_full_disk_is_told_before_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1000)
    full = SimpleNamespace(disk_usage=lambda path: usage)
    monkeypatch.setattr("qconvert.convert.calibration_memory.shutil", full)
    request = Request("quantize", Recipe(scheme=parse_scheme("int4-g128")))
    job = prepare(open_model(str(model)), request, RunOptions(), calibration=Calibration(text()))
    with pytest.raises(QConvertError, match=r"activations of the text need .* of disk, 1,000 bytes free"):
        execute(job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_activations_lie_beside_the_output_or_where_tmpdir_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert activation_file.scratch_folder(tmp_path / "new" / "out") == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent))
    assert activation_file.scratch_folder(tmp_path / "out") == tmp_path.parent


def test_a_run_lives_in_a_tenth_more_than_it_was_given(tmp_path: Path) -> None:
    """All that the kernel counts of the process: one that takes more is killed."""
    wide = WIDE | {"hidden_size": 512, "intermediate_size": 2816}
    words = np.random.default_rng(0).standard_normal((VOCAB, 512)).astype(np.float32)
    source = tiny(tmp_path / "m", "qwen3", changes={EMBED: words}, **wide)
    asked = 630_000_000
    run = f"""
import os
open({str(own_cgroup() / "cgroup.procs")!r}, "w").write(str(os.getpid()))
import numpy as np
from pathlib import Path
from qconvert.calibrate.calibration import Calibration
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.core.schemes import parse_scheme
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
tokens = np.random.default_rng(0).integers(0, {VOCAB}, (4, 512))
request = Request("quantize", Recipe(scheme=parse_scheme("int4-g128")))
options = RunOptions(2, process_memory={asked})
job = prepare(open_model({str(source)!r}), request, options, calibration=Calibration(tokens))
print(job.calibration.savings.record)
execute(job, Path({str(tmp_path / "out")!r}))
"""
    with memory_cgroup(asked * 11 // 10) as folder:
        ran = subprocess.run(
            [sys.executable, "-c", run], check=False, capture_output=True, text=True, timeout=240
        )
        most = int((folder / "memory.max_usage_in_bytes").read_text())
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "'inputs'" in ran.stdout  # it had to save
    assert most <= asked * 11 // 10
    assert (tmp_path / "out" / "qconvert.json").exists()
