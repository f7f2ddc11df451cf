"""Names the command that serves an output, or why its first reader refuses it."""

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


def refused_forms(job: Job) -> list[str]:
    """What the first reader of a layout does not run of the new encodings: to be said before the work."""
    from qconvert.core.encodings import Quantized

    compiled = job.compiled
    if compiled.gguf is not None or not compiled.layout.traits.serve:
        return []
    traits = compiled.layout.traits
    loader = _STARTED[traits.serve.split()[0]]
    made = dict.fromkeys(unit.output.encoding for unit in compiled.plan.units if unit.quantizes)
    found = []
    for limit in traits.limits:
        if loader not in limit.loaders or limit.severity != "error" or limit.about != "weight":
            continue
        forms = [form for form in made if isinstance(form, Quantized) and limit.applies(form)]
        if forms:
            fact = limit.said_of(forms[0], loader, traits.name)
            found.append(f"{fact}, and this output is {forms[0].label}: {limit.hint}")
    return found


def _refused(subject: Subject) -> Problem | None:
    """The first thing that a loader fails on in an output, if any."""
    from qconvert.check.loader_rules import lint
    from qconvert.check.subject import ERROR

    return next((each for each in lint(subject) if each.severity == ERROR), None)
