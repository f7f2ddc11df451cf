"""Passes on what numba's compiler does: which kernels it compiles, and which threads are in it."""

from __future__ import annotations

from typing import Any

from numba.core import event
from numba.core.caching import NullCache

from qconvert.core.compiling import announce, enter_compiler, leave_compiler

KERNELS: set[Any] = set()
"""The entry points, whose compilation is announced; not their parts."""


class _Announcer(event.Listener):
    """Announces kernels that numba compiles, but not those that it loads from its cache."""

    def on_start(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        if dispatcher in KERNELS:
            announce(not isinstance(dispatcher._cache, NullCache))

    def on_end(self, event: Any) -> None:
        pass


class _LockListener(event.Listener):
    """Tracks which threads are in the compiler."""

    def on_start(self, event: Any) -> None:
        enter_compiler()

    def on_end(self, event: Any) -> None:
        leave_compiler()


event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
event.register("numba:compiler_lock", _LockListener())  # type: ignore[no-untyped-call]
