"""States what numbers of a report mean: scales of good and bad, and the glossary that explains them.

The steps are rules of thumb, not laws. For orientation: of Llama 3 8B on wikitext-2, llama.cpp's
tools/perplexity/README.md has mean KL divergences of 0.0014 for Q8_0, 0.0055 for Q6_K, 0.031 for Q4_K_M and
0.45 for Q2_K.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from qconvert.core.dtypes import Json


@dataclass(frozen=True, slots=True)
class Scale:
    """Steps of a figure, from good to bad: the number that each stays below, and what it means."""

    name: str
    steps: tuple[tuple[float, str], ...]

    def grade(self, value: float) -> int:
        """The step that a number falls in, 0 for the best."""
        return next(i for i, (limit, _) in enumerate(self.steps) if value < limit or limit == inf)

    def word(self, value: float) -> str:
        """What a number means."""
        return self.steps[self.grade(value)][1]

    @property
    def sentence(self) -> str:
        """The scale in one line: `below 0.001 ..., below 0.01 ..., from 0.01 on ...`."""
        *finite, (_, worst) = self.steps
        words = [f"below {limit:g} {word}" for limit, word in finite]
        return ", ".join([*words, f"from {finite[-1][0]:g} on {worst}"])

    def to_json(self) -> Json:
        """The limits as data; the last step has none."""
        steps = [{"below": None if limit == inf else limit, "means": word} for limit, word in self.steps]
        return {"figure": self.name, "steps": steps}


KL = Scale(
    "KL mean",
    (
        (0.001, "not noticeable"),
        (0.01, "hard to notice"),
        (0.1, "visible in long texts"),
        (0.5, "easily visible"),
        (inf, "severe"),
    ),
)
RMS_ERROR = Scale(
    "relative RMS error of weights",
    (
        (0.004, "as of 16-bit numbers"),
        (0.02, "usual for 8 bits"),
        (0.06, "usual for 5 or 6 bits"),
        (0.15, "usual for 4 bits"),
        (0.28, "usual for 3 bits"),
        (inf, "usual for 2 bits or fewer"),
    ),
)
SCALES = (KL, RMS_ERROR)

_PERPLEXITY = (
    "perplexity",
    "how many tokens the model hesitates between, e^loss; comparable only under one text, protocol and"
    " tokenizer",
)
_BITS_PER_BYTE = (
    "bits/byte",
    "the loss in bits per byte of text, comparable between tokenizers: on English prose about 0.6 for a large"
    " model, above 1 for a small one",
)
_ERROR = ("±", "one standard error; two numbers closer than twice that may be the same")
_SPEED = (
    "eval tokens/s",
    "how fast this evaluation read, beside the other models; `qconvert bench` times a model alone",
)
GLOSSARY = (
    _PERPLEXITY,
    ("ratio", "perplexity over the reference's: below 1.01 is good, above 1.05 bad"),
    (
        "KL mean",
        f"how far the next token's probabilities moved from the reference's, in nats per token: {KL.sentence}"
        " (rules of thumb)",
    ),
    ("same top-1", "how often both models find the same token likeliest: above 97 % is good, below 90 % bad"),
    ("RMS dp", "usual change of the true token's probability: below 1 % is good, above 5 % bad"),
    _BITS_PER_BYTE,
    _ERROR,
    _SPEED,
)
GLOSSARY_ALONE = (_PERPLEXITY, _BITS_PER_BYTE, _ERROR, _SPEED)
"""For a report without a reference."""
GLOSSARY_WEIGHTS = (
    ("rel. RMS", f"size of the weights' errors over the size of the weights: {RMS_ERROR.sentence}"),
    ("worst", "the largest of a single weight tensor, and the layer it is in"),
    ("max, steps", "the largest error of a single weight, and the same in steps of its grid"),
)
"""For a report on weights."""
