"""Reads the texts to measure on, and their tokens: every text and tokenizer known by its SHA-256.

The wikitext-2 test set is published in two forms whose perplexities differ: `raw`, the file
wiki.test.raw that llama.cpp reads, and `hf-join`, the rows of the `datasets` library joined by blank
lines, which papers read. `hf-join` is computed from `raw`.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qconvert.errors import BadRecipe, QConvertError, shown
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.tokenizers.from_gguf import TOKENIZER, tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WIKITEXT = "wikitext2"
WIKITEXT_SHA256 = {
    "raw": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "hf-join": "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83",
}
_WIKITEXT_BYTES = 1_290_590
# The source of llama.cpp's scripts/get-wikitext-2.sh.
_WIKITEXT_REPO, _WIKITEXT_ZIP = "ggml-org/ci", "wikitext-2-raw-v1.zip"
_TIMEOUT_SECONDS = 10.0
_WIKITEXT_MEMBER = "wikitext-2-raw/wiki.test.raw"


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


def load_text(source: str | Path, wikitext: str = "hf-join") -> Text:
    """The text of a UTF-8 file, or of `wikitext2` from the Hugging Face Hub in the given form.

    A byte-order mark is dropped; line ends stay as they are. Raises QConvertError for a file that
    is absent or not UTF-8, and where the Hub cannot be reached or sends other bytes.
    """
    if source == WIKITEXT:
        return _text(f"wikitext-2 test ({wikitext})", _download_wikitext(wikitext))
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise QConvertError(
            f"{path}: {error.strerror or error}", f"give a text file, {WIKITEXT} or stdlib"
        ) from error
    try:
        return _text(path.name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise QConvertError(
            f"{path}: byte {error.start} is not UTF-8", "save the text as UTF-8 first"
        ) from error


def _text(name: str, text: str) -> Text:
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    known = {sha256: f"wikitext-2 test ({form})" for form, sha256 in WIKITEXT_SHA256.items()}
    return Text(known.get(digest, name), text, digest, len(data))


def hf_join(raw: str) -> str:
    """The `datasets` rows of a wikitext file, joined as papers do.

    A row is a line with its end, or empty where the line is blank.
    """
    rows = io.StringIO(raw, newline="\n")
    return "\n\n".join(row if row.strip() else "" for row in rows)


def _download_wikitext(form: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    hint = "give wiki.test.raw as --text, from a machine that is online; or measure on --text stdlib"
    # The base of every error of the HTTP library below: which one that is depends on the version.
    network: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        archive = _archive()
        with zipfile.ZipFile(archive) as files:
            member = files.getinfo(_WIKITEXT_MEMBER)
            if member.file_size != _WIKITEXT_BYTES:
                raise QConvertError(
                    f"{_WIKITEXT_MEMBER}: {member.file_size} bytes, not {_WIKITEXT_BYTES}", hint
                )
            raw = files.read(member).decode()
    except (OSError, network, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise QConvertError(
            f"{WIKITEXT}: not to be had from {_WIKITEXT_REPO}: {shown(str(error), 200)}", hint
        ) from error
    text = hf_join(raw) if form == "hf-join" else raw
    if hashlib.sha256(text.encode()).hexdigest() != WIKITEXT_SHA256[form]:
        raise QConvertError(f"{WIKITEXT}: the bytes from {_WIKITEXT_REPO} are not the published ones", hint)
    return text


def _archive() -> str:
    """The archive in the cache of the Hub, downloaded only where the cache lacks the archive.

    One request goes to the Hub before the download: without a network, the library would retry for half a
    minute, and report every attempt.
    """
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")
    if isinstance(cached, str):
        return cached
    if hub.constants.HF_HUB_OFFLINE:
        raise OSError("it is not in the cache, and HF_HUB_OFFLINE is set")
    url = hub.hf_hub_url(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")
    hub.get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS)
    return hub.hf_hub_download(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")


def tokenize(text: Text, model: Path) -> Tokens:
    """Tokenize the text by a checkpoint's `tokenizer.json`, in one call without special tokens.

    The tokenizer of a GGUF file is made from its keys. Raises QConvertError if there is no tokenizer, or
    if the `tokenizers` library cannot read the tokenizer.
    """
    path, data = _tokenizer_json(model)
    tokenizer = _parse_tokenizer(path, data)
    # The token that the tokenizer's own template puts before a text, if any.
    plain, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    begins = len(framed) > len(plain) and framed[1 : 1 + len(plain)] == plain
    bos = int(framed[0]) if begins else None
    return Tokens(_encode(tokenizer, text), bos, text, hashlib.sha256(data).hexdigest())


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
    tokenizer = _parse_tokenizer(path, data)
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
    try:
        return path, path.read_bytes()
    except FileNotFoundError as error:
        raise NoTokenizer(f"{path}: {error.strerror}", hint) from error
    except OSError as error:
        raise QConvertError(f"{path}: {error.strerror or error}", hint) from error


def _parse_tokenizer(path: Path, data: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises nothing more specific
        raise QConvertError(
            f"{path}: {error}",
            "fetch the file again, or update tokenizers: it is damaged, or newer than that",
        ) from error
