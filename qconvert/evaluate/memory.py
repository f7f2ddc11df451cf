"""Fits an evaluation that reads layers in turn to a memory, before anything is read.

What it takes is an upper estimate of what is resident at once, in bytes but where said. Nothing that is saved
changes a figure: batches stay as they are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.memory import LIBRARIES, SLACK, Work, activations
from qconvert.calibrate.memory_limit import MemoryLimit
from qconvert.calibrate.savings import Savings
from qconvert.evaluate.lockstep import BATCH_TOKENS, Batch
from qconvert.evaluate.model_bytes import HeadForm, ModelBytes
from qconvert.report.tables import size
from qconvert.runtime.blockwise_scores import BLOCK_ELEMENTS
from qconvert.runtime.storage import SCRATCH_BYTES

PART_TOKENS = 128 << 10
"""Tokens that every layer is read for at once: those of 64 windows of 2,048."""
_FLOAT = 4
_SCORES_OF_A_TOKEN = 3 * 8
# What a saved reference takes while its log-probabilities are coded or decoded, 2^22 at a time.
_SAVED_BYTES = 40 << 22


@dataclass(frozen=True, slots=True)
class EvalWork:
    """What is evaluated: models, of which there are `tracks` runs, on windows of at most `window` tokens.

    `tokens` are those of all windows, `batch_tokens` those that visit a layer together where one window has
    fewer; `echoes` says that a window may go beside a copy of itself, `rounds` that inputs of linears are
    rounded, `saves` that a reference is kept or was.
    """

    models: Sequence[ModelBytes]
    tracks: int
    window: int
    tokens: int
    batch_tokens: int = BATCH_TOKENS["cpu"]
    echoes: bool = False
    rounds: bool = False
    saves: bool = False

    @property
    def batch(self) -> int:
        """The tokens that visit a layer together, at most."""
        together = max(1, min(self.batch_tokens, self.tokens) // self.window)
        return max(together, 2 if self.echoes else 1) * self.window

    @property
    def part(self) -> int:
        """The tokens whose hidden states are kept at once, at most."""
        return min(self.tokens, PART_TOKENS + self.batch)

    @property
    def states(self) -> int:
        """What hidden states of all tokens of a part take."""
        width = max(model.config.stream * model.dtype.itemsize for model in self.models)
        return self.part * width * self.tracks


@dataclass(frozen=True, slots=True)
class EvalMemory:
    """What an evaluation takes, and how it keeps within that.

    `peak` is that of the whole process: its own, `process`, and the larger of a `layer` with a batch and of
    `scoring`. `states` are the bytes of hidden states, in memory if it `holds_states`, else in a file;
    `weights` what one pass through all models reads, for `part` tokens, of which `batch_tokens` visit a layer
    together.
    """

    asked: int
    process: int
    layer: int
    scoring: int
    heads: HeadForm
    holds_states: bool
    states: int
    weights: int
    part: int
    batch_tokens: int

    @property
    def peak(self) -> int:
        return self.process + max(self.layer, self.scoring)

    @property
    def lines(self) -> tuple[str, str]:
        """The same in words."""
        held = "in memory" if self.holds_states else "in a file"
        return (
            f"memory: {size(self.peak)} at most, of {size(self.asked)}: {size(self.process)} of the process,"
            f" {size(self.layer)} for a layer with a batch, {size(self.scoring)} for scoring",
            f"layers are read in turn, {size(self.weights)} of weights for every {self.part:,} tokens;"
            f" hidden states ({size(self.states)}) are kept {held}, heads are {self.heads.value}",
        )

    @staticmethod
    def parts(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
        """Batches that every layer is read for at once: of PART_TOKENS tokens, or a batch more."""
        part: list[Batch] = []
        for batch in batches:
            part.append(batch)
            if sum(each.tokens_BT.numel() for each in part) >= PART_TOKENS:
                yield part
                part = []
        if part:
            yield part


def fitted(
    work: EvalWork, limit: MemoryLimit, *, batches: Sequence[int] = (), doing: str = "evaluating"
) -> EvalMemory:
    """The fastest way to keep within a limit; BadRecipe with what is needed where there is none.

    First hidden states lie in a file, then heads are held as they are stored, then not at all. `batches` are
    numbers of tokens to try in turn, where figures may differ by rounding. Where a limit that is not strict
    is too small, all of that is done.
    """
    sizes = [replace(work, batch_tokens=tokens) for tokens in batches] or [work]
    ways = [(each, form, holds) for each in sizes for form in HeadForm for holds in (True, False)]
    choices = [_needs(each, limit, form, holds) for each, form, holds in ways]
    least = choices[-1]
    limit.check(least.peak - limit.process, doing)
    return next((each for each in choices if each.peak <= limit.memory), least)


def _needs(work: EvalWork, limit: MemoryLimit, heads: HeadForm, holds_states: bool) -> EvalMemory:
    states = work.states if holds_states else 0
    kept = LIBRARIES + work.tokens * _SCORES_OF_A_TOKEN * work.tracks + states
    layer = max(model.layer + max(model.reading, _batch(work, model)) for model in work.models)
    scoring = sum(model.heads[heads] for model in work.models) + _scoring(work)
    return EvalMemory(
        asked=limit.memory,
        process=limit.process,
        layer=round(SLACK * layer) + kept,
        scoring=round(SLACK * scoring) + kept,
        heads=heads,
        holds_states=holds_states,
        states=work.states,
        weights=sum(model.weights for model in work.models),
        part=work.part,
        batch_tokens=work.batch_tokens,
    )


def _batch(work: EvalWork, model: ModelBytes) -> float:
    """The activations of a batch in a layer, and blocks of weights that are decoded."""
    of_windows = np.broadcast_to(np.int64(0), (1, work.window))
    run = Work(model.config, Calibration(of_windows, shift=False))
    saved = Savings(work.batch)
    taken = max(activations(run, saved, attention=attention) for attention in (True, False))
    rounding = 3 * work.batch * max(run.inner, run.widths[-1]) * _FLOAT if work.rounds else 0
    return taken + rounding + 2 * SCRATCH_BYTES


def _scoring(work: EvalWork) -> float:
    """Hidden states of a batch, read and normalised, and blocks of logits with their exponentials."""
    width = max(model.config.hidden for model in work.models)
    logits = BLOCK_ELEMENTS["cpu"] * _FLOAT * (2 + 2 * work.tracks)
    saved = _SAVED_BYTES if work.saves else 0
    return work.batch * width * _FLOAT * 3 * work.tracks + logits + saved + 2 * SCRATCH_BYTES
