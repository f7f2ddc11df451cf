"""Several models over the same windows of tokens, batch by batch, keeping a few numbers per token.

Running in lockstep is what makes comparisons paired, and spares storing one model's logits (300 KB
per token) for the other to be compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qconvert.errors import CheckFailed
from qconvert.evaluate.protocols import Window
from qconvert.evaluate.records import Origin
from qconvert.runtime.model import Decoder
from qconvert.runtime.scoring import Outputs, Scores, score_hidden

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens per visit of a layer: on a GPU, dequantizing its weights then costs 1.4 % of the time."""

Progress = Callable[[int, int], None]
"""Told (windows done, windows in all) after every batch."""

_HOPELESS_NATS = 700.0
"""A mean loss whose exponential would overflow; no model, however bad, comes near it."""


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A model to measure: what to call it, its decoder, what it weighs on disk, and where it lies.

    Without a `path`, its tokenizer is taken to be that of the others.
    """

    label: str
    decoder: Decoder
    size_bytes: int
    bits_per_weight: float
    path: Path | None = None
    origin: Origin | None = None


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
    """A model's scores as they come in, and the time its layers took.

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

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Hidden states of a batch, timed."""
        decoder = self.model.decoder
        tokens_BT = tokens_BT.to(decoder.device)
        begin = time.perf_counter()
        if not self.echo:
            h_BTD = decoder.hidden(tokens_BT)
        elif len(tokens_BT) == 1:  # beside a copy of itself
            h_BTD = decoder.hidden(tokens_BT.repeat(2, 1))[:1]
        else:  # windows one by one
            h_BTD = torch.cat([decoder.hidden(row_T[None]) for row_T in tokens_BT])
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        self.seconds += time.perf_counter() - begin
        self.tokens += tokens_BT.numel()
        return h_BTD


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
) -> int:
    """Fill the tracks with the scores of the tokens that count, in the order of the windows.

    If `compared`, the first track is the reference of the others' divergences. `bos` replaces the
    first token of every window; the tracks already hold the first `done` windows. A `saved` reference takes
    the place of a first track; a `recorder` is given what the first track says. Returns the number
    of windows they hold at the end: fewer than all after a KeyboardInterrupt, which is passed on
    when there is nothing new to show. Raises CheckFailed for a model whose loss is no number.
    """
    device = tracks[0].model.decoder.device.type
    batch_tokens = batch_tokens or BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
    held, before = len(tracks[0].nll), done
    try:
        for batch in _batches(windows[done:], batch_tokens):
            tokens_BT = np.stack([ids_N[window.start : window.stop] for window in batch])
            if bos is not None:
                tokens_BT[:, 0] = bos
            hear = _Scoring(compared, saved, recorder, sum(w.stop - w.scored for w in windows[:done]))
            _score_batch(tracks, torch.from_numpy(tokens_BT), batch[0].scored - batch[0].start, hear)
            done, held = done + len(batch), held + 1
            if progress is not None:
                progress(done, len(windows))
    except KeyboardInterrupt:
        if done == before:
            raise
        for track in tracks:
            for scores in (track.nll, track.top, track.kl):
                del scores[held:]  # those of a batch that not all tracks have seen
    return done


def _batches(windows: Sequence[Window], tokens: int) -> Iterator[list[Window]]:
    """Runs of neighbouring windows of one shape, of at most that many tokens (but one window at least)."""
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


def _score_batch(tracks: Sequence[Track], tokens_BT: Tensor, scored: int, scoring: _Scoring) -> None:
    """Run every model over a batch and score its tokens from position `scored` on."""
    models: list[Outputs] = []
    for track in tracks:
        h_ND = track.hidden(tokens_BT)[:, scored - 1 : -1].flatten(0, 1)
        models.append(track.model.decoder.outputs(h_ND))
    targets_N = tokens_BT[:, scored:].flatten().to(tracks[0].model.decoder.device)
    for track, each in zip(tracks, scoring.scores(models, targets_N), strict=True):
        loss = float(each.nll_N.mean())
        if not loss < _HOPELESS_NATS:
            raise CheckFailed(
                f"{track.model.label}: a loss of {loss} nats per token within {track.tokens} tokens",
                "try --dtype f32; if that ends so too, the weights are damaged",
            )
        track.nll.append(each.nll_N.cpu().numpy())
        track.top.append(each.top_N.cpu().numpy())
        if each.kl_N is not None:
            track.kl.append(each.kl_N.cpu().numpy())
