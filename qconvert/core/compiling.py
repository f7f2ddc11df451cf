"""Lets callers hear that kernels are being compiled, without importing the compiler."""

from __future__ import annotations

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
