"""Writes output folders atomically.

Everything is written into `<out>.partial`; only a finished folder gets the name `<out>`, by one rename. The
invariant: whatever happens before that rename (an error, Ctrl-C, kill -9, a power cut), nothing new is under
the final name, and the next run clears what the interrupted one left.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from qconvert.errors import BadRecipe, OutputExists
from qconvert.formats.io.local_file import explained, lock_or_refuse, sync

MANIFEST_FILE = "qconvert.json"
_MARKER = ".qconvert-partial"  # marks a .partial folder as ours, to be cleared


def check_target(out: Path, *, overwrite: bool = False, sources: Iterable[Path] = ()) -> None:
    """Raises unless a folder may be written under the name `out`.

    OutputExists when the name is taken: only with `overwrite`, and only a folder that holds our manifest, is
    replaced. BadRecipe when that would overwrite a source.
    """
    target = out.resolve()
    for source in sources:
        if {target, _partial(target)} & {source.resolve(), *source.resolve().parents}:
            raise BadRecipe(f"{out}: is or holds the source {source}", "choose another output")
    if not (out.exists() or out.is_symlink()):
        return
    if not (out / MANIFEST_FILE).is_file():
        what = f"not written by qconvert: no {MANIFEST_FILE} in it" if out.is_dir() else "not a folder"
        raise OutputExists(
            f"{out}: already exists, and is not replaced ({what})",
            "choose another output, or move it away yourself",
        )
    if not overwrite:
        raise OutputExists(f"{out}: already exists", "use --overwrite, or choose another output")


def _partial(out: Path) -> Path:
    return out.parent / f"{out.name}.partial"


class OutputDir:
    """A context manager for a folder to fill: renamed to its final name on exit, removed on an error.

    Entering returns the path to write into. A second run with the same output raises QConvertError while the
    first is alive.
    """

    def __init__(self, out: Path, *, overwrite: bool = False, sources: Iterable[Path] = ()) -> None:
        """Checks the name (see `check_target`); nothing is created before entering."""
        check_target(out, overwrite=overwrite, sources=sources)
        self._out = out.resolve()
        self._overwrite = overwrite
        self.partial = _partial(self._out)

    def __enter__(self) -> Path:
        with explained(f"{self.partial}: cannot be created"):
            self._lock = _claim(self.partial)
        return self.partial

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        renamed = False
        try:
            if kind is None:
                with explained(f"{self._out}: cannot be finished"):
                    self._finish()
                renamed = True
        finally:
            if not renamed:
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)

    def _finish(self) -> None:
        for path in [*self.partial.rglob("*"), self.partial]:
            sync(path)
        check_target(self._out, overwrite=self._overwrite)  # it may have been taken meanwhile
        (self.partial / _MARKER).unlink()
        if self._out.exists():
            _replace(self._out, self.partial)
        else:
            self.partial.rename(self._out)
        sync(self._out.parent)


def _claim(partial: Path) -> int:
    """Creates or takes over a partial folder, empty but for our marker; returns the lock on it.

    The lock is on the folder itself, so that it dies with the process and moves with the rename.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_or_refuse(lock, partial)
        entries = list(partial.iterdir())
        if entries and not {partial / _MARKER, partial / MANIFEST_FILE} & set(entries):
            raise OutputExists(
                f"{partial}: is in the way, and not a leftover of qconvert", "move or remove it"
            )
        for entry in entries:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        (partial / _MARKER).touch()
    except BaseException:
        os.close(lock)
        raise
    return lock


def _replace(old: Path, new: Path) -> None:
    """Replaces `old` by `new`, atomically where the system can; if it fails, `old` keeps its name."""
    aside = old.parent / f"{old.name}.replaced-{os.getpid()}"
    if _exchange(old, new):
        new.rename(aside)  # now the old one
        shutil.rmtree(aside, ignore_errors=True)
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names atomically; False where the system or the disk cannot.

    renameat2(2) with RENAME_EXCHANGE, which Linux has and Python has no call for.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
