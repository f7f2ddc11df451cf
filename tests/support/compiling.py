"""Requests compiled without files: a binding, the facts that a source would give, and a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.core.encodings import Quantized
from qconvert.formats.layouts.compressed_tensors import CompressedTensors
from qconvert.models import Architecture, Binding
from qconvert.plan.compile import compile_request
from qconvert.plan.facts import HeadDifference, SourceFacts
from qconvert.plan.passes.fuse import cut_where, stack_members
from qconvert.plan.plan import Plan, copy_of
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request
from qconvert.plan.state import Compiled

EQUAL = HeadDifference(100, 0, 0.0)


class Told(CompressedTensors):
    """A layout whose settings tell what it was asked to say."""

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        forms = {name: encoding.label for name, encoding in quantized.items()}
        return {"quantization_config": {"forms": forms, "kept": sorted(kept)}}


def compiled(binding: Binding, head: HeadDifference = EQUAL, **how: Any) -> Compiled:
    """What a request with these fields compiles to."""
    request = Request(**{"command": "quantize", **how})
    return compile_request(request, binding, SourceFacts(head=head), Told())


def start(binding: Binding, recipe: Recipe = Recipe(), **how: Any) -> Compiled:  # noqa: B008 (frozen)
    """The state before the first pass."""
    request = Request(**{"command": "quantize", "recipe": recipe, **how})
    architecture = binding.architecture
    tied = architecture.tied if recipe.tie is None else recipe.tie
    facts = SourceFacts(head=EQUAL)
    return Compiled(request, binding, facts, Told(), copy_of(binding), architecture, tied)


def fused(plan: Plan, architecture: Architecture, roles: Iterable[str]) -> Plan:
    """The plan with the members of these fusions stacked."""
    wanted = frozenset(roles)
    entries = architecture.fused.values()
    return stack_members(plan, [e for e in entries if e.fusion.role in wanted and not e.fusion.layout])


def unfused(plan: Plan, architecture: Architecture) -> Plan:
    """The plan with every fused tensor cut."""
    return cut_where(plan, architecture, lambda entry: True)
