"""Gives memory that was freed back to the system, of which C libraries keep pieces below 32 MB."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any


@cache
def _library() -> Any:
    """The C library, where it can be asked; None elsewhere (macOS, Windows, musl)."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        return library
    return None


def give_back() -> None:
    """Return what was freed, so that what is resident is what is in use."""
    if (library := _library()) is not None:
        library.malloc_trim(0)
