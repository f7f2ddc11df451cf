"""Escapes what a terminal would obey, in everything that a command prints.

Names, keys and texts of a checkpoint reach stdout and stderr in more than a hundred places. They are escaped
in one: where the streams are written.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# Control characters but for tab and newline, what turns the direction of writing, what ends lines beside a
# newline, and halves of surrogate pairs (how Python holds bytes of file names that are not UTF-8).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """The text with such characters as `\\u001b`, which JSON reads back as the character."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class EscapingStream(io.TextIOBase):
    """A text stream that escapes what is written to `bare`, the stream it stands for."""

    def __init__(self, bare: TextIO) -> None:
        self.bare = bare

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.bare.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.bare.errors

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes no {type(text).__name__}")
        self.bare.write(escaped(text))
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self.bare.flush()

    def isatty(self) -> bool:
        return self.bare.isatty()

    def fileno(self) -> int:
        return self.bare.fileno()

    def close(self) -> None:
        """The stream is its owner's to close."""

    def __del__(self) -> None:
        """So it stays open when this is gone."""


@contextmanager
def escaping() -> Iterator[None]:
    """Escapes what is printed to stdout and stderr while the context lasts, but what a shell completes."""
    if "_QCONVERT_COMPLETE" in os.environ:  # click writes it as bytes, for the shell alone
        yield
        return
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EscapingStream(out), EscapingStream(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def terminal_columns() -> int | None:
    """How many letters a line of stdout has room for: of the terminal, or as COLUMNS says; None elsewhere.

    At least 40: below that, nothing is readable.
    """
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return max(40, shutil.get_terminal_size().columns)


def bare(stream: TextIO) -> TextIO:
    """The stream itself, for what moves the cursor on purpose."""
    return stream.bare if isinstance(stream, EscapingStream) else stream
