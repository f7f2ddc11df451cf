"""How far a result is from its reference, and whether it comes out the same again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evals.gpu.job import Job

RUNS = 3


def distance(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference||, in float64; NaN where the result holds one."""
    difference = result.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


def repeated(job: Job, run: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """The result of the last of several runs, and whether all gave the same bits (NaN does not)."""
    results = [run().clone() for _ in range(2 if job.dry else RUNS)]
    return results[-1], all(torch.equal(result, results[0]) for result in results)
