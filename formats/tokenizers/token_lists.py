"""Builds GGUF's token lists: a text, a type and perhaps a score for every row of the embedding.

Rows without a token are called `[PADn]` and unused. An id beyond the rows is an error: the model could never
have produced it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.tokenizers.huggingface_files import AddedToken
from qconvert.formats.tokenizers.sentencepiece import PieceType, SentencePieceModel

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
UNUSED_SCORE = -10000.0
ADDED_SCORE = -1000.0
SPACES_SCORE = -1e9
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BARS = "\N{FULLWIDTH VERTICAL LINE}"


@dataclass(slots=True)
class Tokens:
    """The vocabulary by id; every list has one entry for each embedding row."""

    texts: list[str]
    scores: list[float]
    types: list[int]

    @classmethod
    def unused(cls, rows: int) -> Tokens:
        texts = [f"[PAD{row}]" for row in range(rows)]
        return cls(texts, [UNUSED_SCORE] * rows, [int(PieceType.UNUSED)] * rows)

    def put(self, row: int, text: str, score: float, kind: PieceType) -> None:
        """Sets the token of a row. Raises CorruptCheckpoint for a row beyond the embedding."""
        if row >= len(self.texts):
            raise CorruptCheckpoint(
                f"tokenizer: token {shown(text)!r} has id {row}; the embedding has {len(self.texts)} rows",
                "the tokenizer and the weights are of different models, or the embedding was not resized",
            )
        self.texts[row], self.scores[row], self.types[row] = text, score, int(kind)


def looks_special(text: str) -> bool:
    """Returns whether an added token is a control token although its flags do not say so.

    The list is that of llama.cpp's converter (does_token_look_special), from deepseek-coder, command-r and
    gemma.
    """
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith(f"<{_BARS}") and text.endswith(f"{_BARS}>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _put_added(tokens: Tokens, added: Mapping[int, AddedToken]) -> None:
    for row, token in added.items():
        if token.special or looks_special(token.text):
            tokens.put(row, token.text, ADDED_SCORE, PieceType.CONTROL)
        else:  # matched in the raw text, where a space is a space
            tokens.put(row, token.text.replace(SPACE, " "), ADDED_SCORE, PieceType.USER_DEFINED)


def vocabulary(value: object) -> Mapping[str, int]:
    """Checks a tokenizer.json's `vocab` object: distinct ids from 0 on."""
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"tokenizer.json: vocab is {shown(value)}, not an object of ids")
    seen: dict[int, str] = {}
    for text, row in value.items():
        if not isinstance(row, int) or isinstance(row, bool) or row < 0:
            raise CorruptCheckpoint(f"tokenizer.json: token {shown(text)!r} has id {shown(row)}")
        if row in seen:
            raise CorruptCheckpoint(f"tokenizer.json: {shown(seen[row])!r} and {shown(text)!r} have id {row}")
        seen[row] = text
    return value


def bpe_tokens(vocab: Mapping[str, int], added: Mapping[int, AddedToken], rows: int) -> Tokens:
    """Builds byte-level BPE's list: trained tokens in its letters, added ones as plain text."""
    tokens = Tokens.unused(rows)
    for text, row in vocab.items():
        tokens.put(row, text, 0.0, PieceType.NORMAL)
    _put_added(tokens, added)
    return tokens


def wordpiece_tokens(vocab: Mapping[str, int], added: Mapping[int, AddedToken], rows: int) -> Tokens:
    """Builds WordPiece's list in llama.cpp's form: a mark on word beginnings instead of on the rest."""
    tokens = bpe_tokens(vocab, added, rows)
    for row, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True)):
        if kind != PieceType.CONTROL:
            tokens.texts[row] = text[2:] if text.startswith("##") else SPACE + text
    return tokens


