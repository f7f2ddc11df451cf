"""Reads the files of a Hugging Face tokenizer into one structure.

Old folders hold a vocabulary and its merges instead of a tokenizer.json; they are converted to the
tokenizer.json of their class, so that no other module handles them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.io import limits
from qconvert.formats.io.strict_json import read_bounded, read_json_object
from qconvert.formats.tokenizers.pretokenizer_patterns import QWEN2
from qconvert.formats.tokenizers.sentencepiece import SentencePieceModel, is_sentencepiece, read_sentencepiece
from qconvert.formats.tokenizers.tiktoken import find_tiktoken, read_tiktoken

MAX_TEXT_BYTES = 16 << 20
_ROW = re.compile(r"[0-9]{1,9}")
SPECIAL_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An added token, matched in the text before anything is split."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The tokenizer of a folder.

    `tokenizer` is tokenizer.json (or what old files convert to, {} when there is only a SentencePiece model),
    `settings` tokenizer_config.json. `added` holds the added tokens by id; `added_beside` leaves out those
    that repeat pieces of the SentencePiece model.
    """

    path: Path
    tokenizer: Json
    settings: Json
    sentencepiece: SentencePieceModel | None
    added: Mapping[int, AddedToken]
    added_beside: Mapping[int, AddedToken]
    chat_template: object


def read_folder(path: Path, config: Json) -> TokenizerFolder:
    """Reads the tokenizer in a folder. Raises UnsupportedModel when there is no supported one."""
    settings = _optional_json(path / "tokenizer_config.json")
    tokenizer = read_tokenizer_json(path / "tokenizer.json") or _old_files(path, settings, config)
    model = next((path / n for n in ("tokenizer.model", "spiece.model") if is_sentencepiece(path / n)), None)
    if not tokenizer and model is None:
        raise UnsupportedModel(
            f"{path}: no tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            "fetch the model's tokenizer files into this folder",
        )
    sentencepiece = read_sentencepiece(model) if model else None
    pieces = len(sentencepiece.pieces) if sentencepiece else 0
    named = _special_texts(settings, _optional_json(path / "special_tokens_map.json"))
    beside = {**_chatglm_tokens(settings, pieces), **dict(_side_tokens(path, settings, named))}
    inside: dict[int, AddedToken] = {}
    for entry in expect_list(tokenizer.get("added_tokens"), "added_tokens"):
        text = _text(entry, "added_tokens")
        inside[_id(entry.get("id"), text)] = AddedToken(text, bool(entry.get("special")) or text in named)
    return TokenizerFolder(
        path=path,
        tokenizer=tokenizer,
        settings=settings,
        sentencepiece=sentencepiece,
        added=inside | beside,
        added_beside={row: token for row, token in inside.items() if row >= pieces} | beside,
        chat_template=_chat_template(path, settings),
    )


