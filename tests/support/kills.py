"""What a kill leaves, at any number of moments of one run: the files in each of them.

A process that is killed leaves its files as they are, and nothing else; its memory and its locks are gone. So
the folder is copied at these moments, while the run's other threads wait with all that changes files.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.crashes import CHANGING, KILLED, Moment, killed

Kill = tuple[int, Moment]
"""A call that changes files, by its number from 0 on, and whether it is killed before, within or after it."""
AT_ONCE = 40  # copies on the disk


def killed_at(folder: Path, work: Callable[[], object], kills: Sequence[Kill]) -> Iterator[Kill]:
    """Have the folder as each of these kills of some work in it leaves it, in turn.

    The work is done in this process, and comes to its end. A kill at a call that is not made is left out.
    """
    copies = folder.with_name(f"{folder.name}-killed")
    for first in range(0, len(kills), AT_ONCE):
        some = kills[first : first + AT_ONCE]
        folder.mkdir()
        with _copied(folder, copies, some):
            work()
        for call, moment in some:
            shutil.rmtree(folder)
            copy = copies / f"{call}{moment}"
            if copy.exists():
                copy.rename(folder)
                yield call, moment
            else:
                folder.mkdir()
        shutil.rmtree(folder)
        shutil.rmtree(copies)


def really_killed_at(folder: Path, work: Callable[[], object], kills: Sequence[Kill]) -> Iterator[Kill]:
    """The same of files that are known by their inodes, which no copy has: forks that die."""
    for call, moment in kills:
        folder.mkdir()
        assert killed(work, call, moment) in (KILLED, 0), (call, moment)
        yield call, moment
        shutil.rmtree(folder)


@contextmanager
def _copied(folder: Path, copies: Path, kills: Sequence[Kill]) -> Iterator[None]:
    """Copy the folder at these calls of this process, all of which come one after the other."""
    wanted: dict[int, set[Moment]] = defaultdict(set)
    for call, moment in kills:
        wanted[call].add(moment)
    lock, numbers, copying = threading.RLock(), iter(range(1 << 60)), list[Kill]()

    def copy(call: int, moment: Moment) -> None:
        if moment in wanted[call]:
            copying.append((call, moment))
            _copy(folder, copies / f"{call}{moment}")
            copying.clear()

    def watched(name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(os, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            with lock:
                call = -1 if copying else next(numbers)
                if call not in wanted:
                    return real(*args, **kwargs)
                copy(call, "before")
                written = 0
                if "torn" in wanted[call] and name in ("pwrite", "write"):
                    written = real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
                copy(call, "torn")
                if name == "write":  # goes on behind what is written; pwrite begins again
                    args = (args[0], memoryview(args[1])[written:])
                found = real(*args, **kwargs)
                copy(call, "after")
                return found + written if name == "write" else found

        return called

    copies.mkdir()
    with ExitStack() as stack:
        for name in CHANGING:
            stack.enter_context(patch.object(os, name, watched(name)))
        yield


def _copy(folder: Path, copy: Path) -> None:
    """Copy a folder; what has several names in it has them in the copy."""
    names: dict[int, Path] = {}
    copy.mkdir()
    for path in sorted(folder.rglob("*")):
        new, inode = copy / path.relative_to(folder), path.lstat().st_ino
        if path.is_dir() and not path.is_symlink():
            new.mkdir()
        elif inode in names:
            os.link(names[inode], new)
        else:
            names[inode] = new
            shutil.copy2(path, new, follow_symlinks=False)
