"""Limits the memory of calibration: to the size given, else to most of what the machine has left."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from qconvert.calibrate.freed import give_back
from qconvert.errors import BadRecipe

KERNELS = 96 << 20
"""What compiled kernels and libraries will add to the process, which it has not loaded yet.

Measured: 120 MB once a model of 8 MB was calibrated, of which `memory.LIBRARIES` are a part.
"""
SHARE = 0.8
"""Of the memory that is available, how much calibration takes where none was asked for."""
# What a process has before its work differs between runs by a part, so that the memory to ask for is more.
_VARIES = 1.02

# Of both kinds of control groups: where it is, the most it may take, what it takes, and what of files in that
# can go.
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """At most `memory` bytes for a process that has `process` of them already.

    One that was asked for is `strict`: what does not fit is refused. Otherwise it runs with all savings.
    """

    memory: int
    process: int = 0
    strict: bool = True

    @property
    def room(self) -> int:
        """What a run may take beside the process."""
        return self.memory - self.process

    def check(self, needed: int, doing: str, otherwise: str = "") -> None:
        """Raise BadRecipe where `doing` something needs more than a strict limit allows.

        `otherwise` ends the hint.
        """
        if needed <= self.room or not self.strict:
            return
        megabytes = -(-(self.process + needed) // 1_000_000)
        asked = self.memory // 1_000_000
        raise BadRecipe(
            f"--max-memory: {doing} needs at least {megabytes:,} MB, {asked:,} MB was asked",
            f"write --max-memory {-(-int(_VARIES * megabytes) // 10) * 10}MB{otherwise}",
        )


def memory_limit(asked: int | None) -> MemoryLimit:
    """The limit of a run from now on: `asked` bytes for all of the process, or what is chosen for it."""
    give_back()
    if asked is not None:
        return MemoryLimit(asked, resident() + KERNELS)
    available = available_memory()
    memory = sys.maxsize if available is None else int(SHARE * available)
    return MemoryLimit(memory, KERNELS, strict=False)


def resident() -> int:
    """Bytes that this process has in memory."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return peak_resident()


def peak_resident() -> int:
    """The most bytes that this process had in memory at once."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text().splitlines())
        return next(int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:")
    import resource  # in kilobytes but on macOS

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_memory(system: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that programs can still take without swapping; None where the system does not say.

    Linux says it, page cache that can go included; a control group may allow less. Elsewhere it is all of the
    machine's memory.
    """
    if not system.exists():
        names = getattr(os, "sysconf_names", {})
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else None
    lines = (line.split() for line in system.read_text().splitlines())
    free = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
    rooms = [free, *(_room(*group) for group in _CONTROL_GROUPS)]
    return min((room for room in rooms if room is not None), default=None)


def _room(folder: Path, most: str, taken: str, cached: tuple[str, ...]) -> int | None:
    """What a control group has left; None where it is not there or has no limit."""
    try:
        limit, used = (folder / most).read_text().strip(), int((folder / taken).read_text())
        stored = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= sum(int(stored.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None
