"""Collects statistics of what every linear reads, by running a model over windows of tokens.

Layer by layer: one layer's weights are in memory at a time where the decoder reads them on demand, and the
activations between two layers are a file where they are large. Windows never see one another. Legend: B
windows, T tokens of a window, D hidden, N rows, I in features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.moments import InputMoments, InputStatistics
from qconvert.core.statistics import InputKey
from qconvert.errors import BadRecipe, QConvertError
from qconvert.formats.tokenizers.prompts import check_ids
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
    config, window = decoder.config, tokens_BT.shape[1]
    if window > config.max_positions:
        raise BadRecipe(
            f"window {window}: exceeds the {config.max_positions} positions of the model",
            f"take --window {config.max_positions} or less",
        )
    check_ids(int(tokens_BT.max()), config.vocab)
    found: dict[InputKey, _Sums] = {}

    def observe(key: InputKey, x_NI: Tensor) -> None:
        found.setdefault(key, _Sums(x_NI.shape[1])).add(key, x_NI)

    with decoder.observing(observe), _activations(decoder, tokens_BT.shape) as x_BTD:
        _run(decoder, torch.from_numpy(tokens_BT), x_BTD, observe, progress or (lambda done, total: None))
    inputs = {key: sums.moments for key, sums in found.items()}
    counts_V = np.bincount(tokens_BT.ravel(), minlength=config.vocab).astype(np.int64)
    return InputStatistics(inputs | dict(_unrouted(config, inputs)), counts_V)


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


class _Sums:
    """Running sums of one input, in float64."""

    def __init__(self, width: int) -> None:
        self.moments = InputMoments(np.zeros(width), np.zeros(width), 0)

    def add(self, key: InputKey, x_NI: Tensor) -> None:
        """Add rows; products are of float32, their sums of float64."""
        x_NI = x_NI.float()
        squares_I, sums_I = ((part.sum(0, dtype=torch.float64)).cpu().numpy() for part in (x_NI * x_NI, x_NI))
        if not np.isfinite(squares_I).all():
            bad = int((~torch.isfinite(x_NI * x_NI)).any(1).sum())
            place = "" if key.layer is None else f"layer {key.layer}: "
            expert = "" if key.expert is None else f" of expert {key.expert}"
            raise QConvertError(
                f"{place}the input of {', '.join(key.roles)}{expert} holds NaN or infinity in {bad} of"
                f" {len(x_NI)} rows",
                "look for weights that are not finite (`qconvert verify`), or take an undamaged checkpoint",
            )
        self.moments = InputMoments(
            self.moments.squares_I + squares_I, self.moments.sums_I + sums_I, self.moments.count + len(x_NI)
        )


def _unrouted(
    config: DecoderConfig, inputs: Mapping[InputKey, InputMoments]
) -> Iterator[tuple[InputKey, InputMoments]]:
    """Moments of nothing for the inputs of experts that no token was routed to."""
    kinds = {replace(key, layer=None, expert=None) for key in inputs if key.expert is not None}
    for i in (i for i in range(config.layers) if config.has("mlp.router", i)):
        for expert in range(config.shapes["mlp.router", i, "weight"][0]):
            for kind in kinds:
                key = replace(kind, layer=i, expert=expert)
                if key not in inputs:
                    role = kind.roles[0].replace(".experts", f".experts.{expert}")
                    width = config.shapes[role, i, "weight"][-1]
                    yield key, InputMoments(np.zeros(width), np.zeros(width), 0)
