"""Defines the errors that a user or a file can cause: one fact with numbers, one hint, one exit code.

Everything else that is raised is a bug in qconvert and is reported as one.
"""

from __future__ import annotations

import errno
import reprlib

TAKEN = "use --overwrite to replace it, --skip-existing to leave it if it is complete, or another output"
FETCH = "download the file again; if that does not help, report it to its author"
REPORT = "write it to another disk; if that fails too, it is a bug: report it with `qconvert env`"


class QConvertError(Exception):
    """A fact about the input or the request, and what to do about it.

    `fact` reads `<file or tensor>: <what is wrong, with numbers>`; `hint` is what the user can
    type or change. The command line prints both and leaves with `exit_code`. Where it is `retryable`, the
    same command may succeed later without any change to it or to the model.
    """

    exit_code = 1
    retryable = False

    def __init__(self, fact: str, hint: str) -> None:
        super().__init__(fact)
        self.fact = fact
        self.hint = hint

    def __reduce__(self) -> tuple[type[QConvertError], tuple[str, str]]:  # to pass between processes
        return type(self), (self.fact, self.hint)


class CorruptCheckpoint(QConvertError):
    """A file of the checkpoint breaks its own format, or two of them disagree."""

    def __init__(self, fact: str, hint: str = FETCH) -> None:
        super().__init__(fact, hint)


class NotDownloaded(QConvertError):
    """Numbers were asked for of which only the header is on this disk."""


class SourceUnavailable(QConvertError):
    """A server does not give the bytes that a run reads; a later run of the same job may get them."""

    retryable = True


class NotTaken(QConvertError):
    """A server does not take what a run has written; a later run of the same job may send it."""


class MissingExtra(QConvertError):
    """The request needs a package that is installed as an extra."""


class UnsupportedModel(QConvertError):
    """The checkpoint is sound, but its architecture or one of its tensors is unknown."""


class BadRecipe(QConvertError):
    """The request contradicts itself, the model, or what the output format can hold."""


class BadUsage(QConvertError):
    """The words of a command contradict themselves or their own rules, whatever the files hold."""

    exit_code = 2


class OutputExists(QConvertError):
    """Something is already under the output's name."""


class OutputBusy(QConvertError):
    """Another run is writing the same output."""

    retryable = True


class DiskFull(QConvertError):
    """A disk, or what a user may take of it, has no room for what is to be written."""

    retryable = True


class OtherJob(QConvertError):
    """What an earlier run left of an output belongs to another job, whose command was another one."""


class CheckFailed(QConvertError):
    """A verification or a quality gate did not pass."""

    exit_code = 3


_REMEDIES = {
    errno.EACCES: "change its permissions, or use another path",
    errno.EPERM: "change its permissions, or use another path",
    errno.EROFS: "use a path on a disk that can be written",
    errno.ENOSPC: "free some space, or use another disk",
    errno.EDQUOT: "free some space, or use another disk",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EISDIR: "check the path: it is a folder",
    errno.EEXIST: "remove what has this name, or use another one",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "check the path: its links lead in a circle",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "close other programs: this machine has too many files open",
    errno.EIO: "check the disk: it does not answer as it should",
}


# What the system says where a disk, a quota or a limit on the size of files has no room.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def remedy(error: OSError) -> str:
    """What a user can do about an operation on files that the system refused."""
    return _REMEDIES.get(error.errno or 0, "check the path and the disk it is on")


def refused(what: str, error: OSError, kind: type[QConvertError] = QConvertError) -> QConvertError:
    """The error for an operation on files that the system refused: `what`, its reason, a remedy.

    It is of this `kind`, but DiskFull where there was no room.
    """
    kind = DiskFull if error.errno in NO_ROOM else kind
    return kind(f"{what}: {error.strerror}", remedy(error))


_BRIEF = reprlib.Repr()
_BRIEF.maxlist = _BRIEF.maxdict = 12
_BRIEF.maxstring = 80


def shown(value: object, limit: int = 120) -> str:
    """Something from a file as it may stand in a message: on one line, printable, about `limit` long.

    Control characters and the ones that turn the direction of writing are escaped; of a longer text
    the beginning is kept, and its length is told. Of lists and objects the first entries are kept.
    """
    text = value if isinstance(value, str) else _BRIEF.repr(value)
    start = text[:limit]
    if not start.isprintable():
        start = ascii(start)
    return start if len(text) <= limit else f"{start}... ({len(text)} characters)"
