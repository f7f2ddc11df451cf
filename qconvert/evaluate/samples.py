"""Generates continuations of prompts by several models, to read beside the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.records import Continuation, PromptSample
from qconvert.formats.tokenizers.tokenized_text import first_token, open_tokenizer
from qconvert.runtime.generate import Sampler, generate

PROMPT_TOKENS, NEW_TOKENS = 32, 48
_PLACES = (0.25, 0.75)
"""Where in the text the prompts are from."""
_LETTERS_PER_TOKEN = 12
"""Letters of text that are sure to have a token."""


def continuations(models: Sequence[EvalModel], tokenizer: Path, text: str) -> tuple[PromptSample, ...]:
    """Two prompts of 32 tokens from the text, each continued by 48 tokens of every model.

    Every model takes the likeliest token each time; the first is what the others are compared with. A text
    too short for a prompt gives none.
    """
    cutter = open_tokenizer(tokenizer)
    bos = first_token(cutter)
    samples = []
    for start in _starts(text):
        piece = text[start : start + (PROMPT_TOKENS + NEW_TOKENS) * _LETTERS_PER_TOKEN]
        ids = list(cutter.encode(piece, add_special_tokens=False).ids)
        prompt, rest = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS : PROMPT_TOKENS + NEW_TOKENS]
        if not rest:
            continue
        framed = prompt if bos is None else [bos, *prompt]
        made = []
        for model in models:
            new = generate(model.decoder, framed, NEW_TOKENS, Sampler(), frozenset())
            made.append((model.label, cutter.decode(list(new), skip_special_tokens=False)))
        compared = tuple(Continuation(label, words, _same(words, made[0][1])) for label, words in made)
        samples.append(PromptSample(cutter.decode(prompt), cutter.decode(rest), compared))
    return tuple(samples)


def _starts(text: str) -> Iterator[int]:
    """Places in the text, moved on to the beginning of a line where one is near."""
    for share in _PLACES:
        at = int(share * len(text))
        line = text.find("\n", at, at + 200) + 1
        yield line or at


def _same(a: str, b: str) -> int:
    """How many letters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
