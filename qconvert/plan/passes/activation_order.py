"""Removes GPTQ's act-order (`g_idx`) by permuting the rows of the linear that produces the input.

With `desc_act` every input column names its group. Sorted by group, the columns are ordinary groups over
permuted inputs, which is exact where the producer of those inputs has its rows permuted alike. The inner
features of an MLP are such inputs (rows of gate and up, read by down alone), and so are the features within
a head of values that no two query heads share. The hidden state is not: every layer reads and writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from qconvert.core.encodings import AffineInt
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Parameter
from qconvert.ops import Order, PermuteColumns, PermuteRows
from qconvert.plan.plan import Plan, Unit
from qconvert.plan.state import Compiled


@dataclass(frozen=True, slots=True)
class Refused:
    """A weight whose order nothing can take over, and why."""

    name: str
    why: str


def undo_activation_order(state: Compiled) -> Compiled:
    """Every activation order undone that can be, where that is asked for.

    Raises BadRecipe where one cannot be undone and the output cannot hold it.
    """
    if not state.request.undo_act_order:
        return state
    plan, refused, undone = undo(state.plan, state.architecture, state.facts.column_groups)
    if not refused and not undone:
        raise BadRecipe(
            "no columns in activation order (g_idx) in this checkpoint", "leave out --undo-act-order"
        )
    target = state.request.layout_target
    if refused and target is not None and target.traits.act_order:
        total = len(refused) + undone
        kept = f"{len(refused)} of {total} weights keep their g_idx:\n{by_reason(refused)}"
        return state.with_plan(plan).warn(kept)
    if refused and not state.request.allow_requantize:
        raise complain(refused, undone, target.layout if target else "gguf")
    if target is None:
        _refuse_experts(plan, state.architecture)
    return state.with_plan(plan)


def _refuse_experts(plan: Plan, architecture: Architecture) -> None:
    moved = (unit.output.name for unit in plan.units if reordered(unit))
    parameters = (architecture.parameter(name) for name in moved)
    expert = next((p.name for p in parameters if p and ".experts." in p.role), None)
    if expert is not None:
        raise BadRecipe(
            f"{expert}: each expert has an activation order of its own, and GGUF has one tensor for all",
            "--scheme TYPE --allow-requantize, without --undo-act-order",
        )


def undo(
    plan: Plan, architecture: Architecture, column_groups: Mapping[str, tuple[int, ...]]
) -> tuple[Plan, list[Refused], int]:
    """The plan with every order undone that can be, those that cannot, and how many were.

    `column_groups` hold the group of every column of the source's weights in activation order.
    """
    units = {unit.output.name: unit for unit in plan.units}
    by_role = {(p.role, p.layer, p.param): p.name for p in architecture.parameters.values()}
    refused: list[Refused] = []
    undone = 0
    for name, unit in list(units.items()):
        encoding = unit.output.encoding
        if not isinstance(encoding, AffineInt) or not encoding.act_order:
            continue
        parameter = architecture.parameter(name)
        order = _in_sequence(column_groups[unit.source.name], encoding)
        why = "" if parameter and order else "its groups are of unequal sizes"
        makers: list[str] = []
        if parameter and order:
            makers, why = _makers(parameter, order, architecture, by_role, units)
        if why:
            refused.append(Refused(name, why))
            continue
        units[name] = unit.then(PermuteColumns(order))
        rows = _order_of_rows(parameter, order, architecture)
        for maker in makers:
            units[maker] = units[maker].then(PermuteRows(rows))
        undone += 1
    return replace(plan, units=tuple(units.values())), refused, undone


def complain(refused: Iterable[Refused], undone: int, layout: str) -> BadRecipe:
    """The error for orders that stay: the first one, how many could be folded, and every one by reason."""
    listed = list(refused)
    first, total = listed[0], len(listed) + undone
    return BadRecipe(
        f"{first.name}: its columns are in activation order (g_idx), and {first.why}; {undone} of "
        f"{total} weights in activation order can be folded, not these:\n{by_reason(listed)}",
        f"--allow-requantize folds what it can and quantizes these again for {layout}, which loses twice",
    )


def by_reason(refused: Iterable[Refused]) -> str:
    """Every weight, a line for each reason and name, the layers of a name together."""
    layers: dict[tuple[str, str, str], list[int]] = {}
    for each in refused:
        before, number, after = _LAYER.split(each.name, maxsplit=1) if _LAYER.search(each.name) else ("",) * 3
        key = (each.why, before, after) if number else (each.why, each.name, "")
        layers.setdefault(key, []).extend([int(number)] if number else [])
    reasons: dict[str, list[str]] = {}
    for (why, before, after), numbers in layers.items():
        reasons.setdefault(why, []).append(f"    {before}{_ranges(numbers)}{after}")
    return "\n".join(line for why, names in reasons.items() for line in (f"  {why}:", *names))


_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def _ranges(numbers: list[int]) -> str:
    """Rising numbers in braces, runs of them as `first-last`; "" for none, one alone as it is."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{{{text}}}" if len(numbers) > 1 else text


