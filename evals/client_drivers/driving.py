"""Runs a client on many checkpoints, each in a process of its own, and keeps what it computed.

A driver is started as `python drive_CLIENT.py JOBS.json`. JOBS.json holds `tokens`, windows of token ids of
one length, `seconds`, what a checkpoint may compute, and `jobs`: the `model` to load, the `ways` to load it,
of which the first that works is taken (the dtype to compute in; "auto" is the client's own choice; others
are explained in the driver), and `out`, an .npz file:
`logprobs` float32 [W, T - 1], the log-probability of each token but the first, `weight:NAME`, the matrix
float32 [O, I] that a linear multiplies by, and `dtype`, what the client computed in. `probe:NAME` is the
number that stood for 1 in the identity by which a linear was asked for its matrix. A line of JSON on stdout
follows each job: its `out`, the `way` that worked, and the `error` of the first one where none did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Windows = list[list[int]]


@dataclass(frozen=True)
class Answer:
    """What a client made of a checkpoint: log-probabilities [W, T - 1], weights [O, I] by name, and the dtype
    that it computed in, by its name in numpy or torch. Weights of `probes` are multiplied by a number.
    """

    logprobs_WT: np.ndarray
    weights: Mapping[str, np.ndarray]
    dtype: str
    probes: Mapping[str, float] = field(default_factory=dict)


Compute = Callable[[str, str, Windows], Answer]


def drive(compute: Compute) -> None:
    """Carry out the jobs that the command line names: `compute(model, dtype, tokens)` for each.

    The client is imported by now, so that a job costs a fork alone; what a job breaks breaks nothing else.
    """
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for job in asked["jobs"]:
        first: str | None = None
        for way in job["ways"]:
            error = _forked(compute, {**job, "way": way}, asked["tokens"], asked["seconds"])
            first = first or error
            if error is None:
                break
        said = {"out": job["out"], "way": way, "error": first if error else None}
        print("\n" + json.dumps(said), flush=True)


def _forked(compute: Compute, job: Mapping[str, Any], tokens: Windows, seconds: int) -> str | None:
    """Carry out a job in a process of its own; what it says went wrong."""
    failed = Path(f"{job['out']}.error")
    failed.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        # Seconds of the processor, which a busy machine does not shorten; of the clock, for what waits.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(_WAITING * seconds)
        os._exit(_run(compute, job, tokens, failed))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if failed.exists():
        return failed.read_text(encoding="utf-8")
    late = status in (-signal.SIGALRM, -signal.SIGPROF)
    return (
        None if status == 0 else f"no answer in {seconds} s" if late else f"the process ended with {status}"
    )


_WAITING = 5


def _run(compute: Compute, job: Mapping[str, Any], tokens: Windows, failed: Path) -> int:
    try:
        answer = compute(job["model"], job["way"], tokens)
        named = {f"weight:{name}": np.asarray(weight, np.float32) for name, weight in answer.weights.items()}
        dtype = np.array(answer.dtype.removeprefix("torch."))
        named |= {f"probe:{name}": np.array(probe) for name, probe in answer.probes.items()}
        np.savez(job["out"], logprobs=np.asarray(answer.logprobs_WT, np.float32), dtype=dtype, **named)
    except BaseException as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failed.write_text(f"{type(error).__name__}: {' '.join(lines[:3])}", encoding="utf-8")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def log_softmax(logits_TV: Any) -> np.ndarray:
    """Log-probabilities float64 of logits [T, V]."""
    logits = np.asarray(logits_TV, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def of_tokens(logits_TV: Any, window: list[int]) -> np.ndarray:
    """The log-probability [T - 1] of each token of a window but the first, of the logits at all places."""
    return log_softmax(logits_TV)[np.arange(len(window) - 1), window[1:]]
