"""Verification asks the disk: of what was written, next to nothing is in the page cache when it begins."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qconvert.formats.io import read_back
from tests.support.commands import made

COMMANDS: dict[str, tuple[object, ...]] = {
    "folder": ("quantize", "embedded", "--bits", 8, "--shard-size", "2MB", "-o", "out"),
    "gguf": ("to-gguf", "embedded", "--type", "q8_0", "-o", "m.gguf"),
    "process": ("quantize", "embedded", "--bits", 8, "--shard-size", "2MB", "-o", "out", "--rank", "0/2"),
}


def cached(path: Path) -> int:
    """How many pages of a file are in the page cache (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    failed = libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), pages)
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    assert at != ctypes.c_void_p(-1).value and not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


@pytest.fixture
def forgets(here: Path) -> None:
    """Skips where the disk of the tests is one whose cache holds what is written for good, as tmpfs."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be told to forget a file")
    (here / "probe").write_bytes(os.urandom(1 << 20))
    with (here / "probe").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(here / "probe"):
        pytest.skip("this disk is the page cache")


@pytest.mark.usefixtures("forgets")
@pytest.mark.parametrize("kind", COMMANDS)
def test_at_most_a_hundredth_is_cached_when_verification_begins(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, total = [], [], []
    forget: Callable[[Path], None] = read_back._forget

    def watched(path: Path) -> None:
        before.append(cached(path))
        forget(path)
        after.append(cached(path))
        total.append(-(-path.stat().st_size // mmap.PAGESIZE))

    monkeypatch.setattr(read_back, "_forget", watched)
    made(*COMMANDS[kind])
    assert sum(total) > 900
    assert sum(before) > 0.9 * sum(total), "so that this test can see it"
    assert sum(after) <= 0.01 * sum(total)
