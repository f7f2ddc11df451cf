"""The way of one tensor through a conversion: what counts, and that a real one passes its stations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evals.trace_conversion import NAMES, Step, Trace, Way
from tests.project.test_imports import ROOT

SOURCE = """
def command(): return prepare()
def prepare(): return _one("{name}"), other([0]), numbers(b"12")
def _one(name): return numbers(name), other(name=0)
def numbers(data): return later(bytes(2))
def later(data): return 0
def other(name): return 0
"""


def traced(tmp_path: Path, name: str) -> Trace:
    """Functions of a file that lies where the package would, run under the hook."""
    (tmp_path / "qconvert").mkdir(exist_ok=True)
    file, scope = tmp_path / "qconvert" / "module.py", dict[str, object]()
    file.write_text(SOURCE.format(name=name))
    found = Trace(tmp_path)
    exec(compile(file.read_text(), str(file), "exec"), scope)
    command = scope["command"]
    assert callable(command)
    sys.setprofile(found.hook)
    try:
        command()
    finally:
        sys.setprofile(None)
    return found


def names(found: Trace) -> list[str]:
    return [name for _, _, name in sorted(found.passed, key=lambda place: found.passed[place])]


def test_a_way_is_the_name_its_numbers_and_the_stack_above(tmp_path: Path) -> None:
    found = traced(tmp_path, NAMES[0] + ".weight")
    assert names(found) == ["command", "prepare", "_one", "numbers", "later"]
    assert {name for _, _, name in found.entered} == {*names(found), "other"}


def test_another_tensor_has_no_way(tmp_path: Path) -> None:
    found = traced(tmp_path, "model.layers.0.self_attn.k_proj.weight")
    assert names(found) == [] and len(found.entered) == 6


@dataclass
class Record:
    name: str
    rows: object = None


def test_names_and_numbers_are_found_in_small_records(tmp_path: Path) -> None:
    def passes(*values: object) -> int:
        trace = Trace(tmp_path)
        for number, value in enumerate(values):
            code = compile("0", f"file {number}", "eval").replace(co_name="f")
            trace.enter(code, [value], foreign=False)
        return len(trace.passed)

    name = NAMES[1] + ".weight_packed"
    assert passes(Record(name)) == passes((1, Record(name))) == passes([name]) == 1
    assert passes(Record("lm_head.weight")) == passes([name] * 5) == passes(np.zeros(2)) == 0
    assert passes(Record(name), Record("", np.zeros(2))) == passes({}, [name]) == 2


def test_counts() -> None:
    way = Way((Step("a", "x", 1), Step("B._b", "y", 1), Step("c", "x", 2), Step("C.__init__", "x", 3)))
    assert way.counts == (4, 2, 2) and way.without_helpers().counts == (3, 1, 0)


@pytest.mark.parametrize(
    ("conversion", "stations"),
    [
        (
            "gguf",
            ["Checkpoint.bind", "compile_request", "make_batch", "read_stacked", "FileSink.write", "verify"],
        ),
        (
            "int4",
            ["Checkpoint.bind", "compile_request", "read_exactly", "FileSink.write", "pack_stream", "verify"],
        ),
    ],
)
def test_a_conversion_passes_its_stations(conversion: str, stations: list[str]) -> None:
    script = [sys.executable, str(ROOT / "evals/trace_conversion.py"), conversion, "--list"]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = [[int(word) for word in line.split() if word.isdigit()] for line in lines[:3]]
    assert len(lines) == 3 + counts[1][0] and counts[0] < counts[1] < counts[2]
    at = [next(i for i, line in enumerate(lines[3:]) if station in line) for station in stations]
    assert at[0] == min(at) and at[-1] == max(at), dict(zip(stations, at, strict=True))
