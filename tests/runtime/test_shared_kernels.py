"""A kernel's threads: torch's own where they can be had, as many as asked for, all at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qconvert.runtime.cpu import shared_kernels
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import routine
from qconvert.runtime.cpu.thread_barrier import wait_for_all

ROOT = Path(__file__).resolve().parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")


@pytest.fixture(params=["torch's threads", "threads of ours"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads of ours":
        monkeypatch.setattr(shared_kernels, "_openmp", lambda: None)


@routine
def _meet_share(arrived, factor, doubled, ran_R, rank, size):  # type: ignore[no-untyped-def]
    """Note this rank when all have come."""
    wait_for_all(arrived.ctypes.data, size)
    ran_R[rank] += factor * size if doubled else 0.5


_meet = SharedKernel(_meet_share)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_all_ranks_run_at_once(size: int, threads: None) -> None:
    arrived, ran_R = np.zeros(1, np.int64), np.zeros(size + 1)
    _meet(arrived, 1.5, True, ran_R, threads=size)
    assert ran_R.tolist() == [1.5 * size] * size + [0]
    _meet(arrived, 1.5, False, ran_R, threads=size)
    assert ran_R.tolist() == [1.5 * size + 0.5] * size + [0]


def test_as_many_threads_as_torch_has(threads: None, use_threads: None) -> None:
    ran_R = np.zeros(4)
    torch.set_num_threads(3)
    _meet(np.zeros(1, np.int64), 1.0, True, ran_R)
    assert ran_R.tolist() == [3, 3, 3, 0]


TASKS = """
import os, numpy as np, torch
from tests.runtime.test_shared_kernels import _meet
for _ in range(20):
    torch.ones(1 << 18).add_(1)
    _meet(np.zeros(1, np.int64), 1.0, True, np.zeros(2), threads=2)
    print(len(os.listdir("/proc/self/task")))
"""
FEWER = """
import numpy as np
from tests.runtime.test_shared_kernels import _meet
_meet(np.zeros(1, np.int64), 1.0, True, ran := np.zeros(2), threads=2)
print(ran.tolist())
"""


def _printed(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    ran = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@linux_only
def test_threads_are_those_that_torch_has() -> None:
    counts = _printed(TASKS, OMP_NUM_THREADS="2").split()
    assert len(set(counts)) == 1


@linux_only
def test_one_thread_does_all_where_openmp_has_no_more() -> None:
    assert _printed(FEWER, OMP_THREAD_LIMIT="1") == "[1.0, 0.0]\n"
