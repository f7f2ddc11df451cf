"""What kernels compute with every set of instructions: one process of low priority beside the tests.

A set is chosen before the first kernel is compiled, so each has a process, and compiles all kernels again.
What they share is imported once, before they are forked. They start with the first test and compute while
tests wait for something, so that they are done when somebody asks.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from qconvert.quant.simd import processor

ROOT = Path(__file__).resolve().parents[2]
_SHARED = ("torch", "pytest", "hypothesis", "transformers")
"""What takes most of the time of importing them, and is the same for every set."""
_NICE = 5


def lesser(*names: str) -> tuple[str, ...]:
    """Those of these sets that are less than what this processor has.

    A module names the ones that its kernels are made differently for.
    """
    return tuple(name for name in processor.instruction_sets()[:-1] if name in names)


class Digests:
    """What `digest()` of modules of tests gives by set of instructions, for all workers of a run.

    They share a folder. Who finds no computing process starts one, which holds a lock as long as it lives.
    """

    def __init__(self, folder: Path, wanted: Iterable[tuple[str, str]]) -> None:
        self._found, self._lock = folder / "digests.jsonl", folder / "digests.lock"
        self._wanted = sorted(wanted)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = folder / f"digests-{os.getpid()}.errors"

    def start(self) -> None:
        """Have everything computed that is not there yet, unless a process is at it."""
        with self._lock.open("a") as lock, self._errors.open("a") as errors:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            left = [pair for pair in self._wanted if pair not in self.found()]
            if not left:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.instruction_sets", str(self._found), json.dumps(left)],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[lock.fileno()],
                start_new_session=True,
            )  # fmt: skip

    def found(self) -> dict[tuple[str, str], str]:
        """All that was computed so far."""
        whole = self._found.read_text().split("\n")[:-1] if self._found.exists() else []
        return {(choice, module): digest for choice, module, digest in map(json.loads, whole)}

    def of(self, choice: str, module: str) -> str:
        """Wait for what a module gives with a set of instructions."""
        while (digest := self.found().get((choice, module))) is None:
            if self._process is not None and self._process.poll() is not None:
                digest = self.found().get((choice, module), "failed: " + self._errors.read_text())
                break
            self.start()
            time.sleep(0.05)
        assert not digest.startswith("failed: "), digest
        return digest

    def close(self) -> None:
        """End the process, if this one has started it; another that waits for it starts its own."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _compute(choice: str, modules: list[str], found: Path) -> None:
    os.environ[importlib.import_module("qconvert.quant.simd.processor").VARIABLE] = choice
    for module in modules:
        try:
            digest = importlib.import_module(f"tests.runtime.{module}").digest()
        except Exception:
            digest = "failed: " + traceback.format_exc()
        with found.open("a") as file:
            file.write(json.dumps([choice, module, digest]) + "\n")


def _main(found: Path, wanted: list[tuple[str, str]]) -> None:
    os.nice(_NICE)
    for name in _SHARED:
        importlib.import_module(name)
    for choice in dict.fromkeys(choice for choice, _ in wanted):
        if (child := os.fork()) == 0:
            _compute(choice, [module for each, module in wanted if each == choice], found)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            print(f"the process for {choice} ended with {status}", file=sys.stderr)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
