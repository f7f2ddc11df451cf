"""Reads texts and cuts them into tokens with a checkpoint's own tokenizer.

Every text is known by the SHA-256 of its UTF-8 bytes, every tokenizer by that of its tokenizer.json, so that
two records of the same text can be told to be that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qconvert.errors import BadRecipe, QConvertError
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.io import limits
from qconvert.formats.io.strict_json import read_bounded, require_modest
from qconvert.formats.tokenizers.from_gguf import TOKENIZER, tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Text:
    """A text, its name in reports, and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as token ids (int64 [N]) without special tokens; `bos` if the tokenizer puts one first."""

    ids_N: np.ndarray
    bos: int | None
    text: Text
    tokenizer_sha256: str


def read_text(path: Path, hint: str) -> Text:
    """The text of a UTF-8 file. A byte-order mark is dropped; line ends stay as they are.

    Raises QConvertError for a file that is absent (with `hint`) or not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise QConvertError(f"{path}: {error.strerror or error}", hint) from error
    try:
        return text_of(path.name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise QConvertError(
            f"{path}: byte {error.start} is not UTF-8", "save the text as UTF-8 first"
        ) from error


def text_of(name: str, text: str) -> Text:
    """A text that is in memory."""
    data = text.encode()
    return Text(name, text, hashlib.sha256(data).hexdigest(), len(data))


def tokenize(text: Text, model: Path) -> Tokens:
    """Tokenize the text by a checkpoint's `tokenizer.json`, in one call without special tokens.

    The tokenizer of a GGUF file is made from its keys. Raises QConvertError if there is no tokenizer, or
    if the `tokenizers` library cannot read the tokenizer.
    """
    path, data = _tokenizer_json(model)
    tokenizer = parse_tokenizer(path, data)
    return Tokens(_encode(tokenizer, text), first_token(tokenizer), text, hashlib.sha256(data).hexdigest())


def open_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file; raises QConvertError as `tokenize` does."""
    return parse_tokenizer(*_tokenizer_json(model))


def first_token(tokenizer: Tokenizer) -> int | None:
    """The token that the tokenizer's own template puts before a text (BOS), None if none."""
    plain, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    begins = len(framed) > len(plain) and framed[1 : 1 + len(plain)] == plain
    return int(framed[0]) if begins else None


class NoTokenizer(QConvertError):
    """A checkpoint holds no tokenizer at all."""


def check_tokenizer(tokens: Tokens, label: str, model: Path) -> str | None:
    """The SHA-256 of a checkpoint's tokenizer, which must cut the text into the same tokens.

    None where it has no tokenizer. Raises BadRecipe that names the first token to differ, and
    QConvertError as `tokenize` does.
    """
    try:
        path, data = _tokenizer_json(model)
    except NoTokenizer:
        return None
    digest = hashlib.sha256(data).hexdigest()
    if digest == tokens.tokenizer_sha256:
        return digest
    tokenizer = parse_tokenizer(path, data)
    ids_N, own_N = tokens.ids_N, _encode(tokenizer, tokens.text)
    common = min(len(ids_N), len(own_N))
    unlike = np.flatnonzero(ids_N[:common] != own_N[:common])
    if not len(unlike) and len(ids_N) == len(own_N):
        return digest
    first = int(unlike[0]) if len(unlike) else common
    found = [f"{ids[first]}" if first < len(ids) else "none" for ids in (ids_N, own_N)]
    piece = tokenizer.id_to_token(int(own_N[first])) if first < len(own_N) else None
    raise BadRecipe(
        f"tokenizers differ: token {first} of {tokens.text.name} is {found[0]} by the first model's"
        f" tokenizer, {found[1]} ({piece!r}) by that of {label}",
        "compare models that share one tokenizer",
    )


def _encode(tokenizer: Tokenizer, text: Text) -> np.ndarray:
    return np.asarray(tokenizer.encode(text.text, add_special_tokens=False).ids, dtype=np.int64)


def _tokenizer_json(model: Path) -> tuple[Path, bytes]:
    """The tokenizer.json of a folder or a GGUF file, and the path that errors name."""
    hint = "evaluations need the tokenizer.json of the model"
    if is_gguf(model):
        with GGUFFile(model) as file:
            made = tokenizer_files(file.kv)
        if TOKENIZER not in made:
            raise NoTokenizer(f"{model}: holds no tokenizer", hint)
        return model, made[TOKENIZER].encode()
    path = model / TOKENIZER
    if not path.exists():
        raise NoTokenizer(f"{path}: No such file or directory", hint)
    return path, read_bounded(path, limits.TOKENIZER_BYTES)


def parse_tokenizer(path: Path, data: bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json's bytes; QConvertError, naming `path`, if it cannot be read."""
    from tokenizers import Tokenizer

    require_modest(data, str(path))
    try:
        return Tokenizer.from_str(data.decode())
    except BaseException as error:  # the library raises nothing more specific, and panics on broken maps
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise QConvertError(
            f"{path}: {error}",
            "fetch the file again, or update tokenizers: it is damaged, or newer than that",
        ) from error
