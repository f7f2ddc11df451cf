"""Measures E[g g^T] of the outputs of every linear, and keeps it on disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from qconvert.calibrate.backward import measure_gradients
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.gradients import OutputGradients
from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.model import Decoder


def output_moments(
    decoder: Decoder, calibration: Calibration, scratch: Path
) -> dict[StatisticsKey, np.ndarray]:
    """E[g g^T] within every `output_rows` consecutive outputs of a linear, float32 [B, R, R] as in
    `OutputGradients.blocks_BRR`, on the windows that the calibration names for gradients.

    The decoder's layers are best loaded on demand. Activations and what is returned lie in files without a
    name in the folder `scratch`. Raises what `measure_gradients` does.
    """

    def on_scratch(found: OutputGradients) -> OutputGradients:
        assert found.blocks_BRR is not None
        file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (the mapping keeps it)
        stored = np.memmap(file, np.float32, "w+", shape=found.blocks_BRR.shape)
        stored[:] = found.blocks_BRR
        return replace(found, blocks_BRR=stored)

    found = measure_gradients(
        decoder,
        torch.from_numpy(calibration.gradient_windows_WT),
        scratch=scratch,
        block_rows=calibration.output_rows,
        keep=on_scratch,
    )
    return {key: each.blocks_BRR for key, each in found.linears.items() if each.blocks_BRR is not None}
