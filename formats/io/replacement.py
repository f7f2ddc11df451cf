"""Puts what several processes have made together in the place of an earlier output.

Any of them may be the first to do so, and any may be stopped for long between two steps. What had the name
when they began is known by its inode; it exists until the new output has the name, so that nothing new has
the same number. Whoever moves something else out of the way has come too late, and moves it back.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from qconvert.errors import QConvertError
from qconvert.formats.io.local_file import explained, name_new
from qconvert.formats.io.output_folder import remove_replaced, replaced_name

_MARK = "user.qconvert.job"


def inode(path: Path) -> int | None:
    """What a file or folder is known by, whatever its name; None where there is none."""
    with suppress(OSError):
        return path.stat().st_ino
    return None


def mark(path: Path, job: str) -> None:
    """Note at a file or folder which job has made it, where the file system keeps such notes."""
    with suppress(OSError, AttributeError):  # not on macOS
        os.setxattr(path, _MARK, job.encode())


def marked(path: Path) -> str | None:
    """Which job has made a file or folder; None where nothing says so."""
    with suppress(OSError, AttributeError):
        return os.getxattr(path, _MARK).decode("ascii", "replace")
    return None


def name_file(partial: Path, final: Path, old: int | None) -> None:
    """Give a file its name, in place of the one with the inode `old`; FileExistsError for any other."""
    if old is not None and inode(final) == old:
        partial.replace(final)
    else:
        name_new(partial, final)


def name_folder(folder: Path, out: Path, old: int | None, own: int) -> None:
    """Give a folder its name, in place of the one with the inode `old`; OSError where another has it.

    `own` is a number that no other process has.
    """
    aside = replaced_name(out, own)
    if old is not None and inode(out) == old:
        with suppress(FileNotFoundError):  # another process has moved it
            out.rename(aside)
    if inode(aside) not in (None, old):
        aside.rename(out)
    with explained(f"{out}: cannot be named"):
        folder.rename(out)


def clear_replaced(out: Path, old: int | None) -> None:
    """Remove the folder with the inode `old`, wherever a process has moved it, once `out` is another one."""
    if old is None or inode(out) in (None, old):
        return
    for aside in list(out.parent.iterdir()):
        if aside.name.startswith(replaced_name(out).name) and inode(aside) == old:
            with suppress(OSError, QConvertError):
                remove_replaced(aside)
