"""Measures what the errors of weights cost: one backward pass, a layer's linears and inputs at a time.

Legend: W windows of a text, T tokens of a window, N rows of an input, I in features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.backward import Progress, backward_pass
from qconvert.calibrate.gradients import GradientSums
from qconvert.calibrate.input_sums import MOST_HELD
from qconvert.calibrate.sensitivity import SecondMoments, Sensitivity, sensitivity_of_tables
from qconvert.calibrate.text import check_tokens
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey

HESSIAN_BYTES = 1 << 30
"""What the Hessians of one layer's inputs may take; an input that has no room has its diagonal."""


HELD_OUT_OF = 8
"""One row of so many is held out of Hessians, where codes are to be chosen for them; the last of a batch."""


@dataclass(slots=True)
class SecondMomentSums:
    """Sums of x x^T over the inputs that observers see, those of a layer's experts as one.

    Where all Hessians together would take more than `most_bytes`, those that come last are diagonals. With
    `holds`, some rows are kept as they are and counted in no sum, at most MOST_HELD of each input.
    """

    most_bytes: int = HESSIAN_BYTES
    holds: bool = False
    hessians: dict[InputKey, Tensor] = field(default_factory=dict)
    squares: dict[InputKey, Tensor] = field(default_factory=dict)
    rows: dict[InputKey, int] = field(default_factory=dict)
    held: dict[InputKey, list[Tensor]] = field(default_factory=dict)

    def __call__(self, key: InputKey, x_NI: Tensor) -> None:
        """Take in the rows of one batch."""
        key, x_NI = InputKey(key.roles, key.layer), x_NI.float()
        if key not in self.rows:
            self._start(key, x_NI)
        if self.holds:
            room = MOST_HELD - sum(map(len, self.held[key]))
            x_NI, held_NI = x_NI.tensor_split([len(x_NI) - min(room, len(x_NI) // HELD_OUT_OF)])
            self.held[key].append(held_NI.cpu().clone())
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
        self.rows[key], self.held[key] = 0, []

    def moments(self) -> dict[str, SecondMoments]:
        """The means, for every role that reads the input."""
        found: dict[str, SecondMoments] = {}
        for key, rows in self.rows.items():
            hessian_II, held = self.hessians.get(key), self.held[key]
            held_NI = torch.cat(held).numpy() if held else np.empty((0, 0), np.float32)
            moments = SecondMoments(
                (self.squares[key] / max(1, rows)).float().cpu().numpy(),
                None if hessian_II is None else (hessian_II / max(1, rows)).cpu().numpy(),
                held_NI if len(held_NI) else None,
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
    progress: Progress = lambda done, total: None,
) -> Iterator[Sensitivity]:
    """Run a model backwards over windows of tokens, int64 [W, T], its layers read as they are needed.

    Activations lie in `scratch`, by default the folder of temporary files; the rest is as in
    `sensitivities`. Raises UnsupportedModel for a family that is not run here, BadRecipe for windows longer
    than the model's positions and tokens beyond its vocabulary.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    check_tokens(tokens_WT, config.max_positions, config.vocab)
    yield from sensitivities(
        load_decoder(config, CheckpointWeights(checkpoint), on_demand=True),
        torch.from_numpy(tokens_WT),
        seed=seed,
        scratch=scratch or Path(gettempdir()),
        most_bytes=most_bytes,
        holds=holds,
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
    progress: Progress = lambda done, total: None,
) -> Iterator[Sensitivity]:
    """What a backward pass finds of every layer, the last first, then of the tables.

    One layer's weights and Hessians are held at a time, those of at most `most_bytes`; `holds` is as in
    `SecondMomentSums`, the rest as in `backward.measure_gradients`.
    """
    with backward_pass(decoder, tokens_WT, seed=seed, scratch=scratch, progress=progress) as run:
        run.forward()
        at_head = SecondMomentSums(most_bytes, holds)
        with decoder.observing(at_head):
            head = run.top()
        for layer in reversed(range(len(decoder.layers))):
            inputs, gradients = SecondMomentSums(most_bytes, holds), GradientSums()
            with decoder.observing(inputs):
                run.follow(layer, gradients)
            means = gradients.means(tokens_WT.numel())
            squares = {key: each.squares_O for key, each in means.items()}
            yield Sensitivity(layer, squares, inputs.moments())
        tables = run.tables(head)
        yield sensitivity_of_tables(tables, at_head.moments()["lm_head"])
