"""Notifies callers that kernels are being compiled, without importing the compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Heard = Callable[[bool], None]
"""Is called when the compilation of a kernel begins: whether later runs will find it in the cache."""
_LISTENERS: list[Heard] = []


@contextmanager
def heard(listener: Heard) -> Iterator[None]:
    """Call the listener for every kernel that is compiled while the context lasts."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def announce(cached: bool) -> None:
    """Tell all listeners that a kernel is being compiled."""
    for listener in list(_LISTENERS):
        listener(cached)


class _Depth(threading.local):
    """How many locks of the compiler this thread holds or waits for."""

    locks = 0


_DEPTH = _Depth()
_AFTERWARDS: list[Callable[[], None]] = []


def inside_compiler() -> bool:
    """Whether this thread is in the compiler, where an exception out of a signal handler would harm.

    LLVM calls Python back, drops what is raised there, and goes on with half of its work.
    """
    return _DEPTH.locks > 0


@contextmanager
def after_compiling(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in every thread that leaves the compiler while the context lasts; it may raise."""
    _AFTERWARDS.append(act)
    try:
        yield
    finally:
        _AFTERWARDS.remove(act)


def enter_compiler() -> None:
    """Note that this thread waits for the compiler's lock, which it may hold already."""
    _DEPTH.locks += 1


def leave_compiler() -> None:
    """Note that this thread has given a lock of the compiler back."""
    _DEPTH.locks -= 1
    if not _DEPTH.locks:
        for act in list(_AFTERWARDS):
            act()
