"""Writes output folders atomically.

Everything is written into `<out>.partial`; only a finished folder gets the name `<out>`, by one rename. The
invariant: whatever happens before that rename (an error, Ctrl-C, kill -9, a power cut), nothing new is under
the final name, and the next run goes on with what the interrupted one left, or clears it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from qconvert.errors import TAKEN, BadRecipe, OutputExists
from qconvert.formats.io import journal
from qconvert.formats.io.local_file import explained, lock_or_refuse, sync

MANIFEST_FILE = "qconvert.json"
_MARKER = ".qconvert-partial"  # marks a .partial folder as ours, to be cleared
WORKING = (journal.FILE_NAME, f"{journal.FILE_NAME}.new", _MARKER)
"""Names of files that are in a folder only while it is written."""


def check_target(out: Path, *, overwrite: bool = False, sources: Iterable[Path] = ()) -> None:
    """Raises unless a folder may be written under the name `out`.

    OutputExists when the name is taken: only with `overwrite`, and only a folder that holds our manifest, is
    replaced. BadRecipe when that would overwrite a source.
    """
    target = out.resolve()
    for source in sources:
        if {target, partial_folder(target)} & {source.resolve(), *source.resolve().parents}:
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
        raise OutputExists(f"{out}: already exists", TAKEN)


def partial_folder(out: Path) -> Path:
    """The name of an output's folder while it is written."""
    return out.parent / f"{out.name}.partial"


class OutputDir:
    """A context manager for a folder to fill: renamed to its final name on exit, removed on an error.

    Entering returns the path to write into. A second run with the same output raises QConvertError while the
    first is alive. `resumed` says whether the folder holds what an earlier run has done, with its journal.
    """

    def __init__(
        self,
        out: Path,
        *,
        overwrite: bool = False,
        sources: Iterable[Path] = (),
        goes_on: Callable[[Path], bool] = lambda partial: False,
        survives: Callable[[BaseException], bool] = lambda error: False,
        keep: bool = True,
    ) -> None:
        """Checks the name (see `check_target`); nothing is created before entering.

        `goes_on` says whether to go on with what an earlier run left in the folder (it may raise, which
        leaves it as it is), `survives` whether the folder is left for a later run after this error. Without
        `keep` it needs no name, and is removed in the end.
        """
        if keep:
            check_target(out, overwrite=overwrite, sources=sources)
        self._out = out.resolve()
        self._overwrite = overwrite
        self._goes_on, self._survives, self._keep = goes_on, survives, keep
        self.partial = partial_folder(self._out)
        self.resumed = False

    def __enter__(self) -> Path:
        with explained(f"{self.partial}: cannot be created"):
            self._lock, self.resumed = _claim(self.partial, self._goes_on)
            try:
                _settle(self._out)
                if self._keep:
                    check_target(self._out, overwrite=self._overwrite)
            except BaseException:
                if not self.resumed:
                    shutil.rmtree(self.partial, ignore_errors=True)
                os.close(self._lock)
                raise
        return self.partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._leave(error)
                return
            if not self._keep:
                self._discard()
                return
            try:
                with explained(f"{self._out}: cannot be finished"):
                    self._finish()
            except BaseException as failure:
                self._leave(failure)
                raise
        finally:
            os.close(self._lock)

    def _leave(self, error: BaseException) -> None:
        """Leaves the folder to a later run, or removes it, first of all its journal."""
        if not ((self.partial / journal.FILE_NAME).exists() and self._survives(error)):
            self._discard()

    def _discard(self) -> None:
        (self.partial / journal.FILE_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _finish(self) -> None:
        for path in self.partial.rglob("*"):
            sync(path)
        check_target(self._out, overwrite=self._overwrite)  # it may have been taken meanwhile
        for name in WORKING:
            (self.partial / name).unlink(missing_ok=True)
        sync(self.partial)
        if self._out.exists():
            _replace(self._out, self.partial)
        else:
            self.partial.rename(self._out)
        sync(self._out.parent)


def _claim(partial: Path, goes_on: Callable[[Path], bool]) -> tuple[int, bool]:
    """Creates or takes over a partial folder, empty but for our marker; returns the lock on it, and False.

    A folder that `goes_on` accepts stays as it is; then it returns True. The lock is on the folder itself, so
    that it dies with the process and moves with the rename.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_or_refuse(lock, partial)
        entries = list(partial.iterdir())
        ours = {partial / name for name in (_MARKER, MANIFEST_FILE, journal.FILE_NAME)}
        if entries and not ours & set(entries):
            raise OutputExists(
                f"{partial}: is in the way, and not a leftover of qconvert", "move or remove it"
            )
        if goes_on(partial):
            return lock, True
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        (partial / _MARKER).touch()
    except BaseException:
        os.close(lock)
        raise
    return lock, False


_REPLACED = re.compile(r"\.replaced-[0-9]+")


def _settle(out: Path) -> None:
    """Clears what a run that was killed while it replaced `out` left of the old folder.

    If it had no time to name the new one, the old one gets its name back. Called with the lock on the partial
    folder, so that no other run is replacing it.
    """
    for aside in out.parent.iterdir():
        if not (aside.name.startswith(out.name) and _REPLACED.fullmatch(aside.name[len(out.name) :])):
            continue
        if aside.is_symlink() or not aside.is_dir():
            continue
        whole = (aside / MANIFEST_FILE).is_file()
        if whole and not out.exists():
            aside.rename(out)
        elif whole or not any(aside.iterdir()):
            remove_replaced(aside)


def replaced_name(out: Path, number: int | None = None) -> Path:
    """What a folder that is being replaced is called meanwhile; without a number, how that name begins."""
    return out.with_name(f"{out.name}.replaced-{'' if number is None else number}")


def remove_replaced(folder: Path) -> None:
    """Removes a folder, its manifest last: by that, what a kill leaves of it is known to be ours."""
    for entry in list(folder.iterdir()):
        if entry.name != MANIFEST_FILE:
            is_folder = entry.is_dir() and not entry.is_symlink()
            shutil.rmtree(entry, ignore_errors=True) if is_folder else entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _replace(old: Path, new: Path) -> None:
    """Replaces `old` by `new`, atomically where the system can; if it fails, `old` keeps its name."""
    aside = replaced_name(old, os.getpid())
    if _exchange(old, new):
        new.rename(aside)  # now the old one
        remove_replaced(aside)
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    remove_replaced(aside)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names atomically; False where the system or the disk cannot.

    renameat2(2) with RENAME_EXCHANGE, which Linux has and Python has no call for.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0
