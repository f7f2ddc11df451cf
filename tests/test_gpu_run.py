"""A run on a GPU: its rows outlive it, its sections keep their time, and all of it runs dry on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from evals import speed_gpu
from evals.gpu.clock import time_calls
from evals.gpu.job import Job, attempt
from evals.gpu.models import TINY
from evals.gpu.rows import (
    OURS,
    Ceiling,
    Check,
    Crossing,
    Decoding,
    Fact,
    Note,
    Product,
    Reading,
    Row,
    append,
    from_json,
    load,
    of_kind,
    to_json,
)
from evals.gpu.schedule import Outcome, run_sections
from evals.gpu.sections import CUT, SECTIONS, Section, run_section
from evals.speed import main
from tests.test_imports import HEAVY, ROOT, run_python

CPU = torch.device("cpu")
ROWS: tuple[Row, ...] = (
    Fact("device", "NVIDIA H200"),
    Note("what was left out"),
    Ceiling("copy", 4.3e12, "bytes/s"),
    Check("product int4", "a case", 1e-6, 1e-3, True),
    Product(OURS, "int4", 37888, 3584, 1, 2, 2e-5, 70_000_000, True),
    Crossing("int8", 37888, 3584, 512, None, 1e-3),
    Decoding("qwen2.5-7b", OURS, "bf16", 0, 4e-3, 14_000_000_000, 0, 258),
    Reading("qwen3-8b", OURS, "bf16", 32768, 1.0, 5e14, False),
)


def test_rows_are_what_they_were_when_they_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert load(path) == []
    for row in ROWS:
        append(path, "a section", row)
    with path.open("a") as file:  # the line that a killed process was writing
        file.write('{"row": "note", "sect')
    assert load(path) == [("a section", row) for row in ROWS]
    assert not any("NaN" in line or "Infinity" in line for line in path.read_text().splitlines())


def test_no_number_is_null_in_json() -> None:
    record = to_json("checks", Check("x", "", math.nan, 1.0, True))
    assert record["error"] is None
    _, again = from_json(json.loads(json.dumps(record)))
    assert isinstance(again, Check) and math.isnan(again.error) and not again.passed


def test_a_check_passes_by_number_and_by_bits() -> None:
    assert Check("x", "", 1e-3, 1e-3, True).passed
    assert not Check("x", "", 1.01e-3, 1e-3, True).passed
    assert not Check("x", "", math.nan, 1e-3, True).passed
    assert not Check("x", "", 0.0, math.nan, True).passed
    assert not Check("x", "", 0.0, 1e-3, False).passed


def test_what_was_not_found_right_is_not_timed() -> None:
    good, bad = Check("a", "", 0.0, 1.0, True), Check("a", "other case", 2.0, 1.0, True)
    job = Job(CPU, time.monotonic() + 9, earlier=(good, Check("b", "", 0.0, 1.0, True)))
    assert job.passed("a") and job.passed("b") and not job.passed("never checked")
    job = Job(CPU, time.monotonic() + 9, earlier=(good, bad))
    assert not job.passed("a")
    assert [note.text for note in job.unsound(["a"])] == ["A: NOT TIMED, ITS CHECK DID NOT PASS"]


def test_kernels_of_a_failed_check_are_left_out() -> None:
    pytest.importorskip("triton")
    from evals.gpu import decode, kernels

    failed = tuple(
        Check(f"product {encoding}", "", math.nan, 1e-3, True) for encoding in ("int4", "int8", "bf16")
    )
    job = Job(CPU, time.monotonic() + 99, dry=True, earlier=failed)
    rows = list(kernels.products(job))
    assert [row.text for row in of_kind(rows, Note)][:3] == [
        f"PRODUCT {encoding}: NOT TIMED, ITS CHECK DID NOT PASS" for encoding in ("INT4", "INT8", "BF16")
    ]
    assert not of_kind(rows, Product), "peers are not timed unchecked either"
    assert not list(kernels.crossings(job)) and not of_kind(decode.measure(job), Decoding)


def test_an_error_costs_its_own_rows() -> None:
    def broken() -> list[Row]:
        raise RuntimeError("out of memory\nand much more text")

    job = Job(CPU, time.monotonic() + 9)
    assert list(attempt(job, "this one", broken)) == [Note("this one: RuntimeError: out of memory")]
    assert list(attempt(job, "that one", lambda: ROWS[:2])) == list(ROWS[:2])


class FakeGraph:
    """A CUDA graph on a CPU: it replays what was called while it was captured."""

    capturing: FakeGraph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@contextmanager
def fake_capture(graph: FakeGraph) -> Iterator[None]:
    FakeGraph.capturing = graph
    yield
    FakeGraph.capturing = None


def test_calls_are_timed_as_a_replayed_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call sleeps 1 ms when it runs; it runs once to warm up, and then in replays only."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda device: stream, "current_stream": lambda device: stream, "Event": FakeEvent,
             "stream": lambda side: nullcontext(), "synchronize": lambda device: None,
             "CUDAGraph": FakeGraph, "graph": fake_capture}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    ran = [0, 0, 0]

    def call(number: int) -> None:
        if FakeGraph.capturing is not None:
            FakeGraph.capturing.calls.append(lambda: call(number))
            return
        ran[number] += 1
        time.sleep(1e-3)

    calls = [partial(call, number) for number in range(3)]
    timing = time_calls(calls, torch.device("cuda", 0), rounds=3)
    assert timing.graphed and len(timing.rounds) == 3
    assert 1e-3 <= timing.seconds < 5e-3
    # Six times the three calls are a graph: once by themselves, one replay, three to size a round, 3 rounds.
    assert ran == [6 * (1 + 1 + 3 + 3)] * 3
    timing = time_calls(calls, torch.device("cuda", 0), rounds=2, graphed=False)
    assert not timing.graphed and 1e-3 <= timing.seconds < 5e-3


def test_a_section_writes_as_it_goes_and_stops_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ceilings = SECTIONS[0]
    assert run_section(ceilings, path, 60, dry=True) == 0
    rows = [row for _, row in load(path)]
    assert [row.name for row in of_kind(rows, Ceiling)] == ["copy", "matmul", "launch"]
    assert all(row.value > 0 for row in of_kind(rows, Ceiling))
    assert {"device", "torch", "triton", "python"} <= {fact.name for fact in of_kind(rows, Fact)}
    path.unlink()
    assert run_section(ceilings, path, 0.0, dry=True) == CUT
    first, note = [row for _, row in load(path)]
    assert isinstance(first, Fact) and note == Note("ceilings: cut after 0 s")


SCRIPTS = {
    "hangs": "import time; open({mark!r}, 'w').write('row'); time.sleep(60)",
    "quick": "print('fine')",
    "cut": f"import sys; sys.exit({CUT})",
    "broken": "print('first'); raise RuntimeError('device-side assert')",
    "last": "pass",
}


def test_sections_keep_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.gpu.schedule.KILL_SECONDS", 0.0)
    monkeypatch.setattr("evals.gpu.schedule.CLOSING_SECONDS", 0.0)
    mark, limits, told = tmp_path / "mark", dict[str, float](), list[str]()

    def command_of(section: Section, seconds: float) -> list[str]:
        limits[section.name] = seconds
        return [sys.executable, "-c", SCRIPTS[section.name].format(mark=str(mark))]

    outcomes = run_sections(
        [Section(name, 3.0 if name == "hangs" else 9.0, "nowhere") for name in SCRIPTS],
        command_of,
        seconds=39,
        log=tmp_path / "log",
        finished=lambda outcome: told.append(outcome.section),
    )
    assert told == list(SCRIPTS)
    assert [outcome.status for outcome in outcomes] == ["cut", "done", "cut", "failed", "done"]
    assert outcomes[0].seconds == pytest.approx(3, abs=2) and mark.read_text() == "row"
    assert "device-side assert" in outcomes[3].message
    assert limits["hangs"] == pytest.approx(3, abs=0.5), "later sections keep theirs"
    assert limits["last"] > limits["quick"] > 8, "what a section leaves over goes to the next"


def test_nothing_starts_without_time(tmp_path: Path) -> None:
    (outcome,) = run_sections(
        SECTIONS[:1], lambda *_: ["no-such-command"], seconds=1, log=tmp_path / "log", finished=lambda _: None
    )
    assert outcome == Outcome("ceilings", "cut", 0.0, "no time was left to start it")


def test_the_sections_fit_nine_minutes() -> None:
    from evals.gpu.schedule import CLOSING_SECONDS, KILL_SECONDS

    assert sum(section.seconds for section in SECTIONS) + CLOSING_SECONDS + KILL_SECONDS <= 540
    assert [section.name for section in SECTIONS][:2] == list(speed_gpu.BASIS)


def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = CliRunner().invoke(main, ["gpu", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 1 and "finds no CUDA device" in ran.output and not (tmp_path / "out").exists()


def test_the_page_needs_no_kernels() -> None:
    """The process that schedules and reports is no reason to load triton, nor what a device may lack."""
    code = f"import sys, evals.speed_gpu\nprint('LOADED', *[n for n in {HEAVY!r} if n in sys.modules])"
    assert run_python("-c", code).stdout.splitlines()[-1] == "LOADED"


def test_a_record_is_replaced_and_named_after_its_device(tmp_path: Path) -> None:
    found = [("a section", row) for row in ROWS]
    speed_gpu.write(tmp_path, found, [Outcome("a section", "cut", 1.5, "why")], dry=False)
    record = json.loads((tmp_path / "gpu-nvidia-h200.json").read_text())
    assert record["measurement"] == "gpu" and record["sections"][0]["message"] == "why"
    assert [from_json(row) for row in record["rows"]] == found
    assert "NVIDIA H200" in (tmp_path / "gpu-nvidia-h200.md").read_text()


COUNT_LAUNCHES = """
import torch, triton.runtime.interpreter as interpreter
from qconvert.runtime.cuda.decode_step import open_step, read_greedily
from evals.gpu.models import BF16, Maker, config_of, make_decoder
decoder = make_decoder(config_of("qwen3-8b", tiny=True), BF16, Maker(torch.device("cpu")))
count, call = [0], interpreter.GridExecutor.__call__
def counted(self, *args, **kwargs):
    count[0] += 1
    return call(self, *args, **kwargs)
