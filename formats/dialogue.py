"""A checkpoint's tokenizer at work: prompts to ids, ids to text as it comes, chats to prompts.

A chat template is a program that came with the checkpoint. It runs only when a chat is asked for,
in jinja's sandbox, which gives it no access to Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qconvert.errors import QConvertError, UnsupportedModel
from qconvert.formats.json_io import read_json_object
from qconvert.formats.tokenizer_folder import SPECIAL_KINDS, TokenizerFolder, read_folder, token_text
from qconvert.tensors import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens after which an unfinished character is given up: UTF-8 needs at most four bytes."""
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A tokenizer, the ids that end a text, and how to write a chat."""

    tokenizer: Tokenizer
    stops: frozenset[int]
    folder: TokenizerFolder

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around one."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a chat by the model's own template, up to where the assistant begins."""
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Messages) -> str:
        """The chat as text. Raises UnsupportedModel without a template, or one that does not run."""
        template = _template(self.folder)
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise QConvertError("chat: jinja2 is not installed", "pip install jinja2") from error

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        special = {
            f"{kind}_token": token_text(self.folder.settings.get(f"{kind}_token")) for kind in SPECIAL_KINDS
        }
        known = {name: text for name, text in special.items() if text is not None}
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **known
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise UnsupportedModel(
                f"{self.folder.path}: the chat template does not run: {error}", "leave out --chat"
            ) from error


def open_dialogue(path: Path, config: Json) -> Dialogue:
    """The tokenizer of a checkpoint's folder. Raises UnsupportedModel where it is not one in JSON."""
    from tokenizers import Tokenizer

    folder = read_folder(path, config)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(
            f"{path}: has no tokenizer.json", "save the tokenizer with transformers 4 or later"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise QConvertError(
            f"{file}: {error}",
            "fetch the file again, or update tokenizers: it is damaged, or newer than that",
        ) from error
    return Dialogue(tokenizer, _stops(path, config, tokenizer, folder.settings), folder)


def open_made_dialogue(files: Mapping[str, str], config: Json) -> Dialogue:
    """The tokenizer of files that are not on a disk, text by name."""
    with TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return open_dialogue(Path(folder), config)


@dataclass(slots=True)
class Detokenizer:
    """Text of tokens that come one by one: never half a character, never a changed one.

    A token's text may depend on the one before it, so two runs of tokens are decoded, without and
    with the new ones, and the difference is given out.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(default_factory=list)
    _start: int = 0
    _given: int = 0

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        self._ids.append(token)
        text = self._decode(len(self._ids))
        if text.endswith(REPLACEMENT) and len(self._ids) - self._given < _LONGEST_CHARACTER:
            return ""
        return self._give(text)

    def rest(self) -> str:
        """What is left at the end: the remains of an unfinished character."""
        return self._give(self._decode(len(self._ids)))

    def _decode(self, stop: int) -> str:
        return self.tokenizer.decode(self._ids[self._start : stop], skip_special_tokens=False)

    def _give(self, text: str) -> str:
        new = text[len(self._decode(self._given)) :]
        self._start, self._given = self._given, len(self._ids)
        return new


def _template(folder: TokenizerFolder) -> str:
    """The folder's template; of several, the one called default."""
    found = folder.chat_template
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UnsupportedModel(f"{folder.path}: the model has no chat template", "leave out --chat")
    return found


def _stops(path: Path, config: Json, tokenizer: Tokenizer, settings: Json) -> frozenset[int]:
    """Ids that end a text: those of both configs, and the tokenizer's own."""
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    found: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    text = token_text(settings.get("eos_token"))
    own = tokenizer.token_to_id(text) if text else None
    return frozenset(found if own is None else found | {own})
