"""Makes conversions save memory in a given way, however much there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qconvert.calibrate.savings import Savings
from qconvert.convert.job import Job


def saving(job: Job, **how: Any) -> Job:
    """The same job with these savings (fields of `Savings`)."""
    assert job.calibration is not None
    return replace(job, calibration=replace(job.calibration, savings=Savings(**how)))
