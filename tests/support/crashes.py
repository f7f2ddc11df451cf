"""Kills a command at one of its calls that change files, as `kill -9` or a power cut would in that moment.

The parent has loaded all kernels, so that a killed run takes as long as its work: it is a fork.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

from qconvert.convert.batches import SMALL
from qconvert.formats.io.journal import Journal, load
from qconvert.formats.io.planned_files import FilePlan

CHANGING = (
    "pwrite", "write", "fsync", "fdatasync", "posix_fallocate", "ftruncate",
    "rename", "replace", "link", "unlink", "mkdir", "rmdir",
)  # fmt: skip
# What commands import when they come to it: a fork would do so again, for half of the time that it takes.
LATE = (
    "_strptime", "huggingface_hub._commit_api", "huggingface_hub.hf_api", "huggingface_hub.lfs",
    "qconvert.convert.hub_repository", "qconvert.convert.ranks_elsewhere",
)  # fmt: skip
T = TypeVar("T")
Moment = Literal["before", "torn", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "torn", "after")
KILLED = 128 + signal.SIGKILL
# Commands, and what they write: one file, parts, shards, and a folder with a file for the settings.
JOBS: dict[str, tuple[tuple[object, ...], str]] = {
    "quantize": (("quantize", "embedded", "--bits", 4), "out"),
    "to-gguf": (("to-gguf", "embedded", "--type", "q4_k_m"), "m.gguf"),
    "parts": (("to-gguf", "embedded", "--type", "q8_0", "--split-max-size", "2MB"), "m.gguf"),
    "convert": (
        ("convert", "embedded", "--to", "gptq", "--scheme", "int4", "--shard-size", "2MB"),
        "out",
    ),
}


def asked(every: Sequence[T], some: Sequence[T]) -> Sequence[T]:
    """Some cases; every one under QCONVERT_CRASH=all (`make crash`), or the third of 8 parts under 2/8."""
    words = os.environ.get("QCONVERT_CRASH", "")
    number, _, parts = words.partition("/")
    return every if words == "all" else every[int(number) :: int(parts)] if parts else some


def forked(work: Callable[[], object]) -> int:
    """Do something in a fork of this process, which says nothing; returns its exit code."""
    return ended(started(work))


def ended(child: int) -> int:
    """Wait for a fork to end; its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@functools.cache
def imported() -> None:
    """Import what commands import late, and what the client of huggingface_hub does as it is made."""
    for name in LATE:
        importlib.import_module(name)
    importlib.import_module("huggingface_hub").get_session()


def started(work: Callable[[], object]) -> int:
    """Begin to do something in a fork of this process, which says nothing; returns its number."""
    imported()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(silence, stream)
            work()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 98
        finally:
            os._exit(code)
    return child


def killed(work: Callable[[], object], call: int, moment: Moment) -> int:
    """Do something in a fork that dies at the call of this number, counted from 0; its exit code."""

    def dying() -> None:
        _die_at(call, moment)
        work()

    return forked(dying)


def stopping(work: Callable[[], object], call: int) -> Callable[[], object]:
    """What does something in a process that stops at the call of this number until it is continued."""

    def stopping() -> None:
        _die_at(call, "before", lambda: os.kill(os.getpid(), signal.SIGSTOP))
        work()

    return stopping


def running(*args: object) -> Callable[[], object]:
    """What runs `qconvert ARGS`."""
    from qconvert.cli import main

    return lambda: main([str(arg) for arg in args])


def calls_of(work: Callable[[], object]) -> int:
    """How many such calls there are; threads make it differ a little from run to run."""
    return len(names_of(work))


def names_of(work: Callable[[], object]) -> list[str]:
    """The names of such calls, in their order."""
    told, tell = os.pipe()
    write = os.write

    def counting() -> None:
        made = _die_at(sys.maxsize, "before")
        try:
            work()
        finally:
            write(tell, bytes(map(CHANGING.index, made)))
            os.close(tell)

    child = started(counting)
    os.close(tell)
    found = b"".join(iter(lambda: os.read(told, 1 << 16), b""))
    os.close(told)
    assert ended(child) == 0
    return [CHANGING[number] for number in found]


@contextlib.contextmanager
def failing(call: int, number: int, *, lasting: bool) -> Iterator[None]:
    """Lets the call of this number, in this process, fail; and all that come after it, if that is lasting."""
    counted, lock = iter(range(sys.maxsize)), threading.Lock()

    def broken(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with lock:
                now = next(counted)
            if now == call or (lasting and now > call):
                named = args[:1] if isinstance(args[0], str | os.PathLike) else ()
                raise OSError(number, os.strerror(number), *map(os.fspath, named))
            return real(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:
        for name in CHANGING:
            stack.enter_context(patch.object(os, name, broken(getattr(os, name))))
        yield


def _die_at(call: int, moment: Moment, end: Callable[[], object] = lambda: os._exit(KILLED)) -> list[str]:
    """Let this process die, or `end` so, at one of its calls; notes those of all threads."""
    made: list[str] = []
    lock = threading.Lock()

    def deadly(name: str, tears: bool) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(os, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            with lock:
                made.append(name)
                if len(made) - 1 != call:
                    return real(*args, **kwargs)
                if moment == "torn" and tears:
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
                elif moment == "after":
                    real(*args, **kwargs)
                end()
                return real(*args, **kwargs)

        return called

    for name in CHANGING:
        setattr(os, name, deadly(name, name in ("pwrite", "write")))
    return made


def false_claims(journal: Journal, folder: Path, files: Sequence[FilePlan]) -> list[str]:
    """What a journal says of rows that the partial files, by their names in the plan, do not hold."""
    homes = {name: file for file in files for name in file.specs}
    read, found = functools.cache(lambda name: (folder / name).read_bytes()), []
    for record in journal.records:
        for name, start, rows, width, crc, column in record[-1] if record[0] == "b" else ():
            file = homes[name]
            spec, raw = file.specs[name], read(file.name)
            size = spec.dtype.nbytes
            begin = file.offsets[name] + start * spec.width * size
            whole = memoryview(raw)[begin : begin + rows * spec.width * size]
            stride = spec.width * size
            lines = [whole]  # of whole rows, which are one after the other
            if width != spec.width:
                lines = [whole[i * stride + column * size :][: width * size] for i in range(rows)]
            actual = 0
            for line in lines:
                actual = zlib.crc32(line, actual)
            if actual != crc:
                found.append(f"{name} rows {start} to {start + rows}")
    return found


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def journal_of(out: Path) -> Journal | None:
    """The journal of an unfinished output."""
    if out.suffix == ".gguf":
        return load(out.with_name(f"{out.name}.partial-journal"))
    return load(out.with_name(f"{out.name}.partial") / ".qconvert-journal")


@contextlib.contextmanager
def groups_of(nbytes: int, *, together: bool = False) -> Iterator[None]:
    """Close groups of the journal after so many bytes: of tiny models, several.

    Blocks are made one by one, unless `together`: as small as they are, one batch would be all of them.
    """
    from unittest.mock import patch

    from qconvert.convert import batches
    from qconvert.formats.io import journal

    small = SMALL if together else 0.0
    with patch.object(journal, "GROUP_BYTES", nbytes), patch.object(batches, "SMALL", small):
        yield
