"""Reverts or completes the renaming of the files of one output that a killed run left half done.

Several parts cannot get their names in one step. Before the first is named, a record of all is written beside
them; the next run tells by it which files under final names are parts of an output that was never finished.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qconvert.formats.io.local_file import explained, flush, read_exactly, sync, write_exactly

_SUFFIX = ".partial-parts"
_MAX_BYTES = 4 << 20
# A file is identified by its inode and times, which renaming does not change.
_Identity = list[int]


def partial_file(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(f"{path.name}.partial")


def announce(finals: Sequence[Path]) -> None:
    """Records the partial files that are about to be named; one file alone needs no record."""
    if len(finals) > 1:
        found = {final.name: _identity(partial_file(final)) for final in finals}
        raw = json.dumps(found).encode()
        with explained(f"{_record(finals)}: cannot be written"):
            fd = os.open(_record(finals), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            write_exactly(fd, memoryview(raw), 0, _record(finals).name)
            flush(fd, _record(finals).name)
        finally:
            os.close(fd)


def conclude(finals: Sequence[Path]) -> None:
    """Removes the record, when all files have their names, or none."""
    _record(finals).unlink(missing_ok=True)


def settle(finals: Sequence[Path]) -> None:
    """Brings an output whose naming was cut short to a state that a run can begin with.

    Either all files have their final names afterwards, or those that are provably of the unfinished output
    have their partial ones again. Files of other origin, and of a run that is alive, stay as they are.
    """
    for final in finals:
        partial = partial_file(final)
        if _same(partial, final):  # killed between a link and the removal of the other name
            with _alone([final]) as alone:
                if alone:
                    partial.unlink()
    if not _record(finals).is_file():
        return
    recorded = _read(_record(finals))  # nothing, if the kill tore it: then no file was named yet
    named = [f for f in finals if f.name in recorded and recorded[f.name] == _identity(f)]
    waiting = [partial_file(final) for final in finals if partial_file(final).is_file()]
    with _alone([*named, *waiting]) as alone:
        if not alone:
            return
        if len(named) < len(finals):
            for final in named:
                if not partial_file(final).exists():
                    final.rename(partial_file(final))
            sync(finals[0].parent)
        conclude(finals)


def _record(finals: Sequence[Path]) -> Path:
    return finals[0].with_name(f"{finals[0].name}{_SUFFIX}")


def _identity(path: Path) -> _Identity | None:
    with suppress(OSError):
        found = path.lstat()
        return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
    return None


def _same(a: Path, b: Path) -> bool:
    identity = _identity(a)
    return identity is not None and identity == _identity(b)


def _read(path: Path) -> dict[str, _Identity]:
    """The record at `path`; empty where there is none, or one that was not written whole."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        buffer = bytearray(min(os.fstat(fd).st_size, _MAX_BYTES))
        read_exactly(fd, memoryview(buffer), 0, path.name)
        found = json.loads(buffer)
    except (ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return found if isinstance(found, dict) else {}


@contextmanager
def _alone(paths: Iterable[Path]) -> Iterator[bool]:
    """Holds the locks of these files while the context lasts; False where a run that is alive has one."""
    locks: list[int] = []
    try:
        for path in paths:
            locks.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
            try:
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                continue  # a file system without locks
        yield True
    finally:
        for lock in locks:
            os.close(lock)
