"""Ends a command on SIGTERM and Ctrl-C: once so that what is done is kept, twice at once.

The signal becomes an exception of the main thread, but not where it would be dropped or end the process: in
the compiler it waits until the kernel is made, in an import until the module is there, and out of a finalizer
or a callback from C it is raised once more.

Python runs handlers in the main thread alone, between two of its steps. Where that waits for others, it is
woken: the system may give the signal to another thread, or give it a moment before the waiting begins.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any

from qconvert.core.compiling import after_compiling, inside_compiler

# Schedulers kill 10 to 30 seconds after SIGTERM; a block that is being computed may take longer than this.
SECONDS_TO_END = 4.0


class Stopped(KeyboardInterrupt):
    """A signal has ended the command; `message` says what it left, where it left something."""

    def __init__(self, signum: int = signal.SIGINT, message: str = "") -> None:
        super().__init__()
        self.signum, self.message = signum, message

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


LastWords = Callable[[Stopped], tuple[str, bool]]
"""What to say of a signal that has ended the command, and whether on stderr."""


class _State:
    """The signal that came, what is said of it, and the message of work that may not end in time."""

    signum: int | None = None
    waiting: bool = False  # for the compiler
    last_words: LastWords | None = None
    farewell: Callable[[], str] | None = None


def exit_code() -> int:
    """The exit code of a command that a signal has ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return Stopped(_State.signum or signal.SIGINT).exit_code


def _receive(signum: int, frame: FrameType | None) -> None:
    if _importing(frame):
        _thread.start_new_thread(_send_soon, (signum,))
        return
    if _State.signum is not None:
        os._exit(128 + signum)
    _State.signum = signum
    if _State.farewell is not None:
        timer = Timer(SECONDS_TO_END, _leave)
        timer.daemon = True
        timer.start()
    if inside_compiler():
        _State.waiting = True
    else:
        raise Stopped(signum)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: C++ of torch calls Python there, and aborts at what is raised."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _raise_waiting() -> None:
    """Raise for a signal that came while the main thread was in the compiler."""
    if _State.waiting and _State.signum is not None and threading.current_thread() is threading.main_thread():
        _State.waiting = False
        raise Stopped(_State.signum)


def _raise_again(dropped: Any) -> None:
    """Where Python can only report an exception and drop it: send the signal of a Stopped once more."""
    if isinstance(dropped.exc_value, Stopped):
        _State.signum = None
        _thread.start_new_thread(_send_soon, (dropped.exc_value.signum,))
    else:
        sys.__unraisablehook__(dropped)


def _send_soon(signum: int) -> None:
    """Send the process a signal when what could not take the first may be over."""
    time.sleep(0.01)
    os.kill(os.getpid(), signum)


def _leave() -> None:
    """End the process, whatever its threads are computing, unless the work is over already."""
    if _State.farewell is not None and _State.signum is not None and _State.last_words is not None:
        stopped = Stopped(_State.signum, _State.farewell())
        text, to_stderr = _State.last_words(stopped)
        stream = sys.__stderr__ if to_stderr else sys.__stdout__
        os.write(stream.fileno() if stream else 1 + to_stderr, f"{text}\n".encode())
        os._exit(stopped.exit_code)


@contextmanager
def _woken() -> Iterator[None]:
    """While the context lasts, a signal wakes the main thread, whichever thread received it."""
    if not hasattr(signal, "pthread_kill"):  # Windows
        yield
        return
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    before = signal.signal(signal.SIGURG, lambda signum, frame: None)  # nothing but an interruption
    told_before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    _thread.start_new_thread(_wake, (told, threading.get_ident()))
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        signal.signal(signal.SIGURG, before)
        os.close(tell)


def _wake(told: int, thread: int) -> None:
    """Interrupt what a thread waits for, a moment after each of the signals whose numbers come."""
    while number := os.read(told, 1):
        if number[0] != signal.SIGURG:
            time.sleep(0.05)
            signal.pthread_kill(thread, signal.SIGURG)
    os.close(told)


@contextmanager
def handled(last_words: LastWords = lambda stopped: (stopped.message, True)) -> Iterator[None]:
    """Raises Stopped in the main thread for the first signal, and leaves the process on the second.

    Where the work does not end in time after the first, `last_words` are said, and the process is left.

    A signal that the process was told to ignore stays ignored, as Ctrl-C is in the background of a shell.
    """
    before: dict[int, Any] = {}
    _State.signum, _State.waiting, _State.last_words = None, False, last_words
    hook, sys.unraisablehook = sys.unraisablehook, _raise_again
    for each in (signal.SIGTERM, signal.SIGINT):
        if each is signal.SIGTERM or signal.getsignal(each) is not signal.SIG_IGN:
            before[each] = signal.signal(each, _receive)
    try:
        with _woken(), after_compiling(_raise_waiting):
            yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_in_time(farewell: Callable[[], str]) -> Iterator[None]:
    """Around work that can be killed: it ends a few seconds after a signal, with this message."""
    _State.farewell = farewell
    try:
        yield
    finally:
        _State.farewell = None