def token_text(entry: object) -> str | None:
    """Returns the text of a token in tokenizer_config.json: a string, or an object with its flags."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def expect_object(value: object, what: str) -> Json:
    """Returns `value` if it is a JSON object, {} for null; CorruptCheckpoint naming `what` otherwise."""
    if value is not None and not isinstance(value, dict):
        raise CorruptCheckpoint(f"tokenizer: {what} is {shown(value)}, not an object")
    return value or {}


def expect_list(value: object, what: str) -> list[Any]:
    """Returns `value` if it is a JSON list, [] for null; CorruptCheckpoint naming `what` otherwise."""
    if value is not None and not isinstance(value, list):
        raise CorruptCheckpoint(f"tokenizer: {what} is {shown(value)}, not a list")
    return value or []


def steps_of(spec: object, what: str = "step") -> Iterator[Json]:
    """Yields the steps of a normaliser, pre-tokenizer or decoder, sequences flattened."""
    record = expect_object(spec, what)
    keys = [key for key in ("normalizers", "pretokenizers", "decoders") if key in record]
    if record and not keys:
        yield record
    for key in keys:
        for step in expect_list(record[key], key):
            yield from steps_of(step, what)


def _optional_json(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> Json:
    return read_json_object(path, max_bytes) if path.is_file() else {}


def read_tokenizer_json(path: Path) -> Json:
    """Returns the JSON object of a tokenizer or a vocabulary; {} where there is no such file."""
    return _optional_json(path, limits.TOKENIZER_BYTES)


def _side_tokens(path: Path, settings: Json, named: frozenset[str]) -> Iterator[tuple[int, AddedToken]]:
    for text, token in _optional_json(path / "added_tokens.json").items():
        yield _id(token, text), AddedToken(text, text in named)
    for number, entry in expect_object(settings.get("added_tokens_decoder"), "added_tokens_decoder").items():
        text = _text(entry, "added_tokens_decoder")
        token = int(number) if _ROW.fullmatch(number) else None
        yield _id(token, text), AddedToken(text, bool(entry.get("special")) or text in named)


def _chatglm_tokens(settings: Json, pieces: int) -> dict[int, AddedToken]:
    """Returns the control tokens that the classes of ChatGLM2 and 3 add after the pieces; no file lists them.

    Source: `SPTokenizer` in tokenization_chatglm.py of chatglm2-6b and chatglm3-6b; only the latter has
    tokens for roles, and a chat template.
    """
    if settings.get("tokenizer_class") != "ChatGLMTokenizer" or not pieces:
        return {}
    roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    texts = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *(roles if settings.get("chat_template") else ()))
    return {pieces + i: AddedToken(text, special=True) for i, text in enumerate(texts)}


def _special_texts(*sources: Json) -> frozenset[str]:
    """Returns the texts that tokenizer_config.json and special_tokens_map.json call special."""
    entries = [source.get(f"{kind}_token") for source in sources for kind in SPECIAL_KINDS]
    more = (source.get("additional_special_tokens") for source in sources)
    entries += [entry for listed in more if isinstance(listed, list) for entry in listed]
    return frozenset(text for entry in entries if (text := token_text(entry)))


def _text(entry: object, what: str) -> str:
    text = token_text(entry) if isinstance(entry, dict) else None
    if text is None:
        raise CorruptCheckpoint(f"tokenizer: {what} holds {shown(entry)}, not a token")
    return text


def _id(value: object, text: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptCheckpoint(
            f"tokenizer: token {shown(text)!r} has id {shown(value)}, not a number from 0"
        )
    return value


def _chat_template(path: Path, settings: Json) -> object:
    """Returns the template in tokenizer_config.json, else the one that newer folders keep in a file."""
    if "chat_template" in settings:
        return settings["chat_template"]
    main = path / "chat_template.jinja"
    if main.is_file():
        more = sorted((path / "additional_chat_templates").glob("*.jinja"))
        if not more:
            return _read_text(main)
        named = [("default", main), *((file.stem, file) for file in more)]
        return [{"name": name, "template": _read_text(file)} for name, file in named]
    return _optional_json(path / "chat_template.json").get("chat_template")


def _read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    try:
        return read_bounded(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{shown(path.name)}: is not UTF-8 at byte {error.start}") from error


def _old_files(path: Path, settings: Json, config: Json) -> Json:
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _old_bpe(path, settings, config)
    if (path / "vocab.txt").is_file():
        return _old_wordpiece(path, settings)
    ranks = find_tiktoken(path)
    return read_tiktoken(ranks, settings, config) if ranks else {}


def _old_bpe(path: Path, settings: Json, config: Json) -> Json:
    """Converts a slow byte-level tokenizer. Sources: GPT2Converter and Qwen2Converter in transformers."""
    kind = str(settings.get("tokenizer_class") or config.get("model_type"))
    vocab = read_tokenizer_json(path / "vocab.json")
    if kind.lower().startswith("gpt2"):
        normalizer, pre = None, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    elif kind.lower().startswith("qwen"):
        split = {"type": "Split", "pattern": {"Regex": QWEN2[0]}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        normalizer, pre = {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split, level]}
    else:
        raise UnsupportedModel(
            f"{path}: vocab.json and merges.txt of a {shown(kind)}, whose splitting rules are not known here",
            "save the tokenizer with transformers' fast class, which writes a tokenizer.json",
        )
    end = "<|endoftext|>"  # the default of both classes
    added = [{"id": vocab[end], "content": end, "special": True}] if end in vocab else []
    return {
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "model": {"type": "BPE", "vocab": vocab, "merges": list(_merges(path / "merges.txt"))},
    }


def _merges(path: Path) -> Iterator[str]:
    lines = _lines(path)
    for number, line in enumerate(lines):
        if number == 0 and line.startswith("#"):
            continue
        parts = line.split()
        if len(parts) == 2:
            yield " ".join(parts)
        elif parts:
            raise CorruptCheckpoint(f"{path.name}: line {number + 1} holds {len(parts)} words, not 2")


def _old_wordpiece(path: Path, settings: Json) -> Json:
    """Converts a slow BERT tokenizer. Source: BertConverter in transformers."""
    vocab = {line: number for number, line in enumerate(_lines(path / "vocab.txt"))}
    cased = any(line != line.lower() for line in vocab if not line.startswith("["))
    lowercase = bool(settings.get("do_lower_case", not cased))
    specials = [t for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if t in vocab]
    return {
        "added_tokens": [{"id": vocab[text], "content": text, "special": True} for text in specials],
        "normalizer": {"type": "BertNormalizer", "lowercase": lowercase, "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": vocab},
    }


def _lines(path: Path) -> list[str]:
    return _read_text(path, limits.TOKENIZER_BYTES).rstrip("\n").split("\n")
