"""Runs a checkpoint over calibration text: tokens, decoder, statistics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from qconvert.calibrate import collect
from qconvert.calibrate.backward import measure_gradients
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.collect import Progress, collect_statistics, windows_together
from qconvert.calibrate.fit import fitted_collection, fitted_weighing
from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.calibrate.memory import Work
from qconvert.calibrate.memory_limit import MemoryLimit, memory_limit
from qconvert.calibrate.moment_sums import MomentSums
from qconvert.calibrate.moments import InputStatistics
from qconvert.calibrate.statistics_file import StoredStatistics, model_record
from qconvert.calibrate.text import PACKED, CalibrationText, calibration_windows, check_tokens, check_window
from qconvert.calibrate.transformers_engine import TransformersModel
from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import Json
from qconvert.errors import UnsupportedModel
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.load import Streaming

LONG_WINDOW, LLAMA_CPP_WINDOW = 2048, 512


def read_text(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    tokens: int | None,
    window: int | None,
    *,
    protocol: str = PACKED,
    seed: int = 0,
    positions: int | None = None,
) -> CalibrationText:
    """The windows of texts for a model (see `calibration_windows`).

    Where no window is given: llama.cpp's for its protocol, else the longest that the model has positions
    for, up to 2,048. `positions` are those of another engine; without, our decoder's.
    """
    if positions is None:
        positions = DecoderConfig.of(checkpoint.architecture).max_positions
    longest = LONG_WINDOW if protocol == PACKED else LLAMA_CPP_WINDOW
    window = window or min(longest, positions)
    check_window(window, positions)
    return calibration_windows(dialogue_of(checkpoint), texts, tokens, window, protocol=protocol, seed=seed)


def own_config(checkpoint: Checkpoint) -> DecoderConfig:
    """What our decoder needs to know of a model; UnsupportedModel, which names the other engine, for one
    that it does not run.
    """
    try:
        return DecoderConfig.of(checkpoint.architecture)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            error.fact, f"transformers may run it: add --engine transformers; {error.hint}"
        ) from error


def calibrate(
    checkpoint: Checkpoint,
    name: str,
    text: CalibrationText,
    *,
    device: str = "cpu",
    max_memory: int | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
    scratch: Path | None = None,
) -> StoredStatistics:
    """The statistics of a model, called `name`, on a text, computed in float32.

    On a CPU, the whole process takes at most `max_memory` bytes (None: what it needs, if the machine has it);
    activations lie in `folder`. With `scratch`, a folder for the inputs of all layers, the model is run
    backwards too, and what is found has its gradients. Raises UnsupportedModel for a family that is not run
    here, BadRecipe where that is too little memory, and what `collect_statistics` and `measure_gradients`
    raise.
    """
    place, model = find_device(device), model_record(name, checkpoint.architecture)
    if scratch is None:
        found = _mean_squares(checkpoint, text.tokens_BT, place, max_memory, folder, progress)
        return StoredStatistics(found, model, (text.record,))
    config = DecoderConfig.of(checkpoint.architecture)
    calibration = Calibration(text.tokens_BT, shift=False, gradient_tokens=text.tokens)
    savings, _ = fitted_weighing(Work(config, calibration, 1, 4.0), _limit(max_memory, place))
    streaming = Streaming.EVERYTHING if savings.streamed else Streaming.NOTHING
    decoder = layer_by_layer(checkpoint, device=place, streaming=streaming)
    check_tokens(text.tokens_BT, config.max_positions, config.vocab)
    sums, tell = MomentSums(), progress or (lambda done, total: None)
    tokens_BT, batch = torch.from_numpy(text.tokens_BT), savings.backward_tokens
    gradients = measure_gradients(
        decoder, tokens_BT, scratch=scratch, observe=sums, batch_tokens=batch, progress=tell
    )
    found = sums.statistics(config.shapes, text.tokens_BT, config.vocab)
    return StoredStatistics(found, model, (text.record,), gradients=gradients.moments)


def statistics_on(
    checkpoint: Checkpoint,
    name: str,
    tokens_BT: np.ndarray,
    record: Json,
    *,
    max_memory: int | None = None,
    folder: Path | None = None,
) -> StoredStatistics:
    """The same on windows of tokens, int64 [B, T], which `record` describes (`CalibrationText.record`)."""
    found = _mean_squares(checkpoint, tokens_BT, find_device("cpu"), max_memory, folder)
    return StoredStatistics(found, model_record(name, checkpoint.architecture), (record,))


def _mean_squares(
    checkpoint: Checkpoint,
    tokens_BT: np.ndarray,
    place: torch.device,
    max_memory: int | None,
    folder: Path | None,
    progress: Progress | None = None,
) -> InputStatistics:
    """What linears read of windows of tokens, measured within a memory."""
    config, window = DecoderConfig.of(checkpoint.architecture), tokens_BT.shape[1]
    most = windows_together(config, window, collect.BATCH_BYTES) * window
    work = Work(config, Calibration(tokens_BT, shift=False))
    tokens, streamed = fitted_collection(work, most, _limit(max_memory, place))
    streaming = Streaming.EVERYTHING if streamed else Streaming.TABLES
    decoder = layer_by_layer(checkpoint, device=place, streaming=streaming)
    together = max(1, tokens // window)
    return collect_statistics(decoder, tokens_BT, progress, scratch=folder, together=together)


def _limit(max_memory: int | None, place: torch.device) -> MemoryLimit:
    """What a run may take of main memory: on another device, as much as there is."""
    return memory_limit(max_memory) if place.type == "cpu" else MemoryLimit(sys.maxsize)


def calibrate_elsewhere(
    model: TransformersModel,
    name: str,
    text: CalibrationText,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> StoredStatistics:
    """The same, run by transformers; the record says so, and which inputs are not in it.

    Raises what `TransformersModel.collect` raises.
    """
    found = model.collect(text.tokens_BT, device, progress)
    record = text.record | {"engine": found.engine}
    if found.left_out:
        record["left_out"] = list(dict.fromkeys(key.place for key in found.left_out))
    described = model_record(name, model.checkpoint.architecture)
    return StoredStatistics(found.statistics, described, (record,))
