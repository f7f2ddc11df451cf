"""Measures E[g g^T] of the outputs of every linear, and keeps it on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from qconvert.calibrate.backward import measure_gradients
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.gradients import OutputGradients
from qconvert.calibrate.row_file import RowFile, unnamed_file
from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.model import Decoder


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks [B, R, R] in a file, row by row; indexed by the number of a block."""

    file: RowFile
    shape: tuple[int, int, int]

    def __getitem__(self, block: int) -> np.ndarray:
        size = self.shape[1]
        return self.file.read(block * size, (block + 1) * size)


def output_moments(
    decoder: Decoder, calibration: Calibration, scratch: Path
) -> dict[StatisticsKey, StoredBlocks]:
    """E[g g^T] within every `output_rows` consecutive outputs of a linear, float32 [B, R, R] as in
    `OutputGradients.blocks_BRR`, on the windows that the calibration names for gradients.

    The decoder's layers are best loaded on demand. Activations and what is returned lie in files without a
    name in the folder `scratch`. Raises what `measure_gradients` does.
    """
    kept: dict[StatisticsKey, StoredBlocks] = {}
    measure_gradients(
        decoder,
        torch.from_numpy(calibration.gradient_windows_WT),
        scratch=scratch,
        block_rows=calibration.output_rows,
        keep=_keeping(kept, scratch),
        batch_tokens=calibration.savings.backward_tokens,
    )
    return kept


def _keeping(
    kept: dict[StatisticsKey, StoredBlocks], scratch: Path
) -> Callable[[StatisticsKey, OutputGradients], OutputGradients]:
    """What stores the blocks of every linear in one file, one after the other."""
    whole, end = unnamed_file(scratch), 0

    def keep(key: StatisticsKey, found: OutputGradients) -> OutputGradients:
        nonlocal end
        assert found.blocks_BRR is not None
        count, size, _ = found.blocks_BRR.shape
        file = RowFile(whole, np.zeros(count * size, bool), size, end)
        file.write(np.arange(count * size), found.blocks_BRR.reshape(-1, size))
        end += found.blocks_BRR.nbytes
        kept[key] = StoredBlocks(file, (count, size, size))
        return replace(found, blocks_BRR=None)

    return keep
