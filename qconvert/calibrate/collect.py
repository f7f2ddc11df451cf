"""Collects statistics of what every linear reads, by running a model over windows of tokens.

Layer by layer: one layer's weights are in memory at a time where the decoder reads them on demand, and the
activations between two layers are a file. Windows never see one another. Legend: B
windows, T tokens of a window, D hidden, N rows, I in features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.activation_file import activation_file
from qconvert.calibrate.moment_sums import MomentSums
from qconvert.calibrate.moments import InputStatistics
from qconvert.calibrate.text import check_tokens
from qconvert.core.statistics import InputKey
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.layer_passes import HiddenStates, pass_layers, states_of
from qconvert.runtime.model import Decoder

Progress = Callable[[int, int], None]
"""Called with the tokens done and those to do, each counted once per layer."""
BATCH_BYTES = 256 << 20


def collect_statistics(
    decoder: Decoder,
    tokens_BT: np.ndarray,
    progress: Progress | None = None,
    *,
    scratch: Path | None = None,
    together: int | None = None,
) -> InputStatistics:
    """Sums, sums of squares and counts of the inputs of every linear over windows of tokens, int64 [B, T].

    An expert's are of the rows routed to it; the head's, of all positions. Activations between layers lie in
    a file without a name in `scratch`, by default the folder of temporary files; `together` windows
    go through a layer at a time, by default as many as take BATCH_BYTES there. Raises BadRecipe for windows
    longer than the model's positions and tokens beyond its vocabulary, QConvertError where an input is not
    finite.
    """
    config, window = decoder.config, tokens_BT.shape[1]
    check_tokens(tokens_BT, config.max_positions, config.vocab)
    sums, told = MomentSums(), progress or (lambda done, total: None)
    folder = scratch or Path(gettempdir())
    room = activation_file(folder, 1, len(tokens_BT), window, config.stream, decoder.dtype)
    with decoder.observing(sums), room as file:
        size = together or windows_together(config, window, BATCH_BYTES)
        _run(decoder, torch.from_numpy(tokens_BT), file.slot(0), size, sums, told)
    return sums.statistics(config.shapes, tokens_BT, config.vocab)


@torch.inference_mode()
def _run(
    decoder: Decoder,
    tokens_BT: Tensor,
    states: HiddenStates,
    size: int,
    observe: Callable[[InputKey, Tensor], None],
    progress: Progress,
) -> None:
    """Compute every layer for all windows, `size` of them at a time, then what the head reads."""
    batches = [tokens_BT[first : first + size] for first in range(0, len(tokens_BT), size)]
    pass_layers(decoder, batches, states, passed=progress)
    for x_BTD in states_of(decoder, batches, states):
        h_BTD = decoder.normalised(x_BTD)
        observe(InputKey(("lm_head",)), h_BTD.reshape(-1, h_BTD.shape[-1]))


def windows_together(config: DecoderConfig, window: int, nbytes: int) -> int:
    """The windows that go through a layer at a time with activations of so many bytes: 1 or more."""
    return max(1, nbytes // (window * _bytes_per_token(config)))


def _bytes_per_token(config: DecoderConfig) -> int:
    """About what a layer holds of a token in float32: a few rows of the hidden width, three of the MLP's."""
    inner = max(shape[0] for key, shape in config.shapes.items() if key[1] == 0)
    return 4 * (6 * config.hidden + 2 * config.stream + 3 * inner)
