"""Runs windows of tokens through a model layer by layer, so that each layer is read once for all of them.

Between two layers the hidden states of all tokens lie in memory or in a file. Batches are what visits a layer
together: of the same batches, hidden states are those of `Decoder.hidden`, bit for bit.
Legend: B windows of a batch, T tokens of a window, N tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from qconvert.runtime.model import Decoder
from qconvert.runtime.precision import exact_products

Passed = Callable[[int, int], None]
"""Told (tokens passed, those to pass), each counted once for every layer."""
Step = Callable[[Tensor], Tensor]
Through = Callable[[Step, Tensor], Tensor]
"""Applies a step to a batch, [B, ...] to [B, ...]: at once, or in batches of another size."""


class HiddenStates(Protocol):
    """Where the hidden states of all tokens lie, one token after the other."""

    def read(self, first: int, count: int) -> Tensor:
        """Those of `count` tokens from the `first` on, [N, D] of any float dtype; not to be written to."""
        ...

    def write(self, first: int, x_ND: Tensor) -> None:
        """Store those of the tokens from the `first` on."""
        ...


@dataclass(frozen=True, slots=True)
class HeldStates:
    """Hidden states in memory."""

    x_ND: Tensor

    @staticmethod
    def empty(tokens: int, width: int, dtype: torch.dtype) -> HeldStates:
        """Room for so many tokens."""
        return HeldStates(torch.empty(tokens, width, dtype=dtype))

    def read(self, first: int, count: int) -> Tensor:
        """Those of `count` tokens from the `first` on."""
        return self.x_ND[first : first + count]

    def write(self, first: int, x_ND: Tensor) -> None:
        """Store those of the tokens from the `first` on."""
        self.x_ND[first : first + len(x_ND)] = x_ND


def at_once(step: Step, x: Tensor) -> Tensor:
    """Apply a step to a whole batch."""
    return step(x)


@torch.inference_mode()
def pass_layers(
    decoder: Decoder,
    batches: Sequence[Tensor],
    states: HiddenStates,
    *,
    passed: Passed = lambda done, total: None,
    through: Through = at_once,
) -> None:
    """Leave in `states` what the last layer gives for batches of tokens, int64 [B, T] each.

    The layers of the decoder are best loaded on demand: one is held at a time, and read once.
    """
    tokens, lengths = sum(batch.numel() for batch in batches), {batch.shape[1] for batch in batches}
    rotations = {length: decoder.rotations(0, length) for length in lengths}
    first = 0
    for tokens_BT in batches:
        x_BTD = through(decoder.embedded, tokens_BT.to(decoder.device))
        states.write(first, x_BTD.flatten(0, 1))
        first += tokens_BT.numel()

    def visit(i: int) -> None:  # a function, so that the layer goes before the next one comes
        layer, first = decoder.layers[i], 0
        for x_BTD in states_of(decoder, batches, states):
            step = partial(layer, rotations=rotations[x_BTD.shape[1]], cache=None)
            y_BTD = through(step, x_BTD)
            states.write(first, y_BTD.flatten(0, 1))
            first += y_BTD[..., 0].numel()
            passed(i * tokens + first, len(decoder.layers) * tokens)

    with exact_products():
        for i in range(len(decoder.layers)):
            visit(i)


def states_of(decoder: Decoder, batches: Sequence[Tensor], states: HiddenStates) -> Iterator[Tensor]:
    """The hidden states of one batch after the other, [B, T, D] in the compute dtype."""
    first = 0
    for tokens_BT in batches:
        x_ND = states.read(first, tokens_BT.numel()).to(decoder.device, decoder.dtype)
        yield x_ND.view(*tokens_BT.shape, -1)
        first += tokens_BT.numel()
