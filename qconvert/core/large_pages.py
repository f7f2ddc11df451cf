"""Memory in pages of 2 MB, where Linux has them, instead of 4 KB."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

AVAILABLE = hasattr(mmap, "MADV_HUGEPAGE")
"""Whether this system can be asked for them: Linux."""


def in_large_pages(nbytes: int) -> mmap.mmap:
    """Memory of zeros that is given back to the system when it is closed, in large pages where there are any.

    They come as they are touched; what is not touched takes no memory.
    """
    private: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if AVAILABLE else {}
    found = mmap.mmap(-1, nbytes, **private)
    if AVAILABLE:
        with suppress(OSError):  # a kernel that was built without them
            found.madvise(mmap.MADV_HUGEPAGE)
    return found
