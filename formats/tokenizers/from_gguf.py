"""Rebuilds a tokenizer.json from the tokenizer keys of a GGUF file: the inverse of `to_gguf`.

All kinds that are written are rebuilt: byte-level BPE ("gpt2" in GGUF), SentencePiece BPE ("llama", and
"gemma4" with its merges), unigram ("t5") and WordPiece ("bert"). A GGUF names its splitting rules instead of
holding them; they come from the table that recognises them.
What GGUF never holds takes the class's default: the normaliser of byte-level BPE,
BERT's text cleaning, and lstrip/rstrip of added tokens.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.tokenizers.bpe_limits import check_lengths
from qconvert.formats.tokenizers.pretokenizer_patterns import GPT2
from qconvert.formats.tokenizers.pretokenizers import ADDS_BOS, RULES, Rule
from qconvert.formats.tokenizers.sentencepiece import PieceType
from qconvert.formats.tokenizers.token_lists import SPACE

TOKENIZER = "tokenizer.json"
_PREFIX = "tokenizer.ggml."
_PADDING = re.compile(r"\[PAD\d+\]")
# Names that llama.cpp accepts for rule sets of the table.
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "megrez": "qwen2"}
_SPECIAL = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls",
    "mask": "mask",
}  # fmt: skip
_TAKE_OWN = "use the model's own tokenizer files"
_ADDS = ("add_bos_token", "add_eos_token")
_ADDED = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)


def tokenizer_files(kv: Mapping[str, KV]) -> dict[str, str]:
    """Returns tokenizer.json and tokenizer_config.json as text, by name; {} for a file without a tokenizer.

    Raises CorruptCheckpoint naming a damaged key, UnsupportedModel for a tokenizer of another kind.
    """
    if f"{_PREFIX}model" not in kv:
        return {}
    why_not = lost_tokenizer(kv)
    if why_not is not None:
        raise UnsupportedModel(why_not, _TAKE_OWN)
    keys = _Keys(kv)
    tokenizer = _KINDS[keys.text("model")](keys)
    return {
        TOKENIZER: json.dumps(tokenizer, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(_settings(keys), ensure_ascii=False, indent=2) + "\n",
    }


def lost_tokenizer(kv: Mapping[str, KV]) -> str | None:
    """Returns why no tokenizer.json can be rebuilt, from two keys alone; None if it probably can."""
    entries = (kv.get(_PREFIX + name) for name in ("model", "pre"))
    kind, pre = (entry and entry.value for entry in entries)
    if isinstance(kind, str) and kind not in _KINDS:
        return f"{_PREFIX}model: {shown(kind)} tokenizers are not rebuilt"
    if kind == "gpt2" and isinstance(pre, str) and _rule(pre) is None:
        return f"{_PREFIX}pre: splitting rules of {shown(pre)} are not known here"
    return None


def _rule(name: str) -> Rule | None:
    return next((rule for rule in RULES if rule.name == _ALIASES.get(name, name)), None)


@dataclass(frozen=True, slots=True)
class _Token:
    id: int
    text: str
    type: int


class _Keys:
    def __init__(self, kv: Mapping[str, KV]) -> None:
        self.kv = kv
        texts = self.list("tokens", str)
        types = self.list("token_type", int) or [int(PieceType.NORMAL)] * len(texts)
        if len(types) != len(texts):
            raise CorruptCheckpoint(f"{_PREFIX}token_type: {len(types)} entries for {len(texts)} tokens")
        pairs = enumerate(zip(texts, types, strict=True))
        self.tokens = [
            _Token(row, text, kind)
            for row, (text, kind) in pairs
            if kind != PieceType.UNUSED or not _PADDING.fullmatch(text)
        ]

    def value(self, name: str) -> Any:
        entry = self.kv.get(_PREFIX + name)
        return None if entry is None else entry.value

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            raise CorruptCheckpoint(f"{_PREFIX}{name}: {'missing' if value is None else 'not text'}")
        return utf8(value, _PREFIX + name)

    def list(self, name: str, kind: type) -> Sequence[Any]:
        value = self.value(name)
        if value is None and name != "tokens":
            return ()
        if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
            raise CorruptCheckpoint(f"{_PREFIX}{name}: {'missing' if value is None else 'not a list'}")
        if kind is str:
            for row, text in enumerate(value):
                utf8(text, f"{_PREFIX}{name}: entry {row}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.value(name)
        return value if isinstance(value, bool) else default

    def special(self, name: str) -> _Token | None:
        """Returns the token for this purpose (bos, eos, unk, pad, ...), None where the file has none."""
        row = self.value(f"{_SPECIAL[name]}_token_id")
        return next((t for t in self.tokens if t.id == row), None) if isinstance(row, int) else None

    def called(self, text: str) -> _Token | None:
        """Returns the token with this text, None where there is none."""
        return next((token for token in self.tokens if token.text == text), None)


def utf8(text: str, what: str) -> str:
    """Returns a text of a GGUF file (any bytes) if it is valid UTF-8; CorruptCheckpoint otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CorruptCheckpoint(f"{what} is not UTF-8: {shown(text)}") from None
    return text


