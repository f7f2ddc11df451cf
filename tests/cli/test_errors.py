"""Every error says what to do, and what it says can be done: checked at each place that makes one."""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import click
import pytest

from qconvert.cli import cli
from qconvert.errors import CorruptCheckpoint, QConvertError, remedy
from qconvert.formats.tokenizers.tokenized_text import NoTokenizer

ROOT = Path(__file__).resolve().parents[2]
OURS = [path for room in ("qconvert", "formats", "evals") for path in sorted((ROOT / room).rglob("*.py"))]


def kinds(base: type[QConvertError] = QConvertError) -> Iterator[type[QConvertError]]:
    """The error and all that are made of it."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


@cache
def errors_made() -> list[tuple[str, str, str | None]]:
    """Every error that the source makes: where, of what kind, and its hint as Python writes it."""
    names, found = {kind.__name__ for kind in kinds()}, []
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                named = [word.value for word in node.keywords if word.arg == "hint"]
                hint = [*node.args[1:2], *named]
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((where, node.func.id, ast.unparse(hint[0]) if hint else None))
    return found


def options(command: click.Command) -> Iterator[str]:
    """Every option of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from options(cast(click.Command, command.get_command(context, name)))


def test_every_error_has_a_hint() -> None:
    made = errors_made()
    assert len(made) > 300 and {kind for _, kind, _ in made} >= {"BadRecipe", NoTokenizer.__name__}
    bare = [(where, kind) for where, kind, hint in made if hint in (None, "None", "''")]
    assert {kind for _, kind in bare} <= {CorruptCheckpoint.__name__}, bare
    assert CorruptCheckpoint("m: cut short").hint


def test_hints_name_options_and_commands_that_are_there() -> None:
    known = {*options(cli), "--help"}
    for where, _, hint in errors_made():
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", hint or ""))
        commands = set(re.findall(r"`qconvert ([a-z-]+)", hint or ""))
        assert flags <= known and commands <= set(cli.list_commands(click.Context(cli))), where


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.ENOTDIR, errno.ENAMETOOLONG, 9999])
def test_what_the_system_refuses_has_a_remedy(number: int) -> None:
    assert remedy(OSError(number, "refused"))
