"""Reads tokenizers in tiktoken files: every line a token in base64 and its rank.

A rank is both the token's id and its merge priority, so the merges of tokenizer.json follow from the ranks.
Splitting rules and special tokens are in the Python file next to it; here they are known by the tokenizer's
class. Sources: `tokenization_qwen.py` of Qwen-7B and `tokenization_chatglm.py` of glm-4-9b (pattern,
normaliser, special tokens), and `CoreBPE` in openai/tiktoken (the order of merges).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.io.strict_json import read_bounded
from qconvert.formats.tokenizers.bpe_limits import check_lengths
from qconvert.formats.tokenizers.pretokenizer_patterns import LLAMA3, QWEN2, Splits

MAX_FILE_BYTES = 32 << 20  # the largest in use, with 200,000 tokens, has 4 MB


# What the Python file of a tokenizer class defines besides the ranks: splits, normaliser, special tokens.
_CLASSES: Mapping[str, tuple[Splits, str | None, tuple[str, ...]]] = {
    "QWenTokenizer": (
        QWEN2,
        "NFC",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ),
    "ChatGLM4Tokenizer": (LLAMA3, None, ()),  # whose tokenizer_config.json lists them
}
_CLASS_OF_MODEL = {"qwen": "QWenTokenizer", "chatglm": "ChatGLM4Tokenizer"}


def find_tiktoken(folder: Path) -> Path | None:
    """Returns the tiktoken file of a model folder, if it has one."""
    names = sorted(path.name for path in folder.glob("*.tiktoken"))
    for name in (*names, "tokenizer.model"):
        path = folder / name
        if path.is_file():
            first = path.open("rb").readline(1 << 10).split()
            if len(first) == 2 and first[1].isdigit():
                return path
    return None


def read_tiktoken(path: Path, settings: Json, config: Json) -> Json:
    """Converts a tiktoken file to a tokenizer.json.

    Raises CorruptCheckpoint naming a line that is no token, UnsupportedModel for a class whose splitting
    rules are not known here.
    """
    name = str(settings.get("tokenizer_class") or _CLASS_OF_MODEL.get(str(config.get("model_type"))))
    kind = _CLASSES.get(name)
    if kind is None:
        raise UnsupportedModel(
            f"{shown(path.name)}: its class, {shown(name)}, has splitting rules that are not known here",
            "save the tokenizer with transformers' fast class, which writes a tokenizer.json",
        )
    splits, normaliser, special = kind
    ranks = read_ranks(path)
    merges, whole = [], False
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            parts = parts_before(token, ranks)
            whole |= len(parts) != 2
            merges += [[_spelled(parts[0]), _spelled(parts[1])]] if len(parts) == 2 else []
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [{"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated"} for s in splits]
    first = max(ranks.values()) + 1
    return {
        "added_tokens": [
            {"id": first + i, "content": text, "special": True} for i, text in enumerate(special)
        ],
        "normalizer": normaliser and {"type": normaliser},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
        "model": {
            "type": "BPE",
            "vocab": {_spelled(token): rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": whole,  # tiktoken does not merge a word that is a token
        },
    }


def read_ranks(path: Path) -> Mapping[bytes, int]:
    """Returns every token of a tiktoken file and its rank, both distinct."""
    name = shown(path.name)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bounded(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if not token:
                raise ValueError("an empty token")
            ranks[token] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise CorruptCheckpoint(f"{name}: line {number} is not a token in base64 and its rank") from error
    if not ranks or len(set(ranks.values())) < len(ranks):
        raise CorruptCheckpoint(f"{name}: {len(ranks)} tokens have {len(set(ranks.values()))} ranks")
    check_lengths(name, map(len, ranks))
    return ranks


def parts_before(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Returns the parts of a token's bytes just before the last merge: two if merging ever reaches it."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    pairs = [ranks.get(token[i : i + 2], limit) for i in range(len(token) - 1)]
    while len(pairs) > 1:
        best = min(pairs)
        if best >= limit:
            break
        at = pairs.index(best)  # the leftmost of the lowest rank
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pairs[at]
        if at:
            pairs[at - 1] = ranks.get(parts[at - 1] + parts[at], limit)
        if at < len(pairs):
            pairs[at] = ranks.get(parts[at] + parts[at + 1], limit)
    return parts


# Byte-level BPE's letters for bytes that are not their own. Source: bytes_to_unicode in GPT-2's encoder.py.
_UNPRINTABLE = (*range(0x21), *range(0x7F, 0xA1), 0xAD)
_LETTERS: dict[int, Any] = {byte: chr(256 + i) for i, byte in enumerate(_UNPRINTABLE)}


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_LETTERS)
