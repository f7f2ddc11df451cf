"""Measures what plans cost before anything is written: KL divergences of the model as they would make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch

from qconvert.calibrate.fit import fewer
from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.calibrate.memory_limit import MemoryLimit, memory_limit
from qconvert.calibrate.text import CalibrationText
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.as_planned import PlannedRows
from qconvert.convert.candidates import Decision
from qconvert.convert.job import Job
from qconvert.core.dtypes import Json
from qconvert.core.protocols import Rows
from qconvert.evaluate.in_turn import LayersInTurn
from qconvert.evaluate.lockstep import BATCH_TOKENS, EvalModel, Progress, Track, run_lockstep
from qconvert.evaluate.memory import EvalMemory, EvalWork, fitted
from qconvert.evaluate.model_bytes import ModelBytes
from qconvert.evaluate.paired_statistics import mean
from qconvert.evaluate.protocols import Window
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import Streaming

# Neighbouring tokens that count as one observation, as their divergences go together.
_RUN_TOKENS = 128
UNSEEN_TOKENS = BATCH_TOKENS["cpu"]
"""Tokens of a comparison, where a text has so many left: those that visit a layer together."""


def planned_divergences(
    jobs: Sequence[Job],
    tokens_BT: np.ndarray,
    *,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """The KL divergence of what each job would make from its model, nats of every token, float32 [N].

    Codes are the nearest ones. The arguments and errors are those of `divergences_of`.
    """
    folder = scratch or Path(gettempdir())
    rows = [PlannedRows(job, folder) for job in jobs]
    return divergences_of(rows, jobs[0], tokens_BT, scratch=folder, progress=progress)


def divergences_of(
    weights: Sequence[Rows],
    job: Job,
    tokens_BT: np.ndarray,
    *,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """The KL divergence of other weights of a model from its own, nats of every token, float32 [N].

    The model is that of the job. Of the windows, int64 [B, T], as many are run as visit a layer together, so
    that every weight is made once. The process keeps within the memory that the job's options ask for; what
    has no room lies in files without names in `scratch`, by default the folder of temporary files. `progress`
    is told how many windows are done of how many. Raises BadRecipe where that is too little memory.
    """
    checkpoint, folder = job.source.checkpoint, scratch or Path(gettempdir())
    length = tokens_BT.shape[1]
    limit = memory_limit(job.options.process_memory)
    memory = planned_memory(checkpoint, length, limit, plans=len(weights))

    def track(label: str, rows: Rows) -> Track:
        return Track(EvalModel(label, layer_by_layer(checkpoint, rows, streaming=Streaming.TABLES), 0, 0.0))

    windows_WT = tokens_BT[: _windows(length)]
    windows = [Window(at, at + length, scored=at + 1) for at in range(0, windows_WT.size, length)]
    tracks = [track("the model", checkpoint.reader)]
    tracks += [track(f"plan {number}", rows) for number, rows in enumerate(weights)]
    run = LayersInTurn(memory, folder)
    run_lockstep(
        tracks,
        windows_WT.ravel(),
        windows,
        compared=True,
        batch_tokens=memory.batch_tokens,
        progress=progress,
        run=run,
    )
    return [np.concatenate(each.kl) for each in tracks[1:]]


def surely_less(a_N: np.ndarray, b_N: np.ndarray) -> bool:
    """Whether the mean of `a` is below that of `b` by more than two standard errors, of the same tokens.

    The difference of each token is taken first, so what both lose on a hard token says nothing of either.
    """
    found = mean(a_N - b_N, np.arange(len(a_N)) // _RUN_TOKENS)
    return found.se is not None and found.value < -2 * found.se


def compared(kls: Sequence[np.ndarray], on: Json) -> Decision:
    """A mix wins where it is surely better than its rival of one encoding; both in nats of every token, [N].

    `on` says what they were measured on; the number of tokens is added.
    """
    mix_N, one_N = kls
    nats = float(mix_N.mean()), float(one_N.mean())
    return Decision(nats, on | {"tokens": len(mix_N)}, surely_less(mix_N, one_N))


def unseen_windows(
    read_BT: np.ndarray, priced: int, read: Callable[[int], CalibrationText] | None
) -> tuple[np.ndarray, bool]:
    """Windows of a text after those that codes and prices were chosen on, int64 [B, T], and True.

    Codes were chosen on `read_BT`, prices on the first so many tokens of them or more; `read` gives the first
    so many tokens of the text, None where all of it was read. Where too few are left, `read_BT` and False.
    """
    window = read_BT.shape[1]
    used = max(read_BT.size, priced)
    if read is None:
        return read_BT, False
    unseen_BT = read(used + max(UNSEEN_TOKENS, window)).tokens_BT[used // window :]
    enough = unseen_BT.size >= min(UNSEEN_TOKENS, used) // 4
    return (unseen_BT, True) if enough else (read_BT, False)


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
