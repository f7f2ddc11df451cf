"""What is printed, and said of the code, is plain English: no phrase of the lists below is in it."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from qconvert.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    {path.resolve() for folder in ("qconvert", "formats") for path in (ROOT / folder).rglob("*.py")}
)

INSTEAD = {
    r"\btalk\b": "messages",
    r"\b[Ll]eaves? with \d": "exits with",
    "is there already": "already exists",
    "nothing in the way": "OK",
    "not to be had": "cannot be downloaded",
    "words that no file": "wrong command line",
    "read here, but not written": "cannot be written, only read",
    "tell its maker": "report it to its author",
    "scores left to go on": "already complete",
    "no such folder, and": "not a local folder",
    "not whole in the cache": "not fully downloaded",
    r"\b(is|are) no (number|device|scheme|rank|size|bytes|divergence|list|short)\b": "is not a",
    r"\b(is|are) no (pair|report|saved|grid|whole|quantization|regular)\b": "is not a",
    r"\bno (multiple|whole blocks) of\b": "not a multiple of, do not divide into",
    "ends so too": "fails too",
    r"\b[Bb]egin anew\b": "start again",
    "throw it away": "discard it",
    "words for": "cannot say",
    r"\b(has|have) not\b(?! been)": "does not have",
    "aim higher": "ask for a larger one",
    "exit code tells": "see the exit code",
    r"\bkin\b": "programs built on them",
    "quantize so what is plain": "weights not yet quantized",
    r"(?<!model )(?<!stands )(?<!json )\balone\b": "only",
    r"\banew\b": "again",
    "(is|are) none of": "is not one of",
    r"\b([Gg]oes|[Gg]o|going|went) on\b": "continues",
    r"(^|or |; |, )take (the|a|an|another|some|tokenizer|--)": "use",
    r"\btakes? no (?!$)": "reads no, accepts no",
    r"\bdoes not take\b": "refuses",
    r"\btaken for\b|\bfor (packed|quantized)\b": "assumed to be",
    r"\bcomes? up\b": "is left",
    r"(?<![a-z] that )\blies?\b": "is kept",
    "all the same": "anyway",
    "(text|texts) it is of|: is of ": "belongs to, was measured on",
    "given beside": "given together with",
    r"\baim at\b": "choose",
    r"\botherwise than\b": "is not what",
    r"\[default: \(default\)\]": "what the default is",
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module, parsed once for all phrases: parsing costs far more than a search."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def strings(path: Path) -> tuple[str, ...]:
    """The string constants of a module but its docstrings (help pages are read as they are printed)."""
    tree = parsed(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return tuple(
        node.value for node in constants if isinstance(node.value, str) and id(node) not in docstrings
    )


def help_pages(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[str]:
    context = command.make_context(name, [], parent, resilient_parsing=True)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            yield from help_pages(each, child, context)


@pytest.mark.parametrize("phrase", INSTEAD)
def test_no_string_has_it(phrase: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text!r}"
        for path in SOURCES
        for text in strings(path)
        if re.search(phrase, text)
    ]
    assert not found, f"write {INSTEAD[phrase]!r} in {found}"


def test_no_help_page_has_one() -> None:
    pages = list(help_pages("qconvert", cli))
    assert len(pages) > len(COMMANDS)
    for page in pages:
        plain = " ".join(page.split())
        found = [phrase for phrase in INSTEAD if re.search(phrase, plain)]
        assert not found, f"{found} in {plain[:80]}"


IN_CODE = {
    r"\bwish(es|ed)?\b": "request",
    r"\banew\b(?!`)": "again",
    r"\bspeaks? of\b": "records, names",
    r"\b(nobody|whoever)\b": "the caller, no process",
    r"\bmakes? up for\b": "compensate",
    r"\btaken for\b(?! other)": "assumed to be",
    r"\bhears? of\b|\bheard of\b": "is called with, is reported",
    r"\bby turns\b": "alternating",
    r"\bfor nothing\b": "in vain, at price 0",
    r"^(Says|Tells|Knows|Lets|Lays|Asks)\b": "a verb of what the module does",
}


def remarks(path: Path) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_no_docstring_or_comment_has_the_old_dialect() -> None:
    found = [
        f"{path.relative_to(ROOT)}: write {instead!r} in {text!r}"
        for path in SOURCES
        for text in remarks(path)
        for phrase, instead in IN_CODE.items()
        if re.search(phrase, text)
    ]
    assert not found, "\n".join(found)


PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "clients.md")  # of clients' own errors


def prose(page: Path) -> Iterator[str]:
    """The lines of a page but for tables and blocks of code."""
    in_block = False
    for line in page.read_text(encoding="utf-8").splitlines():
        in_block ^= line.lstrip().startswith("```")
        if not in_block and not line.lstrip().startswith("|"):
            yield line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_lines_of_prose_are_no_longer_than_an_editor(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > 120] == []
