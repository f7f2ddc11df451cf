"""Computes what kernels make with other threads, and runs code with other instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch

from qconvert.quant.simd import processor


def digests_by_threads(digest: Callable[[], str]) -> set[str]:
    """What a function gives with one thread, with two and with nine."""
    found = set()
    for threads in (1, 2, 9):
        torch.set_num_threads(threads)
        found.add(digest())
    return found


def asked(choice: str, code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process whose kernels use these instructions."""
    variables = os.environ | {processor.VARIABLE: choice}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False
    )