def _header(keys: _Keys) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": token.id, "content": token.text, **flags, "special": token.type != PieceType.USER_DEFINED}
        for token in keys.tokens
        if token.type in _ADDED
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}


def _byte_level(keys: _Keys) -> Json:
    name = keys.text("pre")
    rule = _rule(name)
    assert rule is not None, name
    added = [t for t in keys.tokens if t.type in _ADDED]
    trained = len(keys.tokens) - len(added)
    tail = all(token.id >= trained for token in added)  # otherwise they are among the trained ones
    vocab = {t.text: t.id for t in keys.tokens if not (tail and t.type in _ADDED)}
    return {
        **_header(keys),
        "normalizer": {"type": "NFC"} if rule.normaliser == "NFC" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_pre_tokenizers(rule))},
        "post_processor": _frame(keys, bos=name in ADDS_BOS) or _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(rule.whole_words),
            "vocab": vocab,
            "merges": list(keys.list("merges", str)),
        },
    }


_BYTE_LEVEL: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def _pre_tokenizers(rule: Rule) -> Iterator[Json]:
    """Yields the steps of a rule set in tokenizer.json's format (see `pretokenizer_patterns`)."""
    for step in rule.splits:
        if step.startswith("punctuation, "):
            yield {"type": "Punctuation", "behavior": step.removeprefix("punctuation, ")}
        elif step == "bytes":
            continue  # covered by the byte-level step before it, which has its own expression
        elif step == GPT2[0] and "bytes" in rule.splits:
            yield {**_BYTE_LEVEL, "use_regex": True}
        else:
            pattern = step.replace(r"\r", "\r").replace(r"\n", "\n")
            yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if "bytes" not in rule.splits:
        yield _BYTE_LEVEL


def _sentencepiece(keys: _Keys) -> Json:
    """Rebuilds SentencePiece BPE as transformers writes it: merges of all pairs, best score first."""
    scores = keys.list("scores", float)
    if len(scores) < len(keys.tokens):
        raise CorruptCheckpoint(f"{_PREFIX}scores: {len(scores)} entries for {len(keys.tokens)} tokens")
    vocab = {token.text: token.id for token in keys.tokens}
    return _bpe_of_pieces(keys, vocab, _merges(keys.tokens, scores, vocab))


def _ranked_pieces(keys: _Keys) -> Json:
    """Rebuilds Gemma 4's BPE, whose merges the file holds."""
    vocab = {token.text: token.id for token in keys.tokens}
    return _bpe_of_pieces(keys, vocab, [merge.split(" ", 1) for merge in keys.list("merges", str)])


