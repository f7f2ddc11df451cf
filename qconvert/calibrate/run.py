"""Runs a checkpoint over calibration text: tokens, decoder, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from qconvert.calibrate.backward import measure_gradients
from qconvert.calibrate.collect import Progress, collect_statistics
from qconvert.calibrate.moment_sums import MomentSums
from qconvert.calibrate.statistics_file import StoredStatistics, model_record
from qconvert.calibrate.text import PACKED, CalibrationText, calibration_windows, check_tokens, check_window
from qconvert.calibrate.transformers_engine import TransformersModel
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.dialogue import dialogue_of
from qconvert.checkpoint.open import Checkpoint
from qconvert.errors import UnsupportedModel
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
    progress: Progress | None = None,
    scratch: Path | None = None,
) -> StoredStatistics:
    """The statistics of a model, called `name`, on a text, computed in float32.

    With `scratch`, a folder for the inputs of all layers, the model is run backwards too, and what is found
    has its gradients. Raises UnsupportedModel for a family that is not run here, and what
    `collect_statistics` and `measure_gradients` raise.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    weights, place = CheckpointWeights(checkpoint), find_device(device)
    decoder = load_decoder(config, weights, device=place, on_demand=True)  # in float32
    model, texts = model_record(name, checkpoint.architecture), (text.record,)
    if scratch is None:
        return StoredStatistics(collect_statistics(decoder, text.tokens_BT, progress), model, texts)
    check_tokens(text.tokens_BT, config.max_positions, config.vocab)
    sums, tell = MomentSums(), progress or (lambda done, total: None)
    tokens_BT = torch.from_numpy(text.tokens_BT)
    gradients = measure_gradients(decoder, tokens_BT, scratch=scratch, observe=sums, progress=tell)
    found = sums.statistics(config.shapes, text.tokens_BT, config.vocab)
    return StoredStatistics(found, model, texts, gradients=gradients.moments)


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
