"""The errors a user or a file can cause: one fact with numbers, one hint, one exit code.

Everything else that is raised is a bug in qconvert and is reported as one.
"""

from __future__ import annotations

import reprlib


class QConvertError(Exception):
    """A fact about the input or the request, and what to do about it.

    `fact` reads `<file or tensor>: <what is wrong, with numbers>`; `hint` is what the user can
    type or change. The command line prints both and leaves with `exit_code`.
    """

    exit_code = 1

    def __init__(self, fact: str, hint: str | None = None) -> None:
        super().__init__(fact)
        self.fact = fact
        self.hint = hint


class CorruptCheckpoint(QConvertError):
    """A file of the checkpoint breaks its own format, or two of them disagree."""


class NotDownloaded(QConvertError):
    """Numbers were asked for of which only the header is on this disk."""


class UnsupportedModel(QConvertError):
    """The checkpoint is sound, but its architecture or one of its tensors is not known here."""


class BadRecipe(QConvertError):
    """The request contradicts itself, the model, or what the output format can hold."""


class OutputExists(QConvertError):
    """Something is already under the output's name."""


class CheckFailed(QConvertError):
    """A verification or a quality gate did not pass."""

    exit_code = 3


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
