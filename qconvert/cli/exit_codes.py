"""Ends every command with a message and an exit code.

What is wrong with the words of a command alone, so that no file could make it right, is usage and
leaves with 2; what files, models, disks and the network do not allow leaves with 1.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from qconvert.cli.printing import escaping
from qconvert.cli.signals import Stopped, handled
from qconvert.errors import NO_ROOM, BadRecipe, BadUsage, DiskFull, QConvertError, refused, shown

# Commands without an output of their own.
_READING = ("inspect", "check", "verify", "diff", "generate", "eval", "bench", "env")


@dataclass
class _Told:
    """Of a command with several models, what --json tells beside an error: what was done, and the model."""

    key: str = ""
    done: list[Any] = field(default_factory=list)
    model: str | None = None

    def clear(self) -> None:
        self.key, self.done, self.model = "", [], None


_TOLD = _Told()


def tell_with_errors(key: str, done: list[Any]) -> None:
    """From now on, an error or a signal under --json tells under `key` as well what is `done` by then."""
    _TOLD.key, _TOLD.done = key, done


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
    _TOLD.model = model if len(models) > 1 else None
    try:
        yield
    except QConvertError as error:
        if len(models) > 1 and model not in error.fact:
            error.fact = f"{model}: {error.fact}"
        raise
    _TOLD.model = None


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
    _TOLD.clear()
    with escaping():
        _report_errors(command, sys.argv[1:] if args is None else args, **extra)


def _report_errors(command: click.Command, argv: list[str], **extra: Any) -> NoReturn:
    try:
        with handled(lambda stopped: _last_words(argv, stopped)):
            ending = command.main(args=argv, prog_name="qconvert", standalone_mode=False, **extra)
            sys.stdout.flush()
    except QConvertError as error:
        _say(argv, error_record(error))
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # from click 8.2 on
            error.show()
            sys.exit(error.exit_code)
        context = getattr(error, "ctx", None)
        fact = " ".join(error.format_message().split()).rstrip(".")  # of choices it lists one a line
        hint = _how_to_call(context)
        if isinstance(error, click.NoSuchOption) and (said := _named_here(error)):
            fact, hint = f"No such option {error.option_name!r}", said
        _say(argv, _record("bad_usage", fact, hint, error.exit_code))
    except (KeyboardInterrupt, click.Abort) as interrupt:
        cause = interrupt.__cause__  # click wraps what it catches
        stopped = cause if isinstance(cause, Stopped) else Stopped()
        text, to_stderr = _last_words(argv, stopped)
        click.echo(text, err=to_stderr)
        sys.exit(stopped.exit_code)
    except BrokenPipeError:
        _mute(sys.stdout)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("QCONVERT_DEBUG"):
            raise
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            _say(argv, _record("file", "the current folder was deleted", "cd to a folder that exists", 1))
        if isinstance(error, OSError) and error.filename is not None:
            found = error_record(refused(shown(str(error.filename)), error))
            _say(argv, found | {"kind": "disk_full" if found["retryable"] else "file"})
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            _mute(sys.stdout)  # which is a file on a full disk: nothing more can be said there
            _say([], error_record(refused("stdout", error, DiskFull)))
        fact = f"unexpected {type(error).__name__}: {error}"
        hint = "this is a bug in qconvert; set QCONVERT_DEBUG=1 for the traceback"
        _say(argv, _record("unexpected", fact, hint, 1))
    sys.exit(ending if isinstance(ending, int) else 0)  # click returns the code of its Exit


def _say(argv: list[str], error: dict[str, Any]) -> NoReturn:
    """Print an error as it is told under --json, or in words, and leave."""
    if "--json" in argv:
        click.echo(_as_json(error))
    else:
        say_error(error)
    sys.exit(error["exit_code"])


def say_error(error: dict[str, Any]) -> None:
    """Print an error in words."""
    click.echo(f"Error: {error['fact']}\nHint: {error['hint']}", err=True)


def _as_json(error: dict[str, Any]) -> str:
    """The object that --json prints for an error: with what was done before it, of several models."""
    done = {_TOLD.key: _TOLD.done} if _TOLD.done else {}
    return json.dumps({"schema": 1, "ok": False, "error": error, **done})


def _last_words(argv: list[str], stopped: Stopped) -> tuple[str, bool]:
    """What a command that a signal ends says of it, and whether on stderr."""
    left = "" if argv[:1] and argv[0] in _READING else "; nothing unfinished was left under the output's name"
    if "--json" not in argv:
        return stopped.message or f"Interrupted{left}.", True
    fact = stopped.message or f"interrupted{left}"
    goes_on = argv[:1] == ["eval"] and any(word.startswith(("-o", "--out")) for word in argv)
    again = "run the same command with --resume" if goes_on else "run the same command again"
    return _as_json(_record("interrupted", fact, again, stopped.exit_code, retryable=True)), False


def error_record(error: QConvertError) -> dict[str, Any]:
    """An error as --json prints it; its kind is its class in snake case: `output_exists`, `bad_usage`."""
    kind = re.sub(r"(?<!^)(?<!Q)(?=[A-Z])", "_", type(error).__name__).lower()
    return _record(kind, error.fact, error.hint, error.exit_code, retryable=error.retryable)


def _record(kind: str, fact: str, hint: str, code: int, *, retryable: bool = False) -> dict[str, Any]:
    of_model = {"model": _TOLD.model} if _TOLD.model else {}
    return {
        "kind": kind,
        "fact": fact,
        "hint": hint,
        "exit_code": code,
        "retryable": retryable,
        **of_model,
    }


def _named_here(error: click.NoSuchOption) -> str | None:
    """What an option of another tool is called here; None for one that is not known."""
    from qconvert.cli.other_tools import here

    params = () if error.ctx is None else error.ctx.command.params
    return here(error.option_name, tuple(name for each in params for name in each.opts))


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
