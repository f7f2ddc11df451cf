"""Stacks the members of fused linears, and cuts fused linears into their members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from qconvert.core.encodings import ModelTensor
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, FusedParameter
from qconvert.ops import InterleaveMembers
from qconvert.plan.plan import Plan, RowSlice, Unit, rows_within, whole
from qconvert.plan.recipe import FUSIONS
from qconvert.plan.state import Compiled


def fuse(state: Compiled) -> Compiled:
    """Stack the linears of each fusion that the recipe names, where all members are stored.

    Raises BadRecipe where there is nothing to stack and nothing else was asked for.
    """
    recipe, architecture = state.request.recipe, state.architecture
    if not recipe.fuse:
        return state
    wanted = {role for name in recipe.fuse for role in FUSIONS[name]}
    entries = [e for e in architecture.fused.values() if e.fusion.role in wanted and not e.fusion.layout]
    plan = stack_members(state.plan, entries)
    if len(plan.units) == len(state.plan.units) and recipe.scheme is None:
        named = " and ".join(recipe.fuse)
        if not any(entry.fusion.role in wanted for entry in architecture.fused.values()):
            raise BadRecipe(
                f"{architecture.family.name}: no linears that could be stacked ({named})",
                "this family has none; `qconvert inspect` lists its linears",
            )
        raise BadRecipe(
            f"nothing left to fuse ({named})",
            "this checkpoint is already fused; `qconvert unfuse` takes it apart",
        )
    return state.with_plan(plan)


def unfuse(state: Compiled) -> Compiled:
    """Cut the fused tensors of the asked roles; BadRecipe where there are none."""
    roles, architecture = state.request.unfuse, state.architecture
    if not roles:
        return state

    def chosen(entry: FusedParameter) -> bool:
        return entry.fusion.role in roles and not entry.fusion.layout

    entries = [architecture.fused[name] for name in state.outputs if name in architecture.fused]
    if not any(map(chosen, entries)):
        if entries and all(entry.fusion.layout for entry in entries):
            raise BadRecipe(
                f"{entries[0].whole.name}: {entries[0].fusion.layout} holds experts only in such stacks",
                "convert --to another layout, or to bf16, takes them apart",
            )
        raise BadRecipe("no fused linears in this checkpoint", "`qconvert inspect` shows what it holds")
    return state.with_plan(cut_where(state.plan, architecture, chosen))


def stack_members(plan: Plan, entries: Iterable[FusedParameter]) -> Plan:
    """Stack the members of each of these fused tensors where all of them are there."""
    units = {unit.output.name: unit for unit in plan.units}
    wholes: dict[str, Unit] = {}  # in the places of their first members
    for entry in entries:
        if all(member.name in units for member in entry.members):
            parts = [units.pop(member.name) for member in entry.members]
            wholes[parts[0].output.name] = _stack(parts, entry)
    left = units | wholes
    return replace(plan, units=tuple(left[u.output.name] for u in plan.units if u.output.name in left))


def _stack(parts: Sequence[Unit], entry: FusedParameter) -> Unit:
    encodings = {part.output.encoding for part in parts}
    if len(encodings) > 1:
        named = ", ".join(f"{part.output.name} {part.output.encoding.label}" for part in parts)
        raise BadRecipe(
            f"{entry.whole.name}: its parts have different forms ({named})",
            "quantize the parts alike, or fuse the 16-bit model first",
        )
    odd = next((part for part in parts if part.ops != parts[0].ops), None)
    if odd is not None:
        raise BadRecipe(
            f"{entry.whole.name}: {odd.output.name} is not made as {parts[0].output.name} is, and one tensor "
            "would hold both",
            "choose a layout that holds them apart, or leave out --undo-act-order",
        )
    inputs = _joined(
        s for run in entry.runs for s in rows_within(parts[run.member].inputs, run.start, run.stop)
    )
    ops = parts[0].ops
    if entry.fusion.interleaved:
        ops = (*ops, InterleaveMembers(2 * parts[0].output.rows))
    return Unit(inputs, ops, ModelTensor(entry.whole.name, entry.whole.shape, parts[0].output.encoding))


def _joined(pieces: Iterable[RowSlice]) -> tuple[RowSlice, ...]:
    """The pieces, those that continue one another as one."""
    joined: list[RowSlice] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before is not None and before.goes_on(piece):
            joined[-1] = before._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def cut_where(plan: Plan, architecture: Architecture, chosen: Callable[[FusedParameter], bool]) -> Plan:
    """Cut the fused tensors that `chosen` says into their members: names, shapes and bytes as before."""
    fused = {name: entry for name, entry in architecture.fused.items() if chosen(entry)}
    if fused.keys().isdisjoint([unit.output.name for unit in plan.units]):
        return plan
    units: list[Unit] = []
    for unit in plan.units:
        entry = fused.get(unit.output.name)
        units.extend(_cut(unit, entry) if entry else [unit])
    return replace(plan, units=tuple(units))


def unstack_experts(plan: Plan, architecture: Architecture) -> Plan:
    """Cut every 3-D stack of experts into one linear for each, as layouts of linears need it."""
    return cut_where(plan, architecture, lambda entry: entry.fusion.per_expert)


def _cut(unit: Unit, entry: FusedParameter) -> list[Unit]:
    ops = tuple(op for op in unit.ops if not op.joins_members)
    if len(ops) < len(unit.ops):  # stacked in this very plan: its inputs are not interleaved yet
        entry = replace(entry, fusion=replace(entry.fusion, interleaved=False))
    return [
        Unit(tuple(inputs), ops, ModelTensor(part.name, part.shape, unit.output.encoding))
        for part, inputs in zip(entry.members, rows_of_parts(unit.inputs, entry), strict=True)
    ]


def rows_of_parts(inputs: Sequence[RowSlice], entry: FusedParameter) -> list[list[RowSlice]]:
    """The rows of each part of a fused tensor that these inputs stack, in the order of the part's rows."""
    found: list[list[RowSlice]] = [[] for _ in entry.members]
    for part, start, stop, step in _spans(entry):
        found[part].extend(rows_within(inputs, start, stop, step))
    return found


def rows_of_part(tensor: ModelTensor, entry: FusedParameter, part: int) -> list[RowSlice]:
    """The rows of one part of a stored fused tensor."""
    spans = (span for number, *span in _spans(entry) if number == part)
    return [piece for span in spans for piece in rows_within([whole(tensor)], *span)]


def _spans(entry: FusedParameter) -> Iterator[tuple[int, int, int, int]]:
    """For every run of a fused tensor: its part, and the first, last and step of its rows in the whole."""
    for run, rows in zip(entry.runs, entry.rows, strict=True):
        yield run.member, rows.start, rows.stop, rows.step
