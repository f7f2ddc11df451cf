"""Measures what the errors of weights cost: one backward pass, a layer's linears and inputs at a time.

Legend: W windows of a text, T tokens of a window, N rows of an input, I in features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.backward import Progress, backward_pass
from qconvert.calibrate.gradients import GradientSums
from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.calibrate.row_samples import RowSampler
from qconvert.calibrate.savings import NOTHING_SAVED, Savings
from qconvert.calibrate.sensitivity import SecondMoments, Sensitivity, sensitivity_of_tables
from qconvert.calibrate.text import check_tokens
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import Streaming
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey
from qconvert.runtime.reverse import GradientObserver

HESSIAN_BYTES = 1 << 30
"""What the Hessians of one layer's inputs may take; an input that has no room has its diagonal."""


MOST_SAMPLES = 4096
"""Tokens whose inputs and gradients are kept of a layer: a relative error of sqrt(2 / 4096) = 2 %, more where
few tokens have most of the loss."""
HELD_OUT_OF = 8
"""One token of so many is held out of Hessians, and is a sample, where codes are to be chosen for them."""


@dataclass(slots=True)
class SecondMomentSums:
    """Sums of x x^T over the inputs that observers see, those of a layer's experts as one.

    Where all Hessians together would take more than `most_bytes`, those that come last are diagonals. Rows
    that the `sampler` takes are in no sum if it `holds` them out.
    """

    most_bytes: int = HESSIAN_BYTES
    sampler: RowSampler | None = None
    holds: bool = False
    hessians: dict[InputKey, Tensor] = field(default_factory=dict)
    squares: dict[InputKey, Tensor] = field(default_factory=dict)
    rows: dict[InputKey, int] = field(default_factory=dict)

    def __call__(self, key: InputKey, x_NI: Tensor) -> None:
        """Take in the rows of one batch."""
        rows_S = None if self.sampler is None else self.sampler.take(key, x_NI)
        key, x_NI = InputKey(key.roles, key.layer), x_NI.float()
        if key not in self.rows:
            self._start(key, x_NI)
        if self.holds and rows_S is not None:
            kept_N = torch.ones(len(x_NI), dtype=torch.bool, device=x_NI.device)
            kept_N[rows_S] = False
            x_NI = x_NI[kept_N]
        self.rows[key] += len(x_NI)
        self.squares[key] += x_NI.square().sum(0)
        if key in self.hessians:
            self.hessians[key].addmm_(x_NI.T, x_NI)

    def _start(self, key: InputKey, x_NI: Tensor) -> None:
        width = x_NI.shape[1]
        taken = sum(each.nbytes for each in self.hessians.values())
        if taken + 4 * width * width <= self.most_bytes:
            self.hessians[key] = x_NI.new_zeros(width, width)
        self.squares[key] = torch.zeros(width, dtype=torch.float64, device=x_NI.device)
        self.rows[key] = 0

    def moments(self) -> dict[str, SecondMoments]:
        """The means, for every role that reads the input; Hessians are used up."""
        found: dict[str, SecondMoments] = {}
        for key, rows in self.rows.items():
            hessian_II = self.hessians.pop(key, None)
            held_NI = self.sampler.inputs_of(key.roles[0]) if self.sampler and self.holds else None
            moments = SecondMoments(
                (self.squares[key] / max(1, rows)).float().cpu().numpy(),
                None if hessian_II is None else hessian_II.div_(max(1, rows)).cpu().numpy(),
                None if held_NI is None else held_NI.numpy(),
            )
            found |= dict.fromkeys(key.roles, moments)
        return found


def sensitivities_of(
    checkpoint: Checkpoint,
    tokens_WT: np.ndarray,
    *,
    seed: int = 0,
    scratch: Path | None = None,
    most_bytes: int = HESSIAN_BYTES,
    holds: bool = False,
    savings: Savings = NOTHING_SAVED,
    progress: Progress = lambda done, total: None,
) -> Iterator[Sensitivity]:
    """Run a model backwards over windows of tokens, int64 [W, T], its layers read as they are needed.

    Activations lie in `scratch`, by default the folder of temporary files; of the `savings` those of a
    backward pass count, to fit a memory; the rest is as in
    `sensitivities`. Raises UnsupportedModel for a family that is not run here, BadRecipe for windows longer
    than the model's positions and tokens beyond its vocabulary.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    check_tokens(tokens_WT, config.max_positions, config.vocab)
    streaming = Streaming.EVERYTHING if savings.streamed else Streaming.NOTHING
    yield from sensitivities(
        layer_by_layer(checkpoint, streaming=streaming),
        torch.from_numpy(tokens_WT),
        seed=seed,
        scratch=scratch or Path(gettempdir()),
        most_bytes=most_bytes,
        holds=holds,
        batch_tokens=savings.backward_tokens,
        progress=progress,
    )


def sensitivities(
    decoder: Decoder,
    tokens_WT: Tensor,
    *,
    seed: int = 0,
    scratch: Path,
    most_bytes: int = HESSIAN_BYTES,
    holds: bool = False,
    batch_tokens: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Iterator[Sensitivity]:
    """What a backward pass finds of every layer, the last first, then of the tables.

    One layer's weights, samples and Hessians are held at a time, the latter two of at most `most_bytes`
    together; with `holds`, Hessians are of the tokens that are no samples. The rest is as in
    `backward.measure_gradients`.
    """
    total, room = tokens_WT.numel(), most_bytes // 2 if holds else most_bytes
    every = _samples_of(decoder.config, total, room, holds=holds)
    with backward_pass(
        decoder, tokens_WT, seed=seed, scratch=scratch, batch_tokens=batch_tokens, progress=progress
    ) as run:
        run.forward()
        at_head = (
            SecondMomentSums(most_bytes, RowSampler(HELD_OUT_OF), holds)
            if holds
            else SecondMomentSums(most_bytes)
        )
        with decoder.observing(at_head):
            head = run.top()
        for layer in reversed(range(len(decoder.layers))):
            sampler, gradients = RowSampler(every), GradientSums()
            inputs = SecondMomentSums(room if holds else 0, sampler, holds)
            with decoder.observing(inputs):
                run.follow(layer, partial(_show, (gradients, sampler)))
            squares = {key: each.squares_O for key, each in gradients.means(total)}
            yield Sensitivity(layer, squares, inputs.moments(), sampler.samples(layer, total))
        tables = run.tables(head)
        yield sensitivity_of_tables(tables, at_head.moments()["lm_head"])


def _show(observers: Sequence[GradientObserver], key: StatisticsKey, g_NO: Tensor) -> None:
    for observe in observers:
        observe(key, g_NO)


def _samples_of(config: DecoderConfig, tokens: int, most_bytes: int, *, holds: bool) -> int:
    """One token of how many is a sample: as many of them as are wanted, and as have room."""
    experts = {role for role, _, _ in config.shapes if ".experts." in role and role.endswith(".down")}
    routed = config.experts.per_token / len(experts) if config.experts and experts else 1.0
    widths: Counter[int | None] = Counter()
    for (role, layer, _), shape in config.shapes.items():
        if layer is not None and len(shape) == 2:
            widths[layer] += int(sum(shape) * (routed if ".experts." in role else 1))
    room = most_bytes // (4 * max(widths.values()))
    every = -(-tokens // max(1, min(MOST_SAMPLES, room)))
    return max(HELD_OUT_OF, every) if holds else every
