"""Cuts texts into the windows of tokens that statistics are collected on.

Two ways. `PACKED`: pieces of documents in a random order (of a fixed seed), the tokenizer's EOS between them,
packed without a gap, several texts in equal shares; what error feedback and sensitivities want. `WHOLE`: each
document from its beginning, tokenized in one piece, consecutive windows, as llama-imatrix reads its file
(tools/imatrix/imatrix.cpp of llama.cpp), so that its numbers can be compared. In both, a tokenizer that
begins texts with a token (BOS) has that token in the first place of every window, and no window is shorter
than the others: what remains at the end is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qconvert.calibrate.sources import HUB, Document, Source, open_source, plain_chat
from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe
from qconvert.formats.tokenizers.prompts import Dialogue, check_ids
from qconvert.formats.tokenizers.tokenized_text import first_token

PACKED, WHOLE = "packed", "whole"
LEAST_WINDOW = 16
"""Tokens; llama.cpp counts no batch that is shorter."""
_LEAST_WINDOWS = {PACKED: 1, WHOLE: 2}
_CHARACTERS_PER_TOKEN = 4  # of a piece that is to be about a window long
_RANDOM_RUN = 128  # random tokens in a row
_CHATS = 256  # rendered by one process, which takes .1 s to start


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A file that was read: `sha256` is that of its UTF-8 bytes, as `eval perplexity` records it."""

    name: str
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of tokens, int64 [B, T], and where they come from."""

    tokens_BT: np.ndarray
    names: tuple[str, ...]
    files: tuple[TextRecord, ...]
    protocol: str

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return int(self.tokens_BT.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of all windows together."""
        return int(self.tokens_BT.size)

    @property
    def text_sha256(self) -> tuple[str, ...]:
        """The hashes of the files, to be compared with that of a text that is measured on."""
        return tuple(file.sha256 for file in self.files)

    @property
    def record(self) -> Json:
        """What of it goes into a manifest, as plain data."""
        files = [{"name": f.name, "sha256": f.sha256, "bytes": f.nbytes} for f in self.files]
        return {
            "texts": list(self.names),
            "files": files,
            "tokens": self.tokens,
            "window": self.window,
            "protocol": self.protocol,
        }


def check_window(window: int, positions: int) -> None:
    """Raise BadRecipe for a window that is longer than a model has positions for."""
    if window > positions:
        raise BadRecipe(
            f"--window {window}: the model has {positions} positions", f"use --window {positions} or less"
        )


def check_tokens(tokens_BT: np.ndarray, positions: int, vocab: int) -> None:
    """Raise BadRecipe for windows of tokens, int64 [B, T], that a model cannot read: too long, or with
    tokens beyond its vocabulary.
    """
    check_window(tokens_BT.shape[1], positions)
    check_ids(int(tokens_BT.max()), vocab)


def calibration_windows(
    model: Path | Dialogue,
    texts: Sequence[str],
    tokens: int | None,
    window: int,
    *,
    protocol: str = PACKED,
    seed: int = 0,
) -> CalibrationText:
    """The windows of texts in the tokens of a model (a folder, a GGUF file, or its opened tokenizer).

    `texts` are names as `open_source` takes them; of at most `tokens` tokens (None: all there are) whole
    windows are returned. The same arguments give the same windows. Raises BadRecipe for too little text,
    too short a window and tokens beyond the model's vocabulary, and QConvertError as `open_source` does.
    """
    if window < LEAST_WINDOW:
        raise BadRecipe(f"window {window}: too short", f"take {LEAST_WINDOW} tokens or more")
    sources = [open_source(name) for name in texts]
    if not sources:
        raise BadRecipe("calibration: no text was named", "give a text, such as `default`")
    dialogue = model if isinstance(model, Dialogue) else dialogue_of(open_checkpoint(model))
    cutter = _Cutter(dialogue, window, seed, packed=protocol == PACKED)
    wanted = math.inf if tokens is None else tokens - tokens % window
    ids_N = cutter.stream(sources, wanted)
    count = len(ids_N) // window
    least = _LEAST_WINDOWS[protocol]
    if count < least:
        raise BadRecipe(
            f"text {', '.join(texts)}: has {len(ids_N)} tokens, {least * window} are needed"
            if tokens is None or len(ids_N) < wanted
            else f"{tokens} tokens: fewer than the {least * window} that are needed",
            "give more text, ask for more tokens, or use a shorter window",
        )
    tokens_BT = ids_N[: count * window].reshape(count, window).copy()
    if cutter.bos is not None:
        tokens_BT[:, 0] = cutter.bos
    if dialogue.rows is not None:
        check_ids(int(tokens_BT.max()), dialogue.rows)
    files = tuple(TextRecord(f.name, f.sha256, f.nbytes) for source in sources for f in source.files)
    names = tuple(name if name.startswith(HUB) else Path(name).name for name in texts)
    return CalibrationText(tokens_BT, names, files, protocol)


