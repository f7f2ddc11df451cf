"""Plans: what will be read, done and written, decided from names and shapes alone.

A plan is a flat tuple of independent units. A unit makes one logical tensor: it reads row slices
of source tensors, stacks them, and applies row-wise operations. Fusing is a unit with several
inputs, un-fusing several units that share an input, tying a unit fewer, untying a unit more.
Every pass is a pure function from plan to plan; nothing here opens a file or holds a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook, Encoding, ModelTensor, Unquantized
from qconvert.core.schemes import Scheme, fitting
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Binding, FusedParameter
from qconvert.ops.rows import (
    Cast,
    CheckFinite,
    Dequantize,
    EncodeBlocks,
    InterleaveHalves,
    Op,
    Quantize,
    ResolveScales,
)
from qconvert.ops.transcode import EncodeTable


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows [start, stop) of a source tensor, or every `step`-th of them.

    With `zeros_like`, the number of a row, as many rows of zeros with that row's scales instead.
    """

    tensor: ModelTensor
    start: int
    stop: int
    step: int = 1
    zeros_like: int | None = None

    @property
    def rows(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def last(self) -> int:
        """The number of the last row, of which there must be one."""
        return range(self.start, self.stop, self.step)[-1]

    def goes_on(self, piece: RowSlice) -> bool:
        """Whether a piece begins in the tensor where this one ends, both of consecutive rows."""
        plain = self.step == piece.step == 1 and self.zeros_like is None and piece.zeros_like is None
        return plain and self.tensor is piece.tensor and self.stop == piece.start

    def within(self, first: int, stop: int, step: int = 1) -> RowSlice:
        """Rows [first, stop) of this slice, or every `step`-th of them."""
        begin = self.start + first * self.step
        last = self.start + (stop - 1) * self.step
        return replace(self, start=begin, stop=last + 1, step=self.step * step)


@dataclass(frozen=True, slots=True)
class Unit:
    """One tensor to be made: stack `inputs` by rows, apply `ops.rows` in order, write `output`."""

    inputs: tuple[RowSlice, ...]
    ops: tuple[Op, ...]
    output: ModelTensor

    @property
    def rows(self) -> int:
        """The number of rows that are read."""
        return sum(piece.rows for piece in self.inputs)

    def then(self, op: Op) -> Unit:
        """This unit with one more operation, its output's form following."""
        encoding = op.infer(self.output.encoding)
        return replace(self, ops=(*self.ops, op), output=replace(self.output, encoding=encoding))


@dataclass(frozen=True, slots=True)
class Plan:
    """Units in output order, and what is left behind: stored tensors that no unit reads."""

    units: tuple[Unit, ...]
    dropped: tuple[str, ...] = ()

    @property
    def outputs(self) -> dict[str, ModelTensor]:
        return {unit.output.name: unit.output for unit in self.units}


Pass = Callable[[Plan], Plan]


def run_passes(plan: Plan, passes: Iterable[Pass]) -> Plan:
    """Apply the passes one after another."""
    return reduce(lambda made, step: step(made), passes, plan)


def whole(tensor: ModelTensor) -> RowSlice:
    """All rows of a tensor."""
    return RowSlice(tensor, 0, tensor.rows)


def copy_of(binding: Binding) -> Plan:
    """The plan that copies every tensor except the buffers the architecture ignores.

    Tensors come in the order of the model's printed structure, unknown ones last.
    """
    fused = binding.architecture.fused
    order = {name: i for i, name in enumerate(binding.architecture.parameters)}
    order |= {name: order[entry.members[0].name] for name, entry in fused.items()}
    kept = [n for n in binding.tensors if n not in binding.dropped]
    kept.sort(key=lambda name: (order.get(name, len(order)), name))
    units = tuple(Unit((whole(binding.tensors[n]),), (), binding.tensors[n]) for n in kept)
    return Plan(units, binding.dropped)


def drop(name: str) -> Pass:
    """Leave the tensor of this name out (a head equal to its embedding)."""

    def apply(plan: Plan) -> Plan:
        units = tuple(unit for unit in plan.units if unit.output.name != name)
        return Plan(units, (*plan.dropped, name))

    return apply


def untie(embed: str, head: str) -> Pass:
    """Write the embedding a second time, as the head."""

    def apply(plan: Plan) -> Plan:
        unit = next(u for u in plan.units if u.output.name == embed)
        return replace(plan, units=(*plan.units, replace(unit, output=replace(unit.output, name=head))))

    return apply


def fuse(architecture: Architecture, fusions: Iterable[str]) -> Pass:
    """Stack the linears of each chosen fusion ("attn.qkv", "mlp.gate_up") where all are stored."""
    roles = frozenset(fusions)
    fused = architecture.fused.values()
    return stack_all([f for f in fused if f.fusion.role in roles and not f.fusion.layout])


def stack_all(entries: Iterable[FusedParameter]) -> Pass:
    """Stack the parts of each of these fused tensors where all of them are there."""

    def apply(plan: Plan) -> Plan:
        units = {unit.output.name: unit for unit in plan.units}
        for entry in entries:
            if all(part.name in units for part in entry.members):
                units = _stack(units, entry)
        return replace(plan, units=tuple(units.values()))

    return apply


def _stack(units: dict[str, Unit], entry: FusedParameter) -> dict[str, Unit]:
    parts = [units[part.name] for part in entry.members]
    encodings = {part.output.encoding for part in parts}
    if len(encodings) > 1:
        spelled = ", ".join(f"{part.output.name} {part.output.encoding.label}" for part in parts)
        raise BadRecipe(
            f"{entry.whole.name}: its parts have different forms ({spelled})",
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
        ops = (*ops, InterleaveHalves(2 * parts[0].output.rows))
    made = Unit(inputs, ops, ModelTensor(entry.whole.name, entry.whole.shape, parts[0].output.encoding))
    first, others = parts[0].output.name, {part.output.name for part in parts[1:]}
    return {
        (made.output.name if name == first else name): (made if name == first else unit)
        for name, unit in units.items()
        if name not in others
    }


def _joined(pieces: Iterable[RowSlice]) -> tuple[RowSlice, ...]:
    """The pieces, those that continue one another as one."""
    joined: list[RowSlice] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before is not None and before.goes_on(piece):
            joined[-1] = replace(before, stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def rows_within(inputs: Sequence[RowSlice], start: int, stop: int, step: int = 1) -> Iterator[RowSlice]:
    """Rows [start, stop) of the stacked inputs, or every `step`-th of them."""
    offset = 0
    for piece in inputs:
        first, last = max(start, offset), min(stop, offset + piece.rows)
        first += (start - first) % step
        if first < last:
            yield piece.within(first - offset, last - offset, step)
        offset += piece.rows


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


def unfuse(architecture: Architecture) -> Pass:
    """Cut every fused tensor back into its parts: names, shapes, dtypes and bytes as before."""
    return cut_where(architecture, lambda entry: True)


def unstack(architecture: Architecture) -> Pass:
    """Cut every 3-D stack of experts into one linear for each, as layouts of linears need it."""
    return cut_where(architecture, lambda entry: entry.fusion.per_expert)


def cut_where(architecture: Architecture, chosen: Callable[[FusedParameter], bool]) -> Pass:
    """Cut the fused tensors that `chosen` says into their parts."""

    def apply(plan: Plan) -> Plan:
        units: list[Unit] = []
        for unit in plan.units:
            entry = architecture.fused.get(unit.output.name)
            units.extend(_cut(unit, entry) if entry and chosen(entry) else [unit])
        return replace(plan, units=tuple(units))

    return apply


def _cut(unit: Unit, entry: FusedParameter) -> list[Unit]:
    ops = tuple(op for op in unit.ops if not isinstance(op, InterleaveHalves))
    if len(ops) < len(unit.ops):  # stacked in this very plan: its inputs do not take turns yet
        entry = replace(entry, fusion=replace(entry.fusion, interleaved=False))
    return [
        Unit(tuple(inputs), ops, ModelTensor(part.name, part.shape, unit.output.encoding))
        for part, inputs in zip(entry.members, rows_of_parts(unit.inputs, entry), strict=True)
    ]


def quantize(schemes: Mapping[str, Scheme], *, search: bool, scale_dtype: DType | None = None) -> Pass:
    """Quantize the named tensors; scales are stored in the tensor's own dtype unless one is given."""

    def apply(plan: Plan) -> Plan:
        return replace(plan, units=tuple(_quantized(unit) for unit in plan.units))

    def _quantized(unit: Unit) -> Unit:
        scheme = schemes.get(unit.output.name)
        if scheme is None:
            return unit
        encoding = unit.output.encoding
        assert isinstance(encoding, Unquantized), f"{unit.output.name} is already {encoding.label}"
        if encoding.dtype is DType.F64:  # the quantizer's own arithmetic is float32
            unit, encoding = unit.then(Cast(DType.F32)), Unquantized(DType.F32)
        return unit.then(Quantize(fitting(scheme, unit.output, scale_dtype or encoding.dtype), search))

    return apply


def dequantize(dtype: DType | None) -> Pass:
    """Turn every quantized tensor into plain numbers, of `dtype` or of the type it is computed to."""
    return _on_outputs(
        lambda encoding: None if isinstance(encoding, Unquantized) else Dequantize(dtype or encoding.decoded)
    )


def resolve_scales(plan: Plan) -> Plan:
    """Scales that are quantized themselves become float32 numbers, exactly."""

    def choose(encoding: Encoding) -> Op | None:
        return ResolveScales() if isinstance(encoding, Codebook) and encoding.second == "nested" else None

    return _on_outputs(choose)(plan)


def cast(dtype: DType) -> Pass:
    """Round every plain float tensor to `dtype`."""
    return _on_outputs(
        lambda encoding: (
            Cast(dtype)
            if isinstance(encoding, Unquantized) and encoding.dtype.is_float and encoding.dtype is not dtype
            else None
        )
    )


def _on_outputs(choose: Callable[[Encoding], Op | None]) -> Pass:
    def one(unit: Unit) -> Unit:
        op = choose(unit.output.encoding)
        return unit.then(op) if op else unit

    return lambda plan: replace(plan, units=tuple(one(unit) for unit in plan.units))


def rename(names: Mapping[str, str]) -> Pass:
    """Give every output the name it has in another format."""

    def one(unit: Unit) -> Unit:
        return replace(unit, output=replace(unit.output, name=names[unit.output.name]))

    return lambda plan: replace(plan, units=tuple(one(unit) for unit in plan.units))


def check_finite(plan: Plan) -> Plan:
    """Look for NaN and Inf in everything that is not quantized (quantizing looks by itself).

    Rows that are no longer those of the source are looked at before.
    """
    units = tuple(
        u
        if u.rows == u.output.rows
        and any(isinstance(op, Quantize | EncodeBlocks | EncodeTable) for op in u.ops)
        else replace(u, ops=(CheckFinite(), *u.ops))
        for u in plan.units
    )
    return replace(plan, units=units)