def sentencepiece_tokens(model: SentencePieceModel, added: Mapping[int, AddedToken], rows: int) -> Tokens:
    """Builds the list of a SentencePiece model's pieces and the tokens added to it.

    Pieces the trainer was told to keep whole are matched like added tokens. (llama.cpp's converter calls them
    normal ones, which merges need not reach: gemma's `<table>` without its added tokens.)
    """
    tokens = Tokens.unused(rows)
    for row, piece in enumerate(model.pieces):
        tokens.put(row, piece.text, piece.score, piece.type)
        if piece.type is PieceType.USER_DEFINED:
            _put_added(tokens, {row: AddedToken(piece.text, special=False)})
    _put_added(tokens, added)
    return tokens


def merged_tokens(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None,
    added: Mapping[int, AddedToken],
    rows: int,
) -> Tokens:
    """Builds the list of a SentencePiece BPE in tokenizer.json, computing the scores llama.cpp merges by.

    SentencePiece numbers its pieces by falling score, -0, -1, -2 and so on after the special and byte tokens,
    and transformers lists the merges in that order; if they are, these are the scores. Runs of spaces whose
    merges come last of all had the lowest score (Llama and Mistral). Raises UnsupportedModel for merges in an
    order that no scores express.
    """
    tokens = Tokens.unused(rows)
    special = {row for row, token in added.items() if token.special}
    first = min(
        (row for text, row in vocab.items() if row not in special and not _BYTE.fullmatch(text)), default=0
    )
    spaces_last = _spaces_come_last(vocab, merges)
    for text, row in vocab.items():
        if _BYTE.fullmatch(text):
            tokens.put(row, text, 0.0, PieceType.BYTE)
        elif row in special:
            tokens.put(row, text, 0.0, PieceType.UNKNOWN if text == unknown else PieceType.CONTROL)
        else:
            score = SPACES_SCORE if spaces_last and not text.strip(SPACE) else float(first - row)
            tokens.put(row, text, score, PieceType.NORMAL)
    known = set(vocab.values())
    _put_added(tokens, {row: token for row, token in added.items() if row not in known})
    return tokens


def ranked_tokens(vocab: Mapping[str, int], added: Mapping[int, AddedToken], rows: int) -> Tokens:
    """Builds Gemma 4's list, whose merges stand beside it: no token has a score.

    Tokens that its chat format wraps calls and thoughts in are shown as text. Source: Gemma4Model.set_vocab
    in llama.cpp's converter.
    """
    tokens = bpe_tokens(vocab, added, rows)
    tokens.scores = [ADDED_SCORE] * rows
    for text, row in vocab.items():
        if _BYTE.fullmatch(text):
            tokens.put(row, text, ADDED_SCORE, PieceType.BYTE)
    for row, token in added.items():
        if token.text in _SHOWN:
            tokens.put(row, token.text, ADDED_SCORE, PieceType.USER_DEFINED)
    return tokens


_SHOWN = frozenset(
    (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
)


def _spaces_come_last(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> bool:
    """Returns whether runs of spaces are merged last; UnsupportedModel unless the others are in id order."""
    made = ["".join(pair) for pair in merges]
    spaces_last = len(made) > 1 and not made[-1].strip(SPACE)
    while spaces_last and made and not made[-1].strip(SPACE):
        made.pop()
    if any(vocab.get(later, -1) < vocab.get(earlier, -1) for earlier, later in pairwise(made)):
        raise UnsupportedModel(
            "tokenizer.json: its merges are not in the order of its tokens, which llama.cpp's scores need",
            "add the model's tokenizer.model to the folder",
        )
    return spaces_last


def unigram_tokens(
    vocab: Iterable[object], unknown: int | None, added: Mapping[int, AddedToken], rows: int
) -> Tokens:
    """Builds the list of a unigram vocabulary in tokenizer.json: pairs of a piece and its log probability."""
    tokens = Tokens.unused(rows)
    for row, entry in enumerate(vocab):
        match entry:
            case [str(text), int() | float() as score]:
                kind = PieceType.UNKNOWN if row == unknown else PieceType.NORMAL
                if row in added and added[row].special and row != unknown:
                    kind = PieceType.CONTROL
                tokens.put(row, text, float(score), kind)
            case _:
                raise CorruptCheckpoint(
                    f"tokenizer.json: vocab entry {row} is {shown(entry)}, not [text, score]"
                )
    return tokens
