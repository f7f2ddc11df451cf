"""Measures what plans cost before anything is written: KL divergences of the model as they would make it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.convert.as_planned import PlannedRows
from qconvert.convert.job import Job
from qconvert.core.protocols import Rows
from qconvert.evaluate.lockstep import BATCH_TOKENS, EvalModel, Track, run_lockstep
from qconvert.evaluate.protocols import Window


def planned_divergences(jobs: Sequence[Job], tokens_BT: np.ndarray) -> list[float]:
    """The mean KL divergence of what each job would make from its model, in nats per token.

    The jobs are of one model. Of the windows, int64 [B, T], as many are run as visit a layer together, so
    that every weight is made once; codes are the nearest ones.
    """
    checkpoint = jobs[0].source.checkpoint

    def track(label: str, rows: Rows) -> Track:
        return Track(EvalModel(label, layer_by_layer(checkpoint, rows), 0, 0.0))

    length = tokens_BT.shape[1]
    windows_WT = tokens_BT[: max(1, BATCH_TOKENS["cpu"] // length)]
    windows = [Window(at, at + length, scored=at + 1) for at in range(0, windows_WT.size, length)]
    tracks = [track("the model", checkpoint.reader)]
    tracks += [track(f"plan {number}", PlannedRows(job)) for number, job in enumerate(jobs)]
    run_lockstep(tracks, windows_WT.ravel(), windows, compared=True)
    return [float(np.concatenate(each.kl).mean()) for each in tracks[1:]]
