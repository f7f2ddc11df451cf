"""Runs one backward pass through a model, a layer at a time, with the activations on disk.

Forwards, every layer's input is stored. At the top a word is sampled for each position and the gradient of
its log-probability taken; then each layer, the last first, is computed again from its stored input and
followed back. The peak is one layer's weights and one batch of windows with its activations; every weight is
read twice. Legend: W windows, B of them at once, T tokens, D hidden width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.activation_file import ActivationFile, activation_file
from qconvert.calibrate.gradients import Gradients, GradientSums, OutputGradients, TableGradients
from qconvert.calibrate.sampled_gradient import sample_gradient
from qconvert.core.statistics import StatisticsKey
from qconvert.errors import CheckFailed
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey, Observer, Tap
from qconvert.runtime.precision import exact_products
from qconvert.runtime.reverse import GradientObserver, differentiable

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens that visit a layer together, unless one window has more."""

Progress = Callable[[int, int], None]
"""Told (tokens done, those in all), each counted once for every visit of a layer."""


def measure_gradients(
    decoder: Decoder,
    tokens_WT: Tensor,
    *,
    seed: int = 0,
    scratch: Path,
    block_rows: int | None = None,
    stored_as: torch.dtype = torch.float32,
    keep: Callable[[StatisticsKey, OutputGradients], OutputGradients] = lambda key, found: found,
    observe: Observer | None = None,
    batch_tokens: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Gradients:
    """What a backward pass over windows of tokens, int64 [W, T], finds of every linear and table.

    The decoder computes in float32, its layers best loaded on demand. `scratch` is a folder for
    W T D (L + 1) numbers, float32 or bfloat16 (`stored_as`); `block_rows` as in `GradientSums`. What `keep`
    makes of a linear's gradients is kept until the end: the same without what it stored elsewhere, say.
    `observe` sees the input of every linear, once; `batch_tokens` visit a layer together, BATCH_TOKENS where
    none are asked for. The same seed, tokens and machine give the same bytes. Raises QConvertError where the
    disk is too small, CheckFailed for hidden states that are no numbers.
    """
    with backward_pass(
        decoder,
        tokens_WT,
        seed=seed,
        scratch=scratch,
        stored_as=stored_as,
        batch_tokens=batch_tokens,
        progress=progress,
    ) as run:
        run.forward()
        linears: dict[StatisticsKey, OutputGradients] = {}
        with decoder.observing(observe) if observe is not None else nullcontext():
            head = run.top()
            for layer in reversed(range(len(decoder.layers))):
                sums = GradientSums(block_rows)
                run.follow(layer, sums)
                linears |= {key: keep(key, found) for key, found in sums.means(tokens_WT.numel())}
        return Gradients(tokens_WT.numel(), seed, linears, run.tables(head))


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Sums over all tokens that the top of the model gives, and the words that were sampled [W, T]."""

    curvature_V: Tensor
    squares_D: Tensor
    words_WT: Tensor


@dataclass(slots=True)
class BackwardPass:
    """The steps of a backward pass: `forward`, `top`, then `follow` every layer, the last first; `tables`.

    Slot i of `file` holds the input of layer i, the last slot the output of the last layer; each is
    overwritten by the gradient to it.
    """

    decoder: Decoder
    tokens_WT: Tensor
    uniform_WT: Tensor
    file: ActivationFile
    batch: int
    progress: Progress
    done: int = field(default=0)

    def forward(self) -> None:
        """Compute and store every layer's input, and the output of the last."""
        decoder = self.decoder
        with torch.no_grad(), exact_products():
            for first, tokens_BT in self._batches():
                self.file.write(0, first, decoder.embedded(tokens_BT.to(decoder.device)))
            for i in range(len(decoder.layers)):
                layer = decoder.layers[i]
                for first, x_BTD in self._stored(i):
                    self.file.write(i + 1, first, layer(x_BTD, self._rotations, None))
                    self._tell(x_BTD)

    def top(self) -> HeadSums:
        """Sample a word everywhere, and store the gradient to the output of the last layer.

        Observers of the decoder see what the head reads, under the role `lm_head`.
        """
        decoder, last = self.decoder, len(self.decoder.layers)
        curvature_V = torch.zeros(decoder.head.shape[0], dtype=torch.float64, device=decoder.device)
        squares_D = torch.zeros(decoder.config.hidden, dtype=torch.float64, device=decoder.device)
        words: list[Tensor] = []
        with exact_products():
            for first, x_BTD in self._stored(last):
                x_BTD.requires_grad_()
                h_BTD = decoder.normalised(x_BTD)
                uniform_BT = self.uniform_WT[first : first + len(x_BTD)].to(decoder.device)
                Tap(InputKey(("lm_head",)), decoder.observers.linears).show(h_BTD)
                with torch.no_grad():
                    found = sample_gradient(decoder.outputs(h_BTD.flatten(0, 1)), uniform_BT.flatten())
                    squares_D += h_BTD.flatten(0, 1).square().sum(0)
                _check_finite(squares_D)
                curvature_V += found.curvature_V
                words.append(found.words_N.view(uniform_BT.shape).cpu())
                g_BTD = torch.autograd.grad(h_BTD, x_BTD, found.g_ND.view_as(h_BTD))[0]
                self.file.write(last, first, g_BTD)
                self._tell(x_BTD)
        return HeadSums(curvature_V, squares_D, torch.cat(words))

    def follow(self, i: int, observer: GradientObserver) -> None:
        """Follow the gradient back through layer i, batch by batch.

        Before the observer sees the gradients of a batch, observers of the decoder see its inputs, once.
        """
        layer = differentiable(self.decoder.layers[i], observer)
        with exact_products():
            for first, x_BTD in self._stored(i):
                x_BTD.requires_grad_()
                y_BTD = layer(x_BTD, self._rotations, None)
                g_BTD = self._read(i + 1, first, len(x_BTD))
                self.file.write(i, first, torch.autograd.grad(y_BTD, x_BTD, g_BTD)[0])
                self._tell(x_BTD)

    def tables(self, head: HeadSums) -> TableGradients:
        """What the pass found of embedding and head, once it is through the first layer."""
        hidden = self.decoder.config.hidden
        total, squares_D = self.tokens_WT.numel(), torch.zeros(hidden, dtype=torch.float64)
        for first, tokens_BT in self._batches():
            squares_D += self.file.read(0, first, len(tokens_BT))[..., :hidden].flatten(0, 1).square().sum(0)
        return TableGradients(
            counts_V=np.bincount(self.tokens_WT.flatten().numpy(), minlength=self.decoder.config.vocab),
            embedding_D=_float32(squares_D * self.decoder.embed_scale**2 / total),
            head_V=_float32(head.curvature_V / total),
            head_inputs_D=_float32(head.squares_D / total),
        )

    @property
    def _rotations(self) -> list[tuple[Tensor, Tensor]]:
        return self.decoder.rotations(0, self.tokens_WT.shape[1])

    def _batches(self) -> Iterator[tuple[int, Tensor]]:
        return ((i, self.tokens_WT[i : i + self.batch]) for i in range(0, len(self.tokens_WT), self.batch))

    def _stored(self, slot: int) -> Iterator[tuple[int, Tensor]]:
        return ((first, self._read(slot, first, len(tokens))) for first, tokens in self._batches())

    def _read(self, slot: int, first: int, count: int) -> Tensor:
        return self.file.read(slot, first, count).to(self.decoder.device)

    def _tell(self, x_BTD: Tensor) -> None:
        self.done += x_BTD[..., 0].numel()
        self.progress(self.done, (2 * len(self.decoder.layers) + 1) * self.tokens_WT.numel())


@contextmanager
def backward_pass(
    decoder: Decoder,
    tokens_WT: Tensor,
    *,
    seed: int = 0,
    scratch: Path,
    stored_as: torch.dtype = torch.float32,
    batch_tokens: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Iterator[BackwardPass]:
    """A backward pass to be taken layer by layer; the arguments are those of `measure_gradients`."""
    windows, length = tokens_WT.shape
    generator = torch.Generator().manual_seed(seed)
    uniform_WT = torch.rand(windows, length, generator=generator, dtype=torch.float64)
    most = batch_tokens or BATCH_TOKENS.get(decoder.device.type, BATCH_TOKENS["cpu"])
    slots, width = len(decoder.layers) + 1, decoder.config.stream
    with activation_file(scratch, slots, windows, length, width, stored_as) as file:
        yield BackwardPass(decoder, tokens_WT, uniform_WT, file, max(1, most // length), progress)


def _check_finite(squares_D: Tensor) -> None:
    """Raise CheckFailed for sums of squares of hidden states that are no numbers."""
    if not squares_D.isfinite().all():
        raise CheckFailed(
            "hidden states of the calibration text: NaN or Inf",
            "`qconvert check` finds weights that are NaN or Inf; or give another text",
        )


def _float32(x: Tensor) -> np.ndarray:
    array: np.ndarray = x.float().cpu().numpy()
    return array