def _bpe_of_pieces(keys: _Keys, vocab: Mapping[str, int], merges: list[list[str]]) -> Json:
    unknown = next((t.text for t in keys.tokens if t.type == PieceType.UNKNOWN or t.text == "<unk>"), None)
    prefix = keys.flag("add_space_prefix", default=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    restore = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        **_header(keys),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": _frame(keys, bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _merges(tokens: Sequence[_Token], scores: Sequence[float], vocab: Mapping[str, int]) -> list[list[str]]:
    """Returns every way to merge two pieces into a third, better pieces first, as SentencePiece merges.

    Merges into one piece are sorted by rising length of the first part (transformers' `generate_merges`).
    """
    check_lengths(f"{_PREFIX}tokens", (len(t.text) for t in tokens if t.type == PieceType.NORMAL))
    found = [
        (-scores[token.id], token.id, vocab[token.text[:cut]], [token.text[:cut], token.text[cut:]])
        for token in tokens
        if token.type == PieceType.NORMAL
        for cut in range(1, len(token.text))
        if token.text[:cut] in vocab and token.text[cut:] in vocab
    ]
    return [pair for *_, pair in sorted(found)]


def _unigram(keys: _Keys) -> Json:
    """Rebuilds SentencePiece's unigram model: the pieces, their log probabilities, and its normaliser."""
    scores = keys.list("scores", float)
    last = max((token.id for token in keys.tokens), default=-1)
    if len(scores) <= last:
        raise CorruptCheckpoint(f"{_PREFIX}scores: {len(scores)} entries for {last + 1} tokens")
    by_id = {token.id: token for token in keys.tokens}
    texts = [by_id[row].text if row in by_id else f"[PAD{row}]" for row in range(last + 1)]
    unknown = next((token.id for token in keys.tokens if token.type == PieceType.UNKNOWN), None)
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if keys.flag("add_space_prefix", default=True) else "never",
        "split": False,
    }
    return {
        **_header(keys),
        "normalizer": {"type": "Sequence", "normalizers": list(_unigram_normalisers(keys))},
        "pre_tokenizer": metaspace,
        "post_processor": _frame(keys, eos=True),
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[text, score] for text, score in zip(texts, scores, strict=False)],
            "byte_fallback": False,
        },
    }


def _unigram_normalisers(keys: _Keys) -> Iterator[Json]:
    charsmap = keys.list("precompiled_charsmap", int)
    if charsmap:
        text = base64.b64encode(bytes(byte & 255 for byte in charsmap)).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": text}
    if keys.flag("remove_extra_whitespaces", default=False):
        yield {"type": "Strip", "strip_left": True, "strip_right": True}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def _wordpiece(keys: _Keys) -> Json:
    """Rebuilds BERT's WordPiece, which marks continuations of words where llama.cpp marks beginnings."""

    def text_of(token: _Token) -> str:
        if token.type in _ADDED or (token.text.startswith("[") and token.text.endswith("]")):
            return token.text
        return token.text[1:] if token.text.startswith(SPACE) else f"##{token.text}"

    unknown = keys.special("unk")
    return {
        **_header(keys),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": keys.value("normalizer.strip_accents"),
            "lowercase": keys.flag("normalizer.lowercase", default=True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _pair_frame(keys),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown.text if unknown else "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {text_of(token): token.id for token in keys.tokens},
        },
    }


def _pair_frame(keys: _Keys) -> Json | None:
    """Returns BERT's template: the classification token, and a separator after each of two texts."""
    first = keys.special("cls") or keys.special("bos") or keys.called("[CLS]")
    last = keys.special("sep") or keys.special("eos") or keys.called("[SEP]")
    if not keys.flag("add_bos_token", default=True) or first is None or last is None:
        return None

    single, second = _pieces("A", first, last), _pieces("B", None, last)
    return _template(single, [*single, *second], first, last)


def _pieces(name: str, first: _Token | None, last: _Token | None) -> list[Json]:
    """Returns the template of text A or B between two special tokens."""
    type_id = "AB".index(name)
    before, after = (
        [{"SpecialToken": {"id": token.text, "type_id": type_id}}] if token else [] for token in (first, last)
    )
    return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]


def _template(single: list[Json], pair: list[Json], *tokens: _Token | None) -> Json:
    named = {t.text: {"id": t.text, "ids": [t.id], "tokens": [t.text]} for t in tokens if t}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}


def _frame(keys: _Keys, *, bos: bool = False, eos: bool = False) -> Json | None:
    """Returns the template that adds BOS before and EOS after a text, as the file or the default says."""
    first = keys.special("bos") if keys.flag("add_bos_token", default=bos) else None
    last = keys.special("eos") if keys.flag("add_eos_token", default=eos) else None
    if first is None and last is None:
        return None

    single = _pieces("A", first, last)
    return _template(single, [*single, *_pieces("B", first, last)], first, last)


def _settings(keys: _Keys) -> Json:
    named = {f"{name}_token": token.text for name in _SPECIAL if (token := keys.special(name))}
    template = keys.kv.get("tokenizer.chat_template")
    text = template.value if template else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
        **{flag: value for flag in _ADDS if isinstance(value := keys.value(flag), bool)},
        **({"chat_template": utf8(text, "tokenizer.chat_template")} if isinstance(text, str) else {}),
    }


_KINDS: Mapping[str, Callable[[_Keys], Json]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _ranked_pieces,
    "t5": _unigram,
    "bert": _wordpiece,
}
