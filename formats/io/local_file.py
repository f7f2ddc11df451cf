"""Bytes between a disk and a buffer: exactly as many as asked for, or an error a user understands.

Every reader and writer of a format goes through these few calls. The invariant: a read fills its
buffer, a write empties it, and nothing opened here can block (a pipe, a device or a folder under a
file's name is refused). Positions are explicit (`pread`, `pwrite`), so any number of threads may
share a descriptor; nothing is memory-mapped, because a file cut short under a map kills the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

import numpy as np

from qconvert.errors import CorruptCheckpoint, QConvertError, remedy, shown

# Linux keeps what one call writes in folios of up to that size, and a page cache with little room left
# spends several times as long on finding large ones (16 MiB a call: 0.4 to 3.6 s for 1.15 GB on one
# machine, 256 KiB: 0.3 s). It also locks the file for a call's length.
WRITE_BYTES = 256 << 10


def amount(nbytes: int) -> str:
    """A number of bytes as people read it: `3.09 GB` (10^9), or all digits under 10 MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file (or a link to one).

    Raises CorruptCheckpoint when there is none under that name, or when it may not be read.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits until somebody writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptCheckpoint(
            f"{shown(path.name)}: cannot be opened: {error.strerror}", remedy(error)
        ) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise CorruptCheckpoint(f"{shown(path.name)}: is {kind}, not a file")
    return fd


def octets(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, shared with it, also when it is empty."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides} has no bytes in one piece")
    return array.reshape(-1).view(np.uint8).data


def read_exactly(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fill `buffer` with the bytes at `offset`; CorruptCheckpoint if the file ends before that."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise QConvertError(
                f"{name}: cannot be read at byte {offset + done}: {error.strerror}", remedy(error)
            ) from error
        if count == 0:
            raise CorruptCheckpoint(
                f"{name}: ends at byte {offset + done}, {len(buffer) - done} bytes short",
                "it changed while it was read; start again when nothing writes to it",
            )
        done += count


def write_exactly(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Write all of `buffer` at `offset`; QConvertError if the disk is full or fails."""
    done = 0
    while done < len(buffer):
        try:
            done += os.pwrite(fd, buffer[done : done + WRITE_BYTES], offset + done)
        except OSError as error:
            where = f"{name}: cannot be written at byte {offset + done}"
            raise QConvertError(f"{where}: {error.strerror}", remedy(error)) from error


def claim(path: Path) -> int:
    """A descriptor of an empty file under this name that holds the lock on it: no other run writes it.

    What a dead run left there is emptied. Raises QConvertError while another run is alive, and where no
    file can be written.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise QConvertError(
            f"{shown(path.name)}: cannot be created: {error.strerror}", remedy(error)
        ) from error
    try:
        lock_or_refuse(fd, path)
        os.ftruncate(fd, 0)
    except OSError as error:
        os.close(fd)
        raise QConvertError(
            f"{shown(path.name)}: cannot be emptied: {error.strerror}", remedy(error)
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_or_refuse(fd: int, path: Path) -> None:
    """Lock what is under this name, open as `fd`, until it is closed; QConvertError if another run has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise QConvertError(
            f"{path}: another run is writing it", "wait until it is done, or choose another output"
        ) from None
    except OSError:
        return  # a file system without locks: go on as a single run would
    if not path.exists() or not os.path.samestat(os.fstat(fd), path.stat()):  # renamed before it was locked
        raise QConvertError(f"{path}: another run has just finished it", "choose another output")


def create(path: Path, size: int, *, claimed: bool = False) -> int:
    """A descriptor for writing a new file of `size` bytes, their disk space taken at once.

    A `claimed` one is there already, empty (see `claim`). Raises QConvertError when the disk cannot hold
    it or the folder cannot be written.
    """
    try:
        fd = os.open(path, os.O_RDWR | (os.O_NOFOLLOW if claimed else os.O_CREAT | os.O_EXCL), 0o666)
    except OSError as error:
        raise QConvertError(
            f"{shown(path.name)}: cannot be created: {error.strerror}", remedy(error)
        ) from error
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        path.unlink()
        free = shutil.disk_usage(path.parent).free
        raise QConvertError(
            f"{shown(path.name)}: needs {amount(size)}, {amount(free)} free: {error.strerror}",
            "free some space, or write to another disk",
        ) from error
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file that appears whole, in place of an earlier one, or not at all.

    Raises QConvertError naming it when the disk is full or the folder cannot be written.
    """
    beside, fd = _create_beside(path)
    try:
        try:
            write_exactly(fd, memoryview(data), 0, str(path))
            flush(fd, str(path))
        finally:
            os.close(fd)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise QConvertError(f"{path}: cannot be written: {error.strerror}", remedy(error)) from error
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def require_writable(path: Path) -> None:
    """Raise QConvertError unless a file may be written under this name; its folder is made."""
    beside, fd = _create_beside(path)
    os.close(fd)
    beside.unlink()


def _create_beside(path: Path) -> tuple[Path, int]:
    """A new file in the folder in which `path` is to be, and its descriptor."""
    beside = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.parent.exists() and not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        return beside, os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise QConvertError(f"{path}: cannot be created: {error.strerror}", remedy(error)) from error


def copy_whole(source: Path, target: Path) -> None:
    """Copy a small file; QConvertError naming the target when it cannot be written."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise QConvertError(f"{target}: cannot be written: {error.strerror}", remedy(error)) from error


def require_free_disk(path: Path, nbytes: int) -> None:
    """Raise QConvertError unless the disk that `path` is (or will be) on has `nbytes` bytes free."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise QConvertError(
            f"{path}: needs {amount(nbytes)}, {amount(free)} free",
            "free some space, or write to another disk",
        )


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of names, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        flush(fd, path.name)
    finally:
        os.close(fd)


def flush(fd: int, name: str) -> None:
    """Wait until all that was written to a descriptor's file is on the disk; QConvertError if it fails."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise QConvertError(
            f"{shown(name)}: cannot be written to disk: {error.strerror}", remedy(error)
        ) from error
