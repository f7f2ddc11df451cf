"""What commands take of memory, each in a process of its own, as the system counts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup/memory")
# Joins a control group, runs the command line, and prints the most that was resident.
_RUN = """
import re, sys
if sys.argv[1]:
    import os
    open(sys.argv[1], "w").write(str(os.getpid()))
from qconvert.cli import main
try:
    main(sys.argv[2:])
finally:
    kilobytes = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    print("resident", int(kilobytes) * 1024, file=sys.stderr)
"""


def own_cgroup() -> Path:
    """The folder of the control group of `memory_cgroup`."""
    return _CGROUPS / f"qconvert-test-{os.getpid()}"


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A control group of so many bytes, page cache included; skips where none can be made."""
    folder = own_cgroup()
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def in_own_process(*args: object, group: Path | None = None, **env: str) -> tuple[int, str, int]:
    """Run `qconvert ARGS`, in a control group if one is given; its code, stderr, and most resident bytes."""
    joins = str(group / "cgroup.procs") if group is not None else ""
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, joins, *map(str, args)],
        env={**os.environ, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said, _, most = ran.stderr.rpartition("resident ")
    assert most.strip().isdigit(), ran.stderr[-2000:]
    return ran.returncode, said, int(most)


def asked_for(said: str) -> int:
    """The bytes that a refusal says to ask for."""
    found = re.search(r"\nHint: write --max-memory (\d+)MB\n", said)
    assert found is not None, said
    return int(found[1]) * 1_000_000
