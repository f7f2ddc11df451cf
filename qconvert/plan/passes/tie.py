"""Drops a head that equals the embedding, or writes a tied head out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel
from qconvert.models import Architecture, Binding
from qconvert.plan.facts import HeadDifference
from qconvert.plan.plan import Plan
from qconvert.plan.request import Request
from qconvert.plan.state import Compiled

if TYPE_CHECKING:
    from qconvert.models.gguf.declaration import Head


def tie_head(state: Compiled) -> Compiled:
    """The pass: as the recipe says, or for GGUF as llama.cpp's graph reads the head."""
    return _tie_for_graph(state) if state.is_gguf else _tie_as_asked(state)


def compares_head(request: Request, binding: Binding) -> bool:
    """Whether tying depends on how the stored head differs from the embedding."""
    asked = None if request.is_gguf else request.recipe.tie
    embed, head = _table_names(binding.architecture)
    tables = head in binding.tensors and embed in binding.tensors
    return (binding.architecture.tied if asked is None else asked) and tables


def _tie_as_asked(state: Compiled) -> Compiled:
    architecture, tie = state.binding.architecture, state.request.recipe.tie
    embed, head = _table_names(architecture)
    stored = head in state.binding.tensors
    if embed not in state.binding.tensors:
        if tie is None:
            return state
        raise BadRecipe("the model has no embedding here that its head could share", "use the model as it is")
    if architecture.tied and tie is None and not stored:
        return state
    if state.tied and stored:
        return _drop_equal_head(state, embed, head)
    if state.tied and not architecture.tied:
        raise BadRecipe(f"{head}: not stored, so there is nothing to tie", "fetch the shard that holds it")
    if state.tied and tie:
        raise BadRecipe("config.json: the head is already tied to the embedding", "use the model as it is")
    if tie is False and not architecture.tied:
        raise BadRecipe("config.json: the head is already a table of its own", "use the model as it is")
    if tie is False and not stored:
        return state.with_plan(_untied(state.plan, embed, head))
    return state


def _drop_equal_head(state: Compiled, embed: str, head: str) -> Compiled:
    tied, difference = state.binding.architecture.tied, _difference(state)
    if difference.differing:
        raise CorruptCheckpoint(
            f"{head}: differs from {embed} in {difference.differing} of "
            f"{difference.count} numbers (largest difference {difference.max_abs:.4g})",
            "keep both: `qconvert untie`, or --untie" if tied else "leave them untied",
        )
    state = state.with_plan(without(state.plan, head))
    if not tied:
        return state
    return state.warn(f"{head}: equals {embed}, to which config.json ties it; written once")


def _tie_for_graph(state: Compiled) -> Compiled:
    """llama.cpp reads an `output.weight` if there is one; some graphs need it, some never read it."""
    from qconvert.models.gguf.families import facts_of

    architecture, model = state.binding.architecture, facts_of(state.binding.architecture).model
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    if embed is None or head is None:
        return state
    if not architecture.tied and model.head == "tied":
        raise UnsupportedModel(
            f"{head.name}: a head of its own, which llama.cpp's {model.arch} never reads",
            "the GGUF would not load; keep this model in safetensors",
        )
    if head.name not in state.binding.tensors:
        needed = model.head == "required"
        return state.with_plan(_untied(state.plan, embed.name, head.name)) if needed else state
    if not architecture.tied:
        return state
    return _stored_although_tied(state, embed.name, head.name, model.head)


def _stored_although_tied(state: Compiled, embed: str, head: str, want: Head) -> Compiled:
    dropped = state.with_plan(without(state.plan, head))
    if _difference(state).differing:
        differing = f"{head}: stored, and differs from {embed} although config.json ties them"
        if want == "tied":
            return dropped.warn(f"{differing}; left out, as llama.cpp uses the embedding")
        return state.warn(f"{differing}; kept, as llama.cpp uses it")
    if want == "required":
        return state
    return dropped.warn(f"{head}: equals {embed}; written once")


def _difference(state: Compiled) -> HeadDifference:
    assert state.facts.head is not None, "gathered wherever `compares_head`"
    return state.facts.head


def _table_names(architecture: Architecture) -> tuple[str, str]:
    embed, head = architecture.table("embed"), architecture.table("lm_head")
    return embed.name if embed else "", head.name if head else ""


def without(plan: Plan, *names: str) -> Plan:
    """The plan without the tensors of these names, looked through once."""
    left_out = frozenset(names)
    units = tuple(unit for unit in plan.units if unit.output.name not in left_out)
    return Plan(units, (*plan.dropped, *names))


def _untied(plan: Plan, embed: str, head: str) -> Plan:
    """The plan that writes the embedding a second time, as the head."""
    unit = next(unit for unit in plan.units if unit.output.name == embed)
    return replace(plan, units=(*plan.units, unit._replace(output=replace(unit.output, name=head))))
