"""Ends every command with a message and an exit code.

What is wrong with the words of a command alone, so that no file could make it right, is usage and
leaves with 2; what files, models, disks and the network do not allow leaves with 1.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from qconvert.cli.printing import escaping
from qconvert.cli.signals import Stopped, handled
from qconvert.errors import BadRecipe, BadUsage, QConvertError, remedy, shown

# Commands without an output of their own.
_READING = ("inspect", "check", "verify", "diff", "generate", "eval", "env")


@contextmanager
def typed() -> Iterator[None]:
    """Turns a BadRecipe raised while arguments are parsed into wrong usage (exit code 2)."""
    try:
        yield
    except BadRecipe as error:
        raise BadUsage(error.fact, error.hint) from error


@contextmanager
def one_of(models: Sequence[str], model: str) -> Iterator[None]:
    """Around the work on one of the models of a command: if there are several, errors name the one."""
    try:
        yield
    except QConvertError as error:
        if len(models) > 1 and model not in error.fact:
            error.fact = f"{model}: {error.fact}"
        raise


@contextmanager
def after_the_work() -> Iterator[None]:
    """Prints results after the work: a reader of stdout who left early does not make it a failure."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _mute(sys.stdout, sys.stderr)


def report_errors(command: click.Command, args: list[str] | None, **extra: Any) -> NoReturn:
    """Run a click command and leave the process with the exit code its ending deserves.

    A QConvertError prints its fact and hint; anything unexpected is called a bug, in one line,
    unless QCONVERT_DEBUG is set. With --json on the command line errors are JSON on stdout.
    """
    with escaping():
        _report_errors(command, sys.argv[1:] if args is None else args, **extra)


def _report_errors(command: click.Command, argv: list[str], **extra: Any) -> NoReturn:
    try:
        with handled():
            ending = command.main(args=argv, prog_name="qconvert", standalone_mode=False, **extra)
            sys.stdout.flush()
    except QConvertError as error:
        _say(argv, error.fact, error.hint, error.exit_code, _kind(error))
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # from click 8.2 on
            error.show()
            sys.exit(error.exit_code)
        context = getattr(error, "ctx", None)
        fact = error.format_message().rstrip(".")
        _say(argv, fact, _how_to_call(context), error.exit_code, "bad_usage")
    except (KeyboardInterrupt, click.Abort) as interrupt:
        cause = interrupt.__cause__  # click wraps what it catches
        stopped = cause if isinstance(cause, Stopped) else Stopped()
        left = (
            ""
            if argv[:1] and argv[0] in _READING
            else "; nothing unfinished was left under the output's name"
        )
        click.echo(stopped.message or f"Interrupted{left}.", err=True)
        sys.exit(stopped.exit_code)
    except BrokenPipeError:
        _mute(sys.stdout)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("QCONVERT_DEBUG"):
            raise
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            _say(argv, "the current folder was deleted", "cd to a folder that exists", 1)
        if isinstance(error, OSError) and error.filename is not None:
            _say(argv, f"{shown(str(error.filename))}: {error.strerror}", remedy(error), 1, "file")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _mute(sys.stdout)  # which is a file on a full disk: nothing more can be said there
            _say([], f"stdout: {error.strerror}", remedy(error), 1)
        fact = f"unexpected {type(error).__name__}: {error}"
        _say(argv, fact, "this is a bug in qconvert; set QCONVERT_DEBUG=1 for the traceback", 1)
    sys.exit(ending if isinstance(ending, int) else 0)  # click returns the code of its Exit


def _say(argv: list[str], fact: str, hint: str, code: int, kind: str = "unexpected") -> NoReturn:
    """Print an error and leave; `kind` is its class, by which a script can tell errors apart."""
    if "--json" in argv:
        error = {"kind": kind, "fact": fact, "hint": hint, "exit_code": code}
        click.echo(json.dumps({"schema": 1, "ok": False, "error": error}))
    else:
        click.echo(f"Error: {fact}\nHint: {hint}", err=True)
    sys.exit(code)


def error_record(error: QConvertError) -> dict[str, Any]:
    """An error as --json prints it."""
    return {"kind": _kind(error), "fact": error.fact, "hint": error.hint, "exit_code": error.exit_code}


def _kind(error: QConvertError) -> str:
    """The class of an error in snake case: `output_exists`, `corrupt_checkpoint`, `bad_usage`."""
    return re.sub(r"(?<!^)(?<!Q)(?=[A-Z])", "_", type(error).__name__).lower()


def _how_to_call(context: click.Context | None) -> str:
    """What to type instead of a command that was called wrongly."""
    if context is None:
        return "`qconvert --help` lists the commands"
    called = context.get_usage().removeprefix("Usage: ")
    return f"{' '.join(called.split())} (`{context.command_path} --help` explains it)"


def _mute(*streams: TextIO) -> None:
    """Let what is still to be written to these streams, at the latest on leaving, go nowhere."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False
