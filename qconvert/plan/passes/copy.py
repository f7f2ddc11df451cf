"""Starts a plan that copies every tensor."""

from __future__ import annotations

from qconvert.core.protocols import Layout
from qconvert.models import Binding
from qconvert.plan.facts import SourceFacts
from qconvert.plan.plan import Plan, Unit, whole
from qconvert.plan.request import GGUFTarget, Request
from qconvert.plan.state import Compiled


def copy_tensors(request: Request, binding: Binding, facts: SourceFacts, layout: Layout) -> Compiled:
    """The question and the plan that changes nothing."""
    architecture = binding.architecture
    tied = architecture.tied if request.recipe.tie is None else request.recipe.tie
    guess = architecture.family.guess
    warnings = (guess,) if guess and not isinstance(request.target, GGUFTarget) else ()
    plan = copy_of(binding)
    return Compiled(request, binding, facts, layout, plan, architecture, tied, warnings)


def copy_of(binding: Binding) -> Plan:
    """The plan that copies every tensor except the buffers the architecture ignores.

    Tensors come in the order of the model's printed structure, unknown ones last.
    """
    fused = binding.architecture.fused
    order = {name: i for i, name in enumerate(binding.architecture.parameters)}
    order |= {name: order[entry.members[0].name] for name, entry in fused.items()}
    kept = [name for name in binding.tensors if name not in binding.dropped]
    kept.sort(key=lambda name: (order.get(name, len(order)), name))
    units = (Unit((whole(binding.tensors[name]),), (), binding.tensors[name]) for name in kept)
    return Plan(tuple(units), binding.dropped)
