"""Reads and writes bytes of files: exactly as many as asked for, or an error a user understands.

Every reader and writer of a format uses these functions. The invariant: a read fills its buffer, a write
empties it, and nothing opened here can block (a pipe, a device or a folder under a file's name is refused).
Positions are explicit (`pread`, `pwrite`), so threads may share a descriptor; nothing is memory-mapped,
because truncating a mapped file kills the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from qconvert.errors import NO_ROOM, CorruptCheckpoint, DiskFull, OutputBusy, QConvertError, refused, shown

# Linux caches what one call writes in folios of up to that size, and with little free page cache spends
# several times as long on finding large ones (16 MiB a call: 0.4 to 3.6 s for 1.15 GB on one machine, 256
# KiB: 0.3 s). It also locks the file for a call's length.
WRITE_BYTES = 256 << 10
# Buffers that one call fills: systems take 16 (the least that POSIX allows) to 1,024.
_READ_TOGETHER = min(256, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


def amount(nbytes: int) -> str:
    """Formats a number of bytes for people: `3.09 GB` (10^9), or all digits under 10 MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"


@contextmanager
def explained(what: str, kind: type[QConvertError] = QConvertError) -> Iterator[None]:
    """Turns the error of a system call into one that begins with `what`, with a hint."""
    try:
        yield
    except OSError as error:
        raise refused(what, error, kind) from error


def open_regular(path: Path) -> int:
    """Opens a regular file (or a link to one) for reading; returns the descriptor.

    Raises CorruptCheckpoint when there is none under that name, or when it may not be read.
    """
    with explained(f"{shown(path.name)}: cannot be opened", CorruptCheckpoint):
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise CorruptCheckpoint(f"{shown(path.name)}: is {kind}, not a file")
    return fd


def octets(array: np.ndarray) -> memoryview:
    """Returns a view of the bytes of a C-contiguous array, empty ones included."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides} has no bytes in one piece")
    # A cast takes a third of the time, and cannot be made of nothing.
    return array.data.cast("B") if array.size else array.reshape(-1).view(np.uint8).data


def read_exactly(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fills `buffer` with the bytes at `offset`; CorruptCheckpoint if the file ends before that."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise refused(f"{name}: cannot be read at byte {offset + done}", error) from error
        if count == 0:
            raise CorruptCheckpoint(
                f"{name}: ends at byte {offset + done}, {len(buffer) - done} bytes short",
                "it changed while it was read; start again when nothing writes to it",
            )
        done += count


def read_all_exactly(fd: int, parts: Sequence[tuple[int, memoryview]], name: str) -> None:
    """Fills buffers with the bytes at their offsets, which rise; those that lie side by side in one call.

    Raises what `read_exactly` does.
    """
    for run in _side_by_side(parts):
        start, buffers = run[0][0], [buffer for _, buffer in run]
        try:
            count = os.preadv(fd, buffers, start)
        except OSError as error:
            raise refused(f"{name}: cannot be read at byte {start}", error) from error
        if count == sum(map(len, buffers)):
            continue
        for offset, buffer in run:
            there = min(max(start + count - offset, 0), len(buffer))
            read_exactly(fd, buffer[there:], offset + there, name)


def _side_by_side(parts: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Yields runs of parts of a file, no more than one call takes."""
    run: list[tuple[int, memoryview]] = []
    end = 0
    for part in parts:
        if run and (part[0] != end or len(run) == _READ_TOGETHER):
            yield run
            run = []
        run.append(part)
        end = part[0] + len(part[1])
    if run:
        yield run


