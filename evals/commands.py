"""Runs our commands as a user would type them, but in this process, which loads its libraries once."""

from __future__ import annotations

import contextlib
import io
import json
import signal

import click

from qconvert.cli import main
from qconvert.core.dtypes import Json


def qconvert(*words: object) -> Json:
    """Run a command with one thread; what it says as JSON. ClickException where it fails."""
    out, talk, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    threads = () if words[0] == "calibrate" else ("-j", 1)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
            main([str(word) for word in (*words, "--json", *threads)])
    except SystemExit as ending:
        if ending.code not in (0, None):
            raise click.ClickException(
                f"{' '.join(map(str, words))}: {talk.getvalue() + out.getvalue()}"
            ) from ending
    finally:
        signal.signal(signal.SIGTERM, before)
    said: Json = json.loads(out.getvalue())
    return said
