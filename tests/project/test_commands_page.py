"""The page of all commands, docs/reference/commands.md, holds what --help prints.

python tests/project/test_commands_page.py        write it anew
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from qconvert.cli import cli  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "commands.md"
START = "<!-- help of every command: python tests/project/test_commands_page.py writes it -->\n"


def sections(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[str]:
    """The help pages of a command and of those below it, as sections of Markdown."""
    word = name.rpartition(" ")[2]
    context = command.make_context(word, [], parent, resilient_parsing=True, terminal_width=100)
    yield f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            yield from sections(f"{name} {each}", child, context)


def page() -> str:
    """The whole page, with what stands above the help pages left as it is."""
    return PAGE.read_text(encoding="utf-8").partition(START)[0] + START + "".join(sections("qconvert", cli))


def test_the_page_holds_the_help_of_every_command() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python tests/project/test_commands_page.py writes it anew"
    )
    assert page().count("\n## qconvert") > 20


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
