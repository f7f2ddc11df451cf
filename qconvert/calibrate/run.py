"""Runs a checkpoint over calibration text: tokens, decoder, statistics."""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.calibrate.collect import Progress, collect_statistics
from qconvert.calibrate.statistics_file import StoredStatistics, model_record
from qconvert.calibrate.text import PACKED, CalibrationText, calibration_windows
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.open import Checkpoint
from qconvert.errors import BadRecipe
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.load import load_decoder

LONG_WINDOW, LLAMA_CPP_WINDOW = 2048, 512


def read_text(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    tokens: int | None,
    window: int | None,
    *,
    protocol: str = PACKED,
    seed: int = 0,
) -> CalibrationText:
    """The windows of texts for a model (see `calibration_windows`).

    Where no window is given: llama.cpp's for its protocol, else the longest that the model has positions
    for, up to 2,048.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    longest = LONG_WINDOW if protocol == PACKED else LLAMA_CPP_WINDOW
    window = window or min(longest, config.max_positions)
    if window > config.max_positions:
        raise BadRecipe(
            f"--window {window}: the model has {config.max_positions} positions",
            f"take --window {config.max_positions} or less",
        )
    return calibration_windows(dialogue_of(checkpoint), texts, tokens, window, protocol=protocol, seed=seed)


def calibrate(
    checkpoint: Checkpoint,
    name: str,
    text: CalibrationText,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> StoredStatistics:
    """The statistics of a model, called `name`, on a text, computed in float32.

    Raises UnsupportedModel for a family that is not run here, and what `collect_statistics` raises.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    weights, place = CheckpointWeights(checkpoint), find_device(device)
    decoder = load_decoder(config, weights, device=place, on_demand=True)  # in float32
    found = collect_statistics(decoder, text.tokens_BT, progress)
    return StoredStatistics(found, model_record(name, config), (text.record,))
