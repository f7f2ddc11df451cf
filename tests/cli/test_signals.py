"""Signals that come where an exception would be dropped or do harm: in the compiler, imports, finalizers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from numba import njit

from qconvert.cli.signals import Stopped, handled
from qconvert.core.compiling import inside_compiler
from qconvert.quant.simd import lanes

assert lanes  # whose listener tells which threads compile


class _Kill:
    """Sends this process a signal when it is finalized."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)  # the handler runs, at the latest, here


def _wait() -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        time.sleep(0.01)


def _dropped_in_a_finalizer() -> None:
    victim = _Kill()
    del victim
    _wait()


def test_a_signal_in_a_finalizer_still_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped) as stopped, handled():
        _dropped_in_a_finalizer()
    assert stopped.value.exit_code == 143
    assert "ignored" not in capfd.readouterr().err


def test_what_else_a_finalizer_raises_is_reported_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("not ours")

    with handled():
        Broken().__del__ = None  # type: ignore[method-assign, assignment]
    assert "not ours" in capsys.readouterr().err


_SENDS_ITSELF_A_SIGNAL = """
import signal, time
signal.raise_signal(signal.SIGTERM)
time.sleep(0.1)
whole = True
"""


def test_a_signal_in_an_import_waits_until_the_module_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sends_itself_a_signal.py").write_text(_SENDS_ITSELF_A_SIGNAL)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Stopped) as stopped, handled():
        module = import_module("sends_itself_a_signal")
        _wait()
    assert stopped.value.exit_code == 143 and module.whole


def test_a_signal_that_another_thread_receives_wakes_the_main_one() -> None:
    def receive() -> None:
        time.sleep(0.2)  # by then the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    began = time.monotonic()
    with pytest.raises(Stopped) as stopped, handled():
        threading.Thread(target=receive).start()
        threading.Event().wait(30)
    assert stopped.value.exit_code == 143 and time.monotonic() - began < 15


def test_a_signal_in_the_compiler_waits_until_the_kernel_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compile_extra = _compiler_hook(monkeypatch, lambda: seen.append(inside_compiler()))

    @njit
    def doubled(x: float) -> float:
        return 2 * x

    with pytest.raises(Stopped) as stopped, handled():
        doubled(1.5)
    assert compile_extra == [True] and seen == [True]
    assert stopped.value.exit_code == 130
    assert doubled.signatures and doubled(1.5) == 3 and not inside_compiler()


def _compiler_hook(monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> list[bool]:
    """Lets a SIGINT come whenever numba has typed a function; a list that grows when it has."""
    from numba.core import typed_passes

    came: list[bool] = []
    run_pass = typed_passes.NopythonTypeInference.run_pass

    def interrupted(self: object, state: object) -> object:
        done = run_pass(self, state)
        if not came:
            look()
            came.append(True)
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(typed_passes.NopythonTypeInference, "run_pass", interrupted)
    return came
