"""Reads the texts that statistics are collected on: the bundled one, files, folders, datasets of the Hub.

A text is a sequence of documents. A .txt or .md file is one document; a line of a .jsonl file is one, with
its `text`, or its `messages`, which the model's own chat template renders.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe, CorruptCheckpoint, QConvertError, shown
from qconvert.formats.io.strict_json import parse_json_object
from qconvert.formats.tokenizers.tokenized_text import Text, read_text, text_of

DEFAULT = "default"
"""The name of the text that comes with qconvert."""
HUB = "hub:"
"""What the name of a dataset on the Hub begins with."""
DEFAULT_FILE = Path(__file__).with_name("default_text") / "documents.jsonl.xz"
SUFFIXES = (".txt", ".md", ".jsonl")
MAX_BYTES = 1 << 28
RANDOM_SHARE = 0.05
"""The share of random tokens in the bundled text: they reach input columns that no sentence does."""
_GIVE = f"give a text file, a folder of {', '.join(SUFFIXES)} files, {HUB}org/dataset or {DEFAULT}"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a chat: the variables of a chat template, `messages` and maybe `tools`."""

    text: str = ""
    chat: Json | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A text as it was asked for: its files and their documents, in order.

    `random_share` is the share of its tokens that are to be drawn at random.
    """

    name: str
    files: tuple[Text, ...]
    documents: tuple[Document, ...]
    random_share: float = 0.0


def open_source(name: str) -> Source:
    """Read a text: `default`, a file, a folder of .txt, .md and .jsonl files, or `hub:org/dataset`.

    Raises QConvertError for what cannot be read, is empty, not UTF-8 or binary.
    """
    if name == DEFAULT and not Path(name).exists():
        return _source(DEFAULT, [_bundled()], RANDOM_SHARE)
    if name.startswith(HUB):
        from qconvert.checkpoint.hub import resolve_texts

        folder = resolve_texts(name.removeprefix(HUB), SUFFIXES)
        return _source(name, _files_of(folder, name))
    path = Path(name)
    return _source(name, _files_of(path, name) if path.is_dir() else [_file(path)])


def _source(name: str, files: list[Text], random_share: float = 0.0) -> Source:
    documents = tuple(document for file in files for document in _documents(file))
    if not documents:
        raise QConvertError(f"text {shown(name)}: there is no text in it", _GIVE)
    return Source(name, tuple(files), documents, random_share)


def _bundled() -> Text:
    return text_of(DEFAULT_FILE.stem, lzma.decompress(DEFAULT_FILE.read_bytes()).decode())


def _files_of(folder: Path, name: str) -> list[Text]:
    """The texts in a folder and those below it, in the order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise QConvertError(f"text {shown(name)}: holds no {', '.join(SUFFIXES)} file", _GIVE)
    _require_size(sum(path.stat().st_size for path in paths), name)
    return [_file(path) for path in paths]


def _file(path: Path) -> Text:
    if path.is_file():
        _require_size(path.stat().st_size, str(path))
    text = read_text(path, _GIVE)
    if "\0" in text.text:
        at = text.text.index("\0")
        raise QConvertError(f"text {path}: is binary: character {at} is NUL", _GIVE)
    return text


def _require_size(nbytes: int, name: str) -> None:
    if nbytes > MAX_BYTES:
        raise QConvertError(
            f"text {shown(name)}: has {nbytes / 1e6:,.0f} MB, the limit is {MAX_BYTES / 1e6:,.0f} MB",
            "give a part of it: a million tokens are more than any statistics need",
        )


def _documents(file: Text) -> Iterator[Document]:
    if not file.name.endswith(".jsonl"):
        if file.text.strip():
            yield Document(file.text)
        return
    for number, line in enumerate(file.text.split("\n"), 1):
        if line.strip():
            yield _line(line, f"{file.name} line {number}")


def _line(line: str, place: str) -> Document:
    try:
        fields = parse_json_object(line.encode(), place)
    except CorruptCheckpoint as error:
        raise QConvertError(error.fact, "write one JSON object a line, with a text or messages") from error
    text, messages = fields.get("text"), fields.get("messages")
    if isinstance(text, str):
        return Document(text)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return Document(chat={key: fields[key] for key in ("messages", "tools") if key in fields})
    raise BadRecipe(
        f"{place}: has neither a text nor messages",
        'write {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def plain_chat(chat: Json) -> str:
    """A chat as it reads without a template: `User: ...`, blank lines between the turns."""
    turns = []
    for message in chat["messages"]:
        content = message.get("content") or json.dumps(message.get("tool_calls", ""), ensure_ascii=False)
        turns.append(f"{message['role'].capitalize()}: {content}")
    return "\n\n".join(turns) + "\n"
