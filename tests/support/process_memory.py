"""What the C library does with memory that arrays have freed: keep it for the next ones, or give it back."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_DEFAULT, _KEPT = 128 << 10, 512 << 20


def keep_freed_memory(most: int = _KEPT) -> None:
    """Keep so many freed bytes in this process, arrays of up to a quarter of that among them.

    By default large arrays are given back when they are freed, and the system clears every page of the next
    ones: a quarter of the time of some tests. Processes that are started from here are as they always are.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_TRIM_THRESHOLD, most)
        library.mallopt(_MMAP_THRESHOLD, max(_DEFAULT, most // 4))


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """While it lasts, what grows is seen: nothing that was kept is used again."""
    keep_freed_memory(_DEFAULT)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        yield
    finally:
        keep_freed_memory()
