"""Sets how the threads of torch and numpy wait for work, before these are imported."""

from __future__ import annotations

import os

_SPINS = "5000"
"""Looks for work before a thread of GNU OpenMP sleeps, some 80 microseconds; its own number is 300,000."""


def leave_cores_to_others() -> None:
    """Let threads sleep soon: after each product they would spin for milliseconds, on cores that others want.

    Reading 256 tokens of Qwen2.5-0.5B in int4, two threads on two cores of Zen 5: 722 tokens a second (with
    1,000 looks 638, with OpenMP's own number 731); beside six other threads 2.0 s (with 1,000 1.6), beside
    nine 7.7 s with OpenMP's own. What the environment says already is left as it is.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # numpy's products are small or made by many threads at once; where one is large and alone,
    # `calibrate.input_sums` asks for more threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
