"""Measures what plans cost before anything is written: KL divergences of the model as they would make it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch

from qconvert.calibrate.fit import fewer
from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.calibrate.memory_limit import MemoryLimit, memory_limit
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.as_planned import PlannedRows
from qconvert.convert.job import Job
from qconvert.core.protocols import Rows
from qconvert.evaluate.in_turn import LayersInTurn
from qconvert.evaluate.lockstep import BATCH_TOKENS, EvalModel, Track, run_lockstep
from qconvert.evaluate.memory import EvalMemory, EvalWork, fitted
from qconvert.evaluate.model_bytes import ModelBytes
from qconvert.evaluate.protocols import Window
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import Streaming


def planned_divergences(
    jobs: Sequence[Job], tokens_BT: np.ndarray, *, scratch: Path | None = None
) -> list[float]:
    """The mean KL divergence of what each job would make from its model, in nats per token.

    The jobs are of one model. Of the windows, int64 [B, T], as many are run as visit a layer together, so
    that every weight is made once; codes are the nearest ones. The process keeps within the memory that the
    jobs' options ask for; what has no room lies in files without names in `scratch`, by default the folder of
    temporary files. Raises BadRecipe where that is too little memory.
    """
    checkpoint, folder = jobs[0].source.checkpoint, scratch or Path(gettempdir())
    length = tokens_BT.shape[1]
    limit = memory_limit(jobs[0].options.process_memory)
    memory = planned_memory(checkpoint, length, limit, plans=len(jobs))

    def track(label: str, rows: Rows) -> Track:
        return Track(EvalModel(label, layer_by_layer(checkpoint, rows, streaming=Streaming.TABLES), 0, 0.0))

    windows_WT = tokens_BT[: _windows(length)]
    windows = [Window(at, at + length, scored=at + 1) for at in range(0, windows_WT.size, length)]
    tracks = [track("the model", checkpoint.reader)]
    tracks += [track(f"plan {number}", PlannedRows(job, folder)) for number, job in enumerate(jobs)]
    run = LayersInTurn(memory, folder)
    run_lockstep(
        tracks, windows_WT.ravel(), windows, compared=True, batch_tokens=memory.batch_tokens, run=run
    )
    return [float(np.concatenate(each.kl).mean()) for each in tracks[1:]]


def planned_memory(checkpoint: Checkpoint, length: int, limit: MemoryLimit, *, plans: int = 2) -> EvalMemory:
    """How so many plans are measured at once on windows of that length within a limit.

    Raises BadRecipe where that is too small.
    """
    config = DecoderConfig.of(checkpoint.architecture)
    own = ModelBytes.of(config, CheckpointWeights(checkpoint), torch.float32, Layout.REFERENCE)
    models = [own, *[ModelBytes.of_float32(config)] * plans]
    work = EvalWork(models, len(models), length, _windows(length) * length)
    return fitted(work, limit, batches=fewer(BATCH_TOKENS["cpu"], length), doing="measuring what plans cost")


def _windows(length: int) -> int:
    return max(1, BATCH_TOKENS["cpu"] // length)
