"""How this process holds its memory, where that takes tests much time: on Linux with glibc, else as it is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_DEFAULT, _KEPT = 128 << 10, 512 << 20
_COLLAPSE, _HUGE = 25, 2 << 20  # of Linux' madvise, since 6.1


def keep_freed_memory(most: int = _KEPT) -> None:
    """Keep so many freed bytes in this process, arrays of up to a quarter of that among them.

    By default large arrays are given back when they are freed, and the system clears every page of the next
    ones: a quarter of the time of some tests. Processes that are started from here are as they always are.
    """
    with contextlib.suppress(OSError, AttributeError):
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


def make_forks_cheap() -> None:
    """Put what is held by now into pages of 2 MB, a hundred thousand fewer to share with every fork."""
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL("libc.so.6").madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, stop in _anonymous():
            for page in range(-(-start // _HUGE) * _HUGE, stop - _HUGE + 1, _HUGE):
                advise(page, _HUGE, _COLLAPSE)


def _anonymous() -> Iterator[tuple[int, int]]:
    """Where this process has memory of its own, and of no file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            yield start, stop
