"""Commands of `qconvert` that start a process, without a new interpreter, whose imports take seconds."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qconvert.evaluate import speed
from tests.support.commands import qconvert
from tests.support.crashes import ended, running, started

_QCONVERT = [sys.executable, "-m", "qconvert"]


def fork_commands(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have modules fork this process where they would start `qconvert`; other programs start as they do.

    What a module wants to read of it is computed in this process.
    """
    stands_in = SimpleNamespace(DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, Popen=_begin, run=_run)
    for module in modules:
        monkeypatch.setattr(module, "subprocess", stands_in)


def fork_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `qconvert bench` fork this process for a model; with -j 1, as forks lose OpenMP's threads."""
    forking = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(speed, "multiprocessing", forking)


def _begin(command: list[str], **how: Any) -> Any:
    if command[:3] != _QCONVERT:
        return subprocess.Popen(command, **how)
    return SimpleNamespace(pid=started(running(*command[3:])))


def _run(command: list[str], **how: Any) -> subprocess.CompletedProcess[Any]:
    if command[:3] != _QCONVERT:
        return subprocess.run(command, **how)  # noqa: PLW1510 (as the caller says)
    if how.get("capture_output"):
        ran = qconvert(*command[3:])
        return subprocess.CompletedProcess(command, ran.code, ran.out, ran.err)
    if code := ended(started(running(*command[3:]))):
        raise subprocess.CalledProcessError(code, command)
    return subprocess.CompletedProcess(command, 0)
