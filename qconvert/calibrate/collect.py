"""Collects statistics of what every linear reads, by running a model over windows of tokens.

Layer by layer: one layer's weights are in memory at a time where the decoder reads them on demand, and the
activations between two layers are a file where they are large. Windows never see one another. Legend: B
windows, T tokens of a window, D hidden, N rows, I in features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.moment_sums import MomentSums
from qconvert.calibrate.moments import InputStatistics
from qconvert.calibrate.text import check_tokens
from qconvert.core.statistics import InputKey
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.model import Decoder
from qconvert.runtime.precision import exact_products

Progress = Callable[[int, int], None]
"""Called with the tokens done and those to do, each counted once per layer."""
BATCH_BYTES = 256 << 20
IN_MEMORY_BYTES = 1 << 30


def collect_statistics(
    decoder: Decoder, tokens_BT: np.ndarray, progress: Progress | None = None
) -> InputStatistics:
    """Sums, sums of squares and counts of the inputs of every linear over windows of tokens, int64 [B, T].

    An expert's are of the rows routed to it; the head's, of all positions. Raises BadRecipe for windows
    longer than the model's positions and tokens beyond its vocabulary, QConvertError where an input is not
    finite.
    """
    config = decoder.config
    check_tokens(tokens_BT, config.max_positions, config.vocab)
    sums = MomentSums()
    with decoder.observing(sums), _activations(decoder, tokens_BT.shape) as x_BTD:
        _run(decoder, torch.from_numpy(tokens_BT), x_BTD, sums, progress or (lambda done, total: None))
    return sums.statistics(config.shapes, tokens_BT, config.vocab)


@torch.inference_mode()
def _run(
    decoder: Decoder,
    tokens_BT: Tensor,
    x_BTD: Tensor,
    observe: Callable[[InputKey, Tensor], None],
    progress: Progress,
) -> None:
    """Compute every layer for all windows, batch by batch, in place."""
    window, layers, tokens = tokens_BT.shape[1], decoder.config.layers, tokens_BT.numel()
    size = max(1, BATCH_BYTES // (window * _bytes_per_token(decoder.config)))
    batches = [slice(at, at + size) for at in range(0, len(tokens_BT), size)]
    for batch in batches:
        x_BTD[batch] = decoder.embedded(tokens_BT[batch].to(decoder.device)).to(x_BTD.device)
    rotations = decoder.rotations(0, window)

    def through(i: int) -> None:  # a function, so that the layer goes before the next one comes
        layer = decoder.layers[i]
        for batch in batches:
            x_BTD[batch] = layer(x_BTD[batch].to(decoder.device), rotations, None).to(x_BTD.device)
            progress(i * tokens + min(batch.stop, len(tokens_BT)) * window, layers * tokens)

    with exact_products():
        for i in range(layers):
            through(i)
    for batch in batches:
        h_BTD = decoder.norm(x_BTD[batch].to(decoder.device))
        observe(InputKey(("lm_head",)), h_BTD.reshape(-1, h_BTD.shape[-1]))


def _bytes_per_token(config: DecoderConfig) -> int:
    """About what a layer holds of a token in float32: a few rows of the hidden width, three of the MLP's."""
    return 4 * (8 * config.hidden + 3 * max(shape[0] for key, shape in config.shapes.items() if key[1] == 0))


@contextmanager
def _activations(decoder: Decoder, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Room for the hidden states of all windows, [B, T, D]: in memory, or in a file where they are large."""
    count = prod(shape) * decoder.config.hidden
    if count * decoder.dtype.itemsize <= IN_MEMORY_BYTES:
        yield torch.empty((*shape, decoder.config.hidden), dtype=decoder.dtype)
        return
    with NamedTemporaryFile(prefix="qconvert-activations-") as file:
        x_N = torch.from_file(file.name, shared=True, size=count, dtype=decoder.dtype)
        yield x_N.view(*shape, decoder.config.hidden)
