"""Cuts a text into windows and chooses the tokens that count.

Papers leave these rules out of a perplexity, and the rules move it by up to 60 %.

The functions count tokens; no model is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qconvert.errors import BadRecipe

LEAST_CONTEXT = 4
"""The shortest window that may be asked for; every protocol scores something of it."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, stop) are read together; those of [scored, stop) count."""

    start: int
    stop: int
    scored: int


@dataclass(frozen=True, slots=True)
class Protocol:
    """A named way of measuring, with the context it is defined for.

    `wikitext` is the spelling of wikitext-2 it is used with; `bos` says whether each window begins
    with the tokenizer's beginning-of-sequence token, where the tokenizer has one.
    """

    name: str
    default_context: int
    cut: Callable[[int, int], list[Window]]
    wikitext: str
    words: str
    bos: bool = False
    context_override: int | None = None

    @property
    def context(self) -> int:
        return self.context_override or self.default_context

    @property
    def label(self) -> str:
        """What to print with a number: the name, and the context if it is not the protocol's own."""
        if self.context == self.default_context:
            return self.name
        return f"{self.name}@{self.context}"

    @property
    def rule(self) -> str:
        """How the text is cut and what counts, in words."""
        return self.words.format(context=self.context, half=self.context // 2)

    def windows(self, tokens: int) -> list[Window]:
        """The windows of a text of that many tokens; raises BadRecipe if not one fits."""
        windows = self.cut(tokens, self.context)
        if not windows:
            fits = tokens // 8
            raise BadRecipe(
                f"text: {tokens} tokens are fewer than one window of {self.context} ({self.label})",
                "give a longer text" + (f", or --context {fits} or less" if fits >= LEAST_CONTEXT else ""),
            )
        return windows


def _disjoint(tokens: int, context: int, skipped: int = 1) -> list[Window]:
    """Disjoint windows, remainder dropped; all but the first `skipped` tokens of each count."""
    return [Window(at, at + context, at + skipped) for at in range(0, tokens - context + 1, context)]


def _strided(tokens: int, context: int) -> list[Window]:
    """Windows that move on by half a context; each token but the first of the text counts once."""
    windows: list[Window] = []
    scored = 1
    while scored < tokens:
        start = len(windows) * (context // 2)
        stop = min(start + context, tokens)
        windows.append(Window(start, stop, scored))
        scored = stop
    return windows


PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        # GPTQ's and most papers' tables: exp of the token mean.
        Protocol("gptq2048", 2048, _disjoint, wikitext="hf-join", words="disjoint windows of {context}"),
        # "Perplexity of fixed-length models" in the transformers documentation, at stride 512.
        Protocol(
            "hf-stride", 1024, _strided, wikitext="hf-join", words="windows of {context} at stride {half}"
        ),
        # llama-perplexity at its default context: predictions at positions context/2 to context - 2 count.
        Protocol(
            "llamacpp512",
            512,
            lambda tokens, context: _disjoint(tokens, context, context // 2 + 1),
            wikitext="raw",
            words="second halves of disjoint windows of {context}",
            bos=True,
        ),
    )
}


def protocol_named(name: str, context: int | None = None) -> Protocol:
    """The protocol of that name, with another context if one is given."""
    if name not in PROTOCOLS:
        raise BadRecipe(f"protocol {name!r}: not known", f"write one of {', '.join(PROTOCOLS)}")
    if context is not None and context < LEAST_CONTEXT:
        raise BadRecipe(
            f"context {context}: too short to predict from", f"write --context {LEAST_CONTEXT} or more"
        )
    return replace(PROTOCOLS[name], context_override=context)
