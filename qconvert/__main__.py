"""Runs the `qconvert` command: the console script, and `python -m qconvert`.

What is imported before the first signals are received is little: `typing` alone would take half of the time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any


def main() -> None:
    """Run the command line; a signal that comes while it is being imported ends it in one line, too."""
    _receive_by(_leave)
    from qconvert.cli import main as run

    # Plans are hundreds of thousands of objects without cycles: looking for some took a quarter of the time.
    # For a process of one command alone: in others, cycles may hold open files.
    gc.set_threshold(200_000, 50, 100)
    try:
        run()
    finally:
        _receive_by(signal.SIG_DFL)


def _receive_by(handler: Any) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as Ctrl-C is in the background of a shell
            signal.signal(each, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    """End before anything was done."""
    if "--json" in sys.argv:
        error = (
            '"kind": "interrupted", "fact": "interrupted; nothing was done", '
            f'"hint": "run the same command again", "exit_code": {128 + signum}, "retryable": true'
        )
        os.write(1, f'{{"schema": 1, "ok": false, "error": {{{error}}}}}\n'.encode())
    else:
        os.write(2, b"Interrupted.\n")
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