def _in_sequence(groups: tuple[int, ...], encoding: AffineInt) -> Order:
    """The columns sorted by their groups; empty where the groups are not all of the form's size."""
    order = tuple(sorted(range(len(groups)), key=groups.__getitem__))
    size = encoding.group_size or len(groups)
    even = all(groups[column] == parameter // size for parameter, column in enumerate(order))
    return order if even else ()


def _makers(
    parameter: Parameter,
    order: Order,
    architecture: Architecture,
    by_role: Mapping[tuple[str, int | None, str], str],
    units: Mapping[str, Unit],
) -> tuple[list[str], str]:
    """The weights and biases whose rows are this weight's input, or why they cannot take the order."""
    if parameter.role.endswith(".down"):
        roles = [parameter.role.removesuffix("down") + part for part in ("gate", "up")]
    elif parameter.role == "attn.o":
        why = _crosses_heads(order, architecture)
        if why:
            return [], why
        roles = ["attn.v"]
    else:
        return [], "its input is the hidden state, which every layer shares"
    names = [by_role.get((role, parameter.layer, part)) for role in roles for part in ("weight", "bias")]
    held = [name for name in names if name in units]
    if not any(by_role.get((role, parameter.layer, "weight")) in held for role in roles):
        return [], "the linears that make its input are stored fused (`qconvert unfuse` first)"
    return [name for name in held if name], ""


def _heads(architecture: Architecture) -> tuple[int, int]:
    settings = architecture.settings
    heads = int(settings["num_attention_heads"])
    return heads, int(settings.get("num_key_value_heads") or heads)


def _crosses_heads(order: Order, architecture: Architecture) -> str:
    """Why the rows of v cannot follow this order of the columns of o, "" where they can."""
    heads, kv_heads = _heads(architecture)
    size = len(order) // heads
    inside = [
        tuple(column - head * size for column in order[head * size : (head + 1) * size])
        for head in range(heads)
    ]
    if any(not 0 <= offset < size for offsets in inside for offset in offsets):
        return f"it moves inputs from one of {heads} heads to another"
    shared = heads // kv_heads
    if any(inside[head] != inside[head - head % shared] for head in range(heads)):
        return f"the {shared} heads of queries that share a head of values have different orders"
    return ""


def _order_of_rows(parameter: Parameter | None, order: Order, architecture: Architecture) -> Order:
    """The order of the rows that make the inputs: of v's heads, one for all that share it."""
    if parameter is None or parameter.role != "attn.o":
        return order
    heads, kv_heads = _heads(architecture)
    size, shared = len(order) // heads, heads // kv_heads
    return tuple(
        kv_head * size + order[(kv_head * shared) * size + i] - kv_head * shared * size
        for kv_head in range(kv_heads)
        for i in range(size)
    )


def orders_of(unit: Unit) -> tuple[Order, Order]:
    """The orders of a unit's rows and of its columns, as numbers of the source's; empty where they stay."""
    rows = next((op.row_order for op in unit.ops if op.row_order), ())
    return rows, next((op.column_order for op in unit.ops if op.column_order), ())


def reordered(unit: Unit) -> str:
    """Which side of a unit's output is in another order than the source's: "rows", "columns", both or ""."""
    sides = zip(("rows", "columns"), orders_of(unit), strict=True)
    return " and ".join(side for side, order in sides if order)