interpreter.GridExecutor.__call__ = counted
step = open_step(decoder, decoder.cache(1, 2), greedy=True)
before = count[0]
read_greedily(step, torch.tensor([1]), 1)
print(count[0] - before)
"""


def test_the_floor_counts_the_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of triton; the others are torch's: two for the embedding, the position, the likeliest."""
    pytest.importorskip("triton")
    from evals.gpu.decode import LAYER_LAUNCHES, OTHER_LAUNCHES

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    launches = int(run_python("-c", COUNT_LAUNCHES).stdout)
    assert launches == LAYER_LAUNCHES * TINY["num_hidden_layers"] + OTHER_LAUNCHES - 4


def test_everything_runs_dry(tmp_path: Path) -> None:
    """The script itself, on a CPU: every section to its end, its kernels in triton's interpreter."""
    pytest.importorskip("triton")
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    script = ROOT / "evals/results/run_gpu.sh"
    ran = subprocess.run(
        ["bash", str(script), "--dry-run"], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    ended = {section["section"]: (section["status"], section["message"]) for section in record["sections"]}
    assert ended == {section.name: ("done", "") for section in SECTIONS}
    found = [from_json(row) for row in record["rows"]]
    rows = [row for _, row in found]
    assert {type(row) for row in rows} == {type(row) for row in ROWS}
    checks = of_kind(rows, Check)
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]
    assert {check.subject.split()[0] for check in checks} == {
        "product",
        "dequantize",
        "scores",
        "reading",
        "step",
        "peer",
    }
    expected = {"torch.compile: not in a dry run"}
    if not find_spec("bitsandbytes"):
        expected |= {"bitsandbytes: not installed"}
    if not find_spec("transformers"):
        expected |= {"transformers: not installed"}
    assert {note.text for note in of_kind(rows, Note)} <= expected
    timed = [row.seconds for row in rows if isinstance(row, Product | Reading)]
    assert min(timed) > 0 and {row.context for row in of_kind(rows, Decoding)} == {0, 5}
    assert "## Targets" in ran.stdout and not (tmp_path / speed_gpu.ROWS).exists()
