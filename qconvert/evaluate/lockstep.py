"""Several models over the same windows of tokens, batch by batch, keeping a few numbers per token.

Running in lockstep is what makes comparisons paired, and spares storing one model's logits (300 KB
per token) for the other to be compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qconvert.errors import CheckFailed
from qconvert.evaluate.model_bytes import ModelBytes
from qconvert.evaluate.protocols import Window
from qconvert.evaluate.records import Origin
from qconvert.runtime.layer_passes import Step
from qconvert.runtime.model import Decoder
from qconvert.runtime.scoring import Outputs, Scores, score_hidden

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens per visit of a layer: on a GPU, dequantizing its weights then costs 1.4 % of the time."""

Progress = Callable[[float, int], None]
"""Told (windows done, windows in all) after every batch, or in parts of windows after every layer."""

_HOPELESS_NATS = 700.0
"""A mean loss whose exponential would overflow; no model, however bad, comes near it."""


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A model to measure: what to call it, its decoder, what it weighs on disk, and where it lies.

    Without a `path`, its tokenizer is taken to be that of the others. `activations` are the inputs of its
    linears, in words. Of one whose layers are read in turn, `nbytes` says what they take.
    """

    label: str
    decoder: Decoder
    size_bytes: int
    bits_per_weight: float
    path: Path | None = None
    origin: Origin | None = None
    activations: str = "exact"
    nbytes: ModelBytes | None = None


class SavedScores(Protocol):
    """A reference that was run before: it scores models against what it said of the same tokens."""

    def score(self, models: Sequence[Outputs], targets_N: Tensor, first: int) -> list[Scores]:
        """The scores of models on the tokens that count from the `first` on."""
        ...


class Recorder(Protocol):
    """Keeps what a reference says of every token that counts."""

    def add(self, outputs: Outputs, first: int) -> None:
        """Take in the tokens that count from the `first` on."""
        ...


@dataclass(slots=True)
class Track:
    """A model's scores as they come in, and the time its layers took, reading them included.

    An `echo` reads the same windows in batches of another size: run beside the plain track of its
    model, it shows what rounding alone makes of the figures.
    """

    model: EvalModel
    echo: bool = False
    seconds: float = 0.0
    tokens: int = 0
    nll: list[np.ndarray] = field(default_factory=list)
    top: list[np.ndarray] = field(default_factory=list)
    kl: list[np.ndarray] = field(default_factory=list)

    def through(self, step: Step, x: Tensor) -> Tensor:
        """Apply a step to a batch, [B, ...] to [B, ...]; of an echo, to batches of another size."""
        if not self.echo:
            return step(x)
        if len(x) == 1:  # beside a copy of itself
            return step(torch.cat((x, x)))[:1]
        return torch.cat([step(row[None]) for row in x])  # windows one by one

    @contextmanager
    def timed(self, tokens: int) -> Iterator[None]:
        """Count the time inside as that of the model's layers on so many tokens."""
        device = self.model.decoder.device
        begin = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - begin
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one shape that visit a layer together, their tokens int64 [B, T], and those that count."""

    windows: Sequence[Window]
    tokens_BT: Tensor

    @property
    def scored(self) -> slice:
        """The positions whose hidden states predict the tokens that count."""
        return slice(self._first - 1, -1)

    def targets(self, device: torch.device) -> Tensor:
        """The tokens that count, int64 [N]."""
        return self.tokens_BT[:, self._first :].flatten().to(device)

    @property
    def _first(self) -> int:
        return self.windows[0].scored - self.windows[0].start


Tell = Callable[[float], None]
"""Told how many of the windows at hand are done, in parts where one is not finished."""


class Run(Protocol):
    """A way to run models over batches of windows."""

    def __call__(
        self, tracks: Sequence[Track], batches: Sequence[Batch], tell: Tell
    ) -> Iterator[list[Outputs]]:
        """What every track says of one batch after the other, of the positions that are scored."""
        ...


def run_in_memory(tracks: Sequence[Track], batches: Sequence[Batch], tell: Tell) -> Iterator[list[Outputs]]:
    """Run whole models, a batch at a time."""

    def outputs(track: Track, batch: Batch) -> Outputs:
        decoder = track.model.decoder
        with track.timed(batch.tokens_BT.numel()):
            h_BTD = track.through(decoder.hidden, batch.tokens_BT.to(decoder.device))
        return decoder.outputs(h_BTD[:, batch.scored].flatten(0, 1))

    done = 0
    for batch in batches:
        yield [outputs(track, batch) for track in tracks]
        done += len(batch.windows)
        tell(done)


def run_lockstep(
    tracks: Sequence[Track],
    ids_N: np.ndarray,
    windows: Sequence[Window],
    *,
    compared: bool,
    bos: int | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    done: int = 0,
    saved: SavedScores | None = None,
    recorder: Recorder | None = None,
    run: Run = run_in_memory,
) -> int:
    """Fill the tracks with the scores of the tokens that count, in the order of the windows.

    If `compared`, the first track is the reference of the others' divergences. `bos` replaces the
    first token of every window; the tracks already hold the first `done` windows. A `saved` reference takes
    the place of a first track; a `recorder` is given what the first track says; `run` is how models are run.
    Returns the number of windows they hold at the end: fewer than all after a KeyboardInterrupt, which is
    passed on when there is nothing new to show. Raises CheckFailed for a model whose loss is no number.
    """
    held, before = len(tracks[0].nll), done

    def tell(passed: float) -> None:
        if progress is not None:
            progress(before + passed, len(windows))

    batches = [_batch(each, ids_N, bos) for each in batches_of(tracks, windows[done:], batch_tokens)]
    try:
        for outputs, batch in zip(run(tracks, batches, tell), batches, strict=True):
            hear = _Scoring(compared, saved, recorder, sum(w.stop - w.scored for w in windows[:done]))
            _score_batch(tracks, outputs, batch.targets(tracks[0].model.decoder.device), hear)
            done, held = done + len(batch.windows), held + 1
            outputs.clear()  # before the next ones come
    except KeyboardInterrupt:
        if done == before:
            raise
        for track in tracks:
            for scores in (track.nll, track.top, track.kl):
                del scores[held:]  # those of a batch that not all tracks have seen
    return done


def _batch(windows: Sequence[Window], ids_N: np.ndarray, bos: int | None) -> Batch:
    tokens_BT = np.stack([ids_N[window.start : window.stop] for window in windows])
    if bos is not None:
        tokens_BT[:, 0] = bos
    return Batch(windows, torch.from_numpy(tokens_BT))


def batches_of(
    tracks: Sequence[Track], windows: Sequence[Window], batch_tokens: int | None
) -> Iterator[list[Window]]:
    """Runs of neighbouring windows of one shape, of at most that many tokens (but one window at least).

    Without a number, as many as the device of the tracks takes at once.
    """
    device = tracks[0].model.decoder.device.type
    tokens = batch_tokens or BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
    batch: list[Window] = []
    for window in windows:
        room = tokens // (window.stop - window.start)
        if batch and (len(batch) >= room or _shape(window) != _shape(batch[0])):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _shape(window: Window) -> tuple[int, int]:
    return window.stop - window.start, window.scored - window.start


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What the scores of a batch are compared with; `first` counts the scored tokens before it."""

    compared: bool
    saved: SavedScores | None
    recorder: Recorder | None
    first: int

    def scores(self, models: Sequence[Outputs], targets_N: Tensor) -> list[Scores]:
        if self.recorder is not None:
            self.recorder.add(models[0], self.first)
        if self.saved is not None:
            return self.saved.score(models, targets_N, self.first)
        groups = [models] if self.compared else [[model] for model in models]
        return [each for group in groups for each in score_hidden(group, targets_N)]


def _score_batch(
    tracks: Sequence[Track], outputs: Sequence[Outputs], targets_N: Tensor, scoring: _Scoring
) -> None:
    """Score what every model says of the tokens of a batch that count."""
    for track, each in zip(tracks, scoring.scores(outputs, targets_N), strict=True):
        loss = float(each.nll_N.mean())
        if not loss < _HOPELESS_NATS:
            raise CheckFailed(
                f"{track.model.label}: a loss of {loss} nats per token within {track.tokens} tokens",
                "try --dtype f32; if that fails too, the weights are damaged",
            )
        track.nll.append(each.nll_N.cpu().numpy())
        track.top.append(each.top_N.cpu().numpy())
        if each.kl_N is not None:
            track.kl.append(each.kl_N.cpu().numpy())