def write_exactly(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Writes all of `buffer` at `offset`; QConvertError if the disk is full or fails."""
    done = 0
    while done < len(buffer):
        try:
            done += os.pwrite(fd, buffer[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            raise refused(f"{name}: cannot be written at byte {offset + done}", error) from error


def claim(path: Path) -> int:
    """Creates a file or takes it as it is, and locks it, so that no other run writes it.

    Returns the descriptor. One that has a second name, as a run that was killed while it named its output
    leaves, is created again. Raises OutputBusy while another run is alive, QConvertError where no file can be
    written.
    """
    with explained(f"{shown(path.name)}: cannot be created"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        lock_or_refuse(fd, path)
        if os.fstat(fd).st_nlink < 2:
            return fd
        with explained(f"{shown(path.name)}: cannot be removed"):
            path.unlink()
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return claim(path)


def empty(fd: int, path: Path) -> None:
    """Empties a file that was claimed."""
    with explained(f"{shown(path.name)}: cannot be emptied"):
        os.ftruncate(fd, 0)


def lock_or_refuse(fd: int, path: Path) -> None:
    """Locks the file at `path`, open as `fd`, until it is closed; OutputBusy if another run has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputBusy(
            f"{path}: another run is writing it", "wait until it is done, or choose another output"
        ) from None
    except OSError:
        return  # a file system without locks: continue unlocked
    if not path.exists() or not os.path.samestat(os.fstat(fd), path.stat()):  # renamed before it was locked
        raise OutputBusy(f"{path}: another run has just finished it", "choose another output")


def create(path: Path, size: int, *, claimed: bool = False, sparse: bool = False) -> int:
    """Creates a file of `size` bytes for writing, its disk space allocated at once; returns the descriptor.

    A `claimed` one exists already, empty (see `claim`); a `sparse` one takes space as it is written. Raises
    QConvertError when the disk cannot hold it or the folder cannot be written.
    """
    with explained(f"{shown(path.name)}: cannot be created"):
        fd = os.open(path, os.O_RDWR | (os.O_NOFOLLOW if claimed else os.O_CREAT | os.O_EXCL), 0o666)
    try:
        reserve(fd, path, size, sparse=sparse)
    except QConvertError:
        os.close(fd)
        path.unlink()
        raise
    return fd


def reserve(fd: int, path: Path, size: int, *, sparse: bool = False) -> None:
    """Makes an empty file `size` bytes long; QConvertError where the disk has not that much room.

    `path` is its name in messages, and says on which disk it is. A `sparse` file takes none yet.
    """
    try:
        os.ftruncate(fd, size) if sparse else _allocate(fd, size)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        kind = DiskFull if error.errno in NO_ROOM else QConvertError
        raise kind(
            f"{shown(path.name)}: needs {amount(size)}, {amount(free)} free: {error.strerror}",
            "free some space, or write to another disk",
        ) from error


def _allocate(fd: int, size: int) -> None:
    """Makes an empty file `size` bytes long, with disk space where system and disk can reserve it."""
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(fd, 0, size)
            return
    except OSError as error:
        # EINVAL: musl's answer for file systems that cannot, and everybody's for no bytes at all.
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
    os.ftruncate(fd, size)


def reopen(path: Path, size: int) -> int:
    """Opens a file of `size` bytes for writing, with what it holds; returns the descriptor.

    Raises QConvertError for one of another size, and where it cannot be written.
    """
    with explained(f"{shown(path.name)}: cannot be opened"):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    found = os.fstat(fd).st_size
    if found != size:
        os.close(fd)
        raise QConvertError(
            f"{shown(path.name)}: has {amount(found)}, not {amount(size)}",
            "something else has written to it; remove it",
        )
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file atomically, in place of an earlier one.

    Raises QConvertError naming it when the disk is full or the folder cannot be written.
    """
    beside, fd = _create_beside(path)
    try:
        with explained(f"{path}: cannot be written"):
            try:
                write_exactly(fd, memoryview(data), 0, str(path))
                flush(fd, str(path))
            finally:
                os.close(fd)
            beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def name_new(partial: Path, final: Path) -> None:
    """Renames a file to an unused name; FileExistsError if it is taken. An error leaves it the old name."""
    try:
        os.link(partial, final)  # which, unlike a rename, replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if final.exists():
            raise FileExistsError(final) from None
        partial.rename(final)
    else:
        try:
            partial.unlink()
        except FileNotFoundError:
            pass  # another process that names the same file was at it meanwhile; the file has its name
        except OSError:
            final.unlink()
            raise


def require_writable(path: Path) -> None:
    """Raises QConvertError unless a file may be written under this name; creates its folder."""
    beside, fd = _create_beside(path)
    os.close(fd)
    beside.unlink()


def _create_beside(path: Path) -> tuple[Path, int]:
    """Creates a temporary file in the folder of `path`; returns its path and descriptor."""
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    with explained(f"{path}: cannot be created"):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.parent.exists() and not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def copy_whole(source: Path, target: Path) -> None:
    """Copies a small file; QConvertError naming the target when it cannot be written."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise refused(f"{target}: cannot be written", error) from error


def require_free_disk(path: Path, nbytes: int) -> None:
    """Raises DiskFull unless the disk of `path` has `nbytes` bytes free, QConvertError if it is no disk."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    disk = shutil.disk_usage(folder)
    if not disk.total:  # /proc and its like
        raise QConvertError(f"{path}: {folder} is not on a disk, and holds no files", "choose another output")
    if disk.free < nbytes:
        raise DiskFull(
            f"{path}: needs {amount(nbytes)}, {amount(disk.free)} free",
            "free some space, or write to another disk",
        )


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flush(fd, path.name)
    finally:
        os.close(fd)


def flush(fd: int, name: str) -> None:
    """Waits until what was written to a descriptor is on the disk; QConvertError if that fails."""
    with explained(f"{shown(name)}: cannot be written to disk"):
        os.fsync(fd)
