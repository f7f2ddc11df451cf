"""Holds the measurements of a model and of a weight that reports and figures are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from qconvert.check import compare
from qconvert.core.dtypes import Json
from qconvert.evaluate.paired_statistics import Divergence, Estimate


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model against the reference on the same tokens.

    `perplexity_ratio` is above 1 where the model is worse; `top1_agreement` the share of tokens on
    which both find the same token likeliest; `rms_delta_p` the root mean square change of the true
    token's probability.
    """

    perplexity_ratio: Estimate
    kl: Divergence
    top1_agreement: Estimate
    rms_delta_p: Estimate


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights: its name, its bytes, and their SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The files that were measured: what the model was asked for as, where it lies, and its hashes.

    With a `manifest_sha256`, the hashes of the files are the manifest's. `target` is the record of what a
    target (`--target-size`, `--target-kl`) made of the weights, where there was one.
    """

    name: str
    path: str
    commit: str | None
    manifest_sha256: str | None
    files: tuple[WeightFile, ...]
    target: Json | None = None

    @property
    def weights_sha256(self) -> str:
        """One hash of all weight files: a single file's own, else that of what sha256sum prints."""
        if len(self.files) == 1:
            return self.files[0].sha256
        listed = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(listed.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model's figures; `versus` is None for the reference, or where there is none.

    `bits_per_byte` is the mean loss in bits times the text's tokens per UTF-8 byte, comparable
    between tokenizers. `tokens_per_second` counts the layers only, without head and statistics. `activations`
    are the inputs of linears, in words.
    """

    label: str
    size_bytes: int
    bits_per_weight: float
    arithmetic: str
    perplexity: Estimate
    bits_per_byte: float
    tokens_per_second: float
    versus: Comparison | None
    origin: Origin | None = None
    activations: str = "exact"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the process: what was asked for, what it was to take at most, and its peak so far."""

    asked_bytes: int
    expected_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a model continues a prompt, taking the likeliest token each time.

    `same` counts the letters at its beginning that the first model of the report wrote, too.
    """

    label: str
    text: str
    same: int


@dataclass(frozen=True, slots=True)
class PromptSample:
    """A prompt from the text, how the text goes on, and how the models do."""

    prompt: str
    text: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class WeightError:
    """One weight of A against B: sums of squares, the largest difference, and the same in B's steps."""

    name: str
    role: str
    layer: int | None
    sum_sq_diff: float
    sum_sq: float
    max_abs: float
    max_steps: float | None

    @property
    def relative_rms(self) -> float:
        """Root of summed squared difference over summed squares of A."""
        return relative_rms([self])


def relative_rms(errors: Iterable[WeightError]) -> float:
    """The relative RMS error of several weights taken as one."""
    errors = list(errors)
    return compare.relative_rms(sum(e.sum_sq_diff for e in errors), sum(e.sum_sq for e in errors))
