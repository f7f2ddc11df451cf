"""Kernels that are called by their address are compiled once for all processes, as all others are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.test_imports import run_python

LOAD = """
from qconvert.runtime.cpu.kernels import compiled
print(compiled("float32")._cache_hits)
"""


def test_another_process_finds_what_one_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert [run_python("-c", LOAD).stdout.split() for _ in range(2)] == [["0"], ["1"]]
    assert len(list(tmp_path.rglob("*entry_float32*.nbc"))) == 1
