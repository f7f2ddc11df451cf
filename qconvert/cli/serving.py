"""Says how an output is served: the command, or why its first reader refuses it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qconvert.check.subject import Problem, Subject
    from qconvert.convert.job import Job

# The loader that each command of `LayoutTraits.serve` starts.
_STARTED = {"vllm": "vllm", "mlx_lm.chat": "mlx"}
# Who else may take what the first reader refuses, most like it first.
_OTHERS = ("sglang", "transformers", "mlx")


def serving(job: Job, out: str) -> str | None:
    """The command that serves an output with new codes, where one is known.

    Where `check` says that its loader refuses the output, the command that explains it, and who takes it.
    """
    compiled = job.compiled
    if not any(unit.quantizes for unit in compiled.plan.units):
        return None
    if compiled.gguf is not None:
        return f"next: llama-server -m {shlex.quote(out)}"
    serve = compiled.layout.traits.serve
    if not serve:
        return None
    from qconvert.check.loader_rules import serving_arguments
    from qconvert.check.subjects import planned_subject

    loader = _STARTED[serve.split()[0]]
    subject = planned_subject(job, loader)
    refused = _refused(subject)
    if refused is None:
        return f"next: {serve} {shlex.quote(out)} {serving_arguments(subject)}".rstrip()
    takers = [
        other for other in _OTHERS if other != loader and _refused(replace(subject, loader=other)) is None
    ]
    others = f"; {' and '.join(takers)} should load it" if takers else ""
    explains = f"qconvert check {shlex.quote(out)} --for {loader}"
    return f"next: {explains}  # {loader} refuses this output: {refused.fact}{others}"


def _refused(subject: Subject) -> Problem | None:
    """The first thing that a loader fails on in an output, if any."""
    from qconvert.check.loader_rules import lint
    from qconvert.check.subject import ERROR

    return next((each for each in lint(subject) if each.severity == ERROR), None)
