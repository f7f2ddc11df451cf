"""Runs a checkpoint's tokenizer: prompts to ids, ids to text incrementally, chats to prompts.

A chat template is a program that came with the checkpoint. It runs only when a chat is asked for, in jinja's
sandbox, which gives it no access to Python, and in a process of its own with little memory and time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe, QConvertError, UnsupportedModel
from qconvert.formats.io import limits
from qconvert.formats.io.strict_json import parse_json_object, read_bounded, read_json_object
from qconvert.formats.tokenizers import chat_template
from qconvert.formats.tokenizers import huggingface_files as files
from qconvert.formats.tokenizers.tokenized_text import parse_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens after which an unfinished character is given up: UTF-8 needs at most four bytes."""
_PATIENCE = 3 * chat_template.MAX_SECONDS
"""Seconds to wait for a template: a machine may be busy."""
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A tokenizer, the ids that end a text, and the chat template.

    `rows` is the number of rows of the model's embedding, where its config has it.
    """

    tokenizer: Tokenizer
    stops: frozenset[int]
    folder: files.TokenizerFolder
    rows: int | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the token ids of a text; `special` adds the tokenizer's special tokens around it.

        Raises BadRecipe for an id beyond the model's rows.
        """
        ids = list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        if self.rows is not None:
            check_ids(max(ids, default=0), self.rows)
        return ids

    def encode_chat(self, messages: Messages) -> list[int]:
        """Returns the token ids of a chat in the model's own template, up to the assistant's turn."""
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Messages) -> str:
        """Renders the chat as text. Raises UnsupportedModel without a template, or when it fails."""
        chat = {"messages": messages, "add_generation_prompt": True, **self._special}
        (answer,) = _rendered(_template(self.folder), [chat])
        if "text" not in answer:
            raise UnsupportedModel(
                f"{self.folder.path}: the chat template does not run: {answer['error']}", "leave out --chat"
            )
        return str(answer["text"])

    def render_finished(self, chats: Sequence[Json]) -> list[str | None]:
        """Renders chats as they are, the assistant's turns included; None for one that the template refuses.

        Each has `messages`, and may have other variables of the template, such as `tools`.
        """
        variables = [{**self._special, "add_generation_prompt": False, **chat} for chat in chats]
        return [answer.get("text") for answer in _rendered(_template(self.folder), variables)]

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return isinstance(_default_template(self.folder), str)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template names tools."""
        return self.has_template and "tools" in _template(self.folder)

    def special_text(self, kind: str) -> str:
        """The text of a special token (bos, eos), "" where the tokenizer has none."""
        return self._special.get(f"{kind}_token", "")

    @property
    def eos(self) -> int | None:
        """The token that ends a text: that of tokenizer_config.json, else the first that stops generation."""
        text = files.token_text(self.folder.settings.get("eos_token"))
        own = self.tokenizer.token_to_id(text) if text else None
        return min(self.stops, default=None) if own is None else own

    @property
    def _special(self) -> dict[str, str]:
        named = {
            f"{kind}_token": files.token_text(self.folder.settings.get(f"{kind}_token"))
            for kind in files.SPECIAL_KINDS
        }
        return {name: text for name, text in named.items() if text is not None}


def _rendered(template: str, chats: Sequence[Json]) -> list[Json]:
    """Returns the answers of `formats.tokenizers.chat_template`, run as a script."""
    if find_spec("jinja2") is None:
        raise QConvertError("chat: jinja2 is not installed", "pip install jinja2")
    # Not with -m, which would import modules of the current folder instead of Python's.
    command = [sys.executable, chat_template.__file__]
    request = json.dumps({"template": template, "chats": chats})
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"error": f"it takes more than {_PATIENCE} s"} for _ in chats]
    if done.returncode:  # killed by the limit of processor time
        return [
            {"error": f"it takes more than {chat_template.MAX_SECONDS} s of processor time"} for _ in chats
        ]
    answers: list[Json] = parse_json_object(done.stdout.encode(), "chat template")["answers"]
    return answers


def open_dialogue(path: Path, config: Json) -> Dialogue:
    """Opens the tokenizer of a checkpoint's folder. Raises UnsupportedModel without a tokenizer.json."""
    folder = files.read_folder(path, config)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(
            f"{path}: has no tokenizer.json", "save the tokenizer with transformers 4 or later"
        )
    tokenizer = parse_tokenizer(file, read_bounded(file, limits.TOKENIZER_BYTES))
    rows = config.get("vocab_size")
    stops = _stops(path, config, tokenizer, folder.settings)
    return Dialogue(tokenizer, stops, folder, rows if isinstance(rows, int) else None)


def check_ids(largest: int, rows: int) -> None:
    """Raises BadRecipe for a token beyond the rows of a model's embedding."""
    if largest >= rows:
        raise BadRecipe(
            f"tokenizer: token {largest} is beyond the model's {rows} rows",
            "use the tokenizer.json of the same checkpoint",
        )


def open_made_dialogue(files: Mapping[str, str], config: Json, path: Path) -> Dialogue:
    """Opens the tokenizer of files in memory, text by name; errors name `path`, which they were made from."""
    with TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        made = open_dialogue(Path(folder), config)
    return replace(made, folder=replace(made.folder, path=path))


@dataclass(slots=True)
class Detokenizer:
    """Decodes tokens one by one: never half a character, and text once returned never changes.

    A token's text may depend on the one before it, so two runs of tokens are decoded, without and with the
    new ones, and the difference is returned.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(default_factory=list)
    _start: int = 0
    _given: int = 0

    def push(self, token: int) -> str:
        """Returns the text that this token completes, possibly none."""
        self._ids.append(token)
        text = self._decode(len(self._ids))
        if text.endswith(REPLACEMENT) and len(self._ids) - self._given < _LONGEST_CHARACTER:
            return ""
        return self._give(text)

    def rest(self) -> str:
        """Returns what is left at the end: the bytes of an unfinished character."""
        return self._give(self._decode(len(self._ids)))

    def _decode(self, stop: int) -> str:
        return self.tokenizer.decode(self._ids[self._start : stop], skip_special_tokens=False)

    def _give(self, text: str) -> str:
        new = text[len(self._decode(self._given)) :]
        self._start, self._given = self._given, len(self._ids)
        return new


def _default_template(folder: files.TokenizerFolder) -> object:
    """Returns the folder's template; of several, the one called default."""
    found = folder.chat_template
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        return named.get("default")
    return found


def _template(folder: files.TokenizerFolder) -> str:
    """Returns the folder's template; UnsupportedModel where it has none."""
    found = _default_template(folder)
    if not isinstance(found, str):
        raise UnsupportedModel(f"{folder.path}: the model has no chat template", "leave out --chat")
    return found


def _stops(path: Path, config: Json, tokenizer: Tokenizer, settings: Json) -> frozenset[int]:
    """Returns the ids that end a text: those of both configs, and the tokenizer's own."""
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    found: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    text = files.token_text(settings.get("eos_token"))
    own = tokenizer.token_to_id(text) if text else None
    return frozenset(found if own is None else found | {own})
