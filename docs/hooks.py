"""Writes the help page of every command into `reference/commands.md` when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from qconvert.cli import cli

MARK = "<!-- help of every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page, with the help pages in the place of the mark (called by mkdocs for every page)."""
    return markdown.replace(MARK, "\n".join(_sections("qconvert", cli))) if MARK in markdown else markdown


def _sections(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[str]:
    context = command.make_context(name.rpartition(" ")[2], [], parent, resilient_parsing=True)
    yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            yield from _sections(f"{name} {each}", child, context)