@dataclass
class _Cutter:
    """Turns documents into tokens; `packed` says by which of the two ways."""

    dialogue: Dialogue
    window: int
    seed: int
    packed: bool
    bos: int | None = field(init=False)
    ordinary_V: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.dialogue.tokenizer
        self.bos = first_token(tokenizer)
        special = set(tokenizer.get_added_tokens_decoder())
        ids = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special)
        rows = self.dialogue.rows
        self.ordinary_V = np.array([i for i in ids if rows is None or i < rows], np.int64)

    def stream(self, sources: Sequence[Source], wanted: float) -> np.ndarray:
        """At most `wanted` tokens, int64 [N]."""
        if self.packed:
            return _joined(self._mixed(sources, wanted), wanted)
        parts: list[np.ndarray] = []
        for i, source in enumerate(sources):
            left = wanted - sum(map(len, parts))
            share = left if math.isinf(left) else -(-int(left) // (len(sources) - i))
            parts.append(_joined(self._pieces(source, i), share))
        return np.concatenate(parts)

    def _mixed(self, sources: Sequence[Source], wanted: float) -> Iterator[np.ndarray]:
        """Pieces, each from the text that has given the fewest tokens so far and has one left."""
        running = {i: self._pieces(source, i) for i, source in enumerate(sources)}
        given = dict.fromkeys(running, 0)
        while running and sum(given.values()) < wanted:
            i = min(running, key=lambda i: given[i])
            piece = next(running[i], None)
            if piece is None:
                del running[i]
                continue
            given[i] += len(piece)
            yield piece

    def _pieces(self, source: Source, number: int) -> Iterator[np.ndarray]:
        """The tokens of a text, piece by piece, with its share of random ones among them."""
        rng = np.random.default_rng((self.seed, number))
        documents = self._texts(source.documents)
        if self.packed:
            pieces = [piece for text in documents for piece in _cut(text, self.window)]
            documents = iter([pieces[i] for i in rng.permutation(len(pieces))])
        ordinary = drawn = 0
        end = self.dialogue.eos if self.packed else None
        for text, plain in documents:
            ids = self._encode(text, plain=plain)
            if end is not None and end not in ids[-2:]:  # a chat ends with its own, maybe in a line
                ids.append(end)
            ordinary += len(ids)
            yield np.array(ids, np.int64)
            while drawn + _RANDOM_RUN / 2 < source.random_share * (ordinary + drawn):
                yield rng.choice(self.ordinary_V, _RANDOM_RUN)
                drawn += _RANDOM_RUN

    def _encode(self, text: str, *, plain: bool) -> list[int]:
        """Token ids. What looks like a special token is one in a rendered chat and in packed pieces.

        llama-imatrix reads it as the characters that it is made of.
        """
        tokenizer = self.dialogue.tokenizer
        tokenizer.encode_special_tokens = plain and not self.packed
        try:
            return self.dialogue.encode(text, special=plain and not self.packed)
        finally:
            tokenizer.encode_special_tokens = False

    def _texts(self, documents: Sequence[Document]) -> Iterator[tuple[str, bool]]:
        """Every document as text, and whether it was text before."""
        for first in range(0, len(documents), _CHATS):
            batch = documents[first : first + _CHATS]
            chats = [document.chat for document in batch if document.chat is not None]
            rendered: Iterator[str | None] = iter(())
            if chats and self.dialogue.has_template:
                rendered = iter(self.dialogue.render_finished(chats))
            for document in batch:
                if document.chat is None:
                    yield document.text, True
                else:
                    yield next(rendered, None) or plain_chat(document.chat), False


def _cut(document: tuple[str, bool], window: int) -> Iterator[tuple[str, bool]]:
    """A document in pieces of about a window, cut at the ends of lines or words where it has any."""
    (text, plain), size, start = document, window * _CHARACTERS_PER_TOKEN, 0
    while len(text) - start > size * 3 // 2:
        stops = (text.rfind(mark, start + size // 2, start + size) + 1 for mark in ("\n", " "))
        stop = next((stop for stop in stops if stop), start + size)
        yield text[start:stop], plain
        start = stop
    yield text[start:], plain


def _joined(pieces: Iterator[np.ndarray], wanted: float) -> np.ndarray:
    """The first `wanted` tokens of all pieces, int64 [N]."""
    parts: list[np.ndarray] = [np.empty(0, np.int64)]
    count = 0
    for piece in pieces:
        parts.append(piece)
        count += len(piece)
        if count >= wanted:
            break
    ids_N = np.concatenate(parts)
    return ids_N if math.isinf(wanted) else ids_N[: int(wanted)]
