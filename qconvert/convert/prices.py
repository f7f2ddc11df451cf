"""Prices what units of several plans make of the same weights: exact bytes, and nats per token.

Whatever a container, a layout or a scheme does to a weight is in its unit; so the units themselves are run,
block by block of rows, and what comes out is compared with the plain numbers that went into its encoder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qconvert.calibrate.sensitivity import Change, Sensitivity
from qconvert.convert.blocks import Block, bounded
from qconvert.convert.job import Job
from qconvert.convert.runner import BLOCK_BYTES, cut, gather, rows_read, rows_statistics
from qconvert.convert.written_rows import WrittenRows, parameters_of, written_rows
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor
from qconvert.core.statistics import RowStatistics, StatisticsKey
from qconvert.core.values import Value
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Parameter
from qconvert.models.statistics_keys import input_key
from qconvert.plan.budget import Group, Option, alike
from qconvert.plan.plan import Unit
from qconvert.quant.dequantize import numbers

# Rows of a linear that are encoded to price it, evenly spread; their share of E[g_o^2] says what the others
# cost. A row's cost varies by about its own size, so that of 2048 rows is known within some 3 %.
MOST_ROWS = 2048
_HEADS = ("lm_head.weight", "output.weight")
_TABLES = ("embed", "lm_head")


Costs = dict[tuple[tuple[str, ...], str], float]
"""Nats per token by the names of a group and the label of an option."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """An output that some plan quantizes: its unit in every plan, by label, and the roles it serves."""

    name: str
    units: Mapping[str, Unit]
    roles: tuple[str, ...]
    layer: int | None


def priced_groups(jobs: Mapping[str, Job], sensitivities: Iterable[Sensitivity]) -> list[Group]:
    """The weights that some of the jobs quantize, grouped as they must be alike; an option for every job.

    The jobs are of one model and differ in the encodings of its weights; their statistics weigh the errors
    of encoders. Raises BadRecipe for an operation that depends on more than its own rows.
    """
    return grouped(jobs, priced(jobs, sensitivities, list(jobs)))


def priced(jobs: Mapping[str, Job], sensitivities: Iterable[Sensitivity], labels: Sequence[str]) -> Costs:
    """What the options of these labels cost, of all groups of weights that some of the jobs quantize."""
    weights = {weight.name: weight for weight in _weights(jobs)}
    names, costs = _members(jobs, weights), Costs()
    for sensitivity in sensitivities:
        for members in names:
            if weights[members[0]].layer == sensitivity.layer:
                changes = [_changes(weights[name], jobs, labels, sensitivity) for name in members]
                for label in labels:
                    costs[members, label] = sum((own[label] for own in changes), Change()).cost
    return costs


def grouped(jobs: Mapping[str, Job], costs: Costs) -> list[Group]:
    """The groups, with the exact bytes of every option, and what it costs."""
    return _groups(jobs, {weight.name: weight for weight in _weights(jobs)}, costs)


def sized_groups(jobs: Mapping[str, Job]) -> list[Group]:
    """The same groups and bytes, all options at price 0: what a plan needs before a text is run."""
    return grouped(jobs, defaultdict(float))


def _members(jobs: Mapping[str, Job], weights: Mapping[str, _Weight]) -> list[tuple[str, ...]]:
    """The names of weights that are to be alike; in a GGUF, each is by itself."""
    compiled = next(iter(jobs.values())).compiled
    return [(name,) for name in weights] if compiled.is_gguf else alike(list(weights), compiled.architecture)


def _groups(jobs: Mapping[str, Job], weights: Mapping[str, _Weight], costs: Costs) -> list[Group]:
    def option(members: tuple[str, ...], label: str, job: Job) -> Option:
        outputs = [weights[name].units[label].output for name in members]
        nbytes = sum(spec.nbytes for output in outputs for spec in job.container.layout.stored_arrays(output))
        return Option(label, nbytes, costs[members, label])

    return [
        Group(members[0], members, tuple(option(members, label, job) for label, job in jobs.items()))
        for members in _members(jobs, weights)
    ]


def _weights(jobs: Mapping[str, Job]) -> list[_Weight]:
    units = {label: {u.output.name: u for u in job.compiled.plan.units} for label, job in jobs.items()}
    first = next(iter(jobs.values()))
    architecture, outputs = first.source.checkpoint.architecture, first.compiled.outputs
    found: list[_Weight] = []
    for name in outputs:
        own = {label: of[name] for label, of in units.items()}
        if any(unit.quantizes for unit in own.values()):
            parameter = parameters_of(own[next(iter(own))].source, architecture)[0]
            found.append(_Weight(name, own, _roles(name, parameter, outputs), parameter.layer))
    return found


def _roles(name: str, parameter: Parameter, outputs: Mapping[str, ModelTensor]) -> tuple[str, ...]:
    """What a weight is used as: a table that is embedding and head at once has two uses."""
    if parameter.role not in _TABLES:
        return (parameter.group,)
    apart = [head for head in _HEADS if head in outputs]
    if apart:
        return ("lm_head",) if name in apart else ("embed",)
    return _TABLES


def _changes(
    weight: _Weight, jobs: Mapping[str, Job], labels: Sequence[str], sensitivity: Sensitivity
) -> dict[str, Change]:
    """What the options of these labels do; those that are made alike are made once."""
    found: dict[str, Change] = {}
    known: dict[tuple[object, ...], Change] = {}
    for label in labels:
        unit = weight.units[label]
        if not unit.quantizes:
            found[label] = Change()
            continue
        made = (unit.ops, unit.output.encoding, unit.inputs)
        if made not in known:
            known[made] = _change(weight, unit, jobs[label], sensitivity)
        found[label] = known[made]
    return found


def _change(weight: _Weight, unit: Unit, job: Job, sensitivity: Sensitivity) -> Change:
    if any(op.needs_reduction for op in unit.ops):
        raise BadRecipe(
            f"{unit.output.name}: {unit.output.encoding.label} takes its scales from the whole tensor",
            "choose among integers, or GGUF types; this one cannot be priced",
        )
    architecture, options = job.source.checkpoint.architecture, job.options
    reader, source = job.source.checkpoint.reader, job.compiled.request.statistics
    step = 1 if weight.layer is None else max(1, unit.output.rows // MOST_ROWS)
    uses = [_use(unit, role, architecture, sensitivity, step) for role in weight.roles]

    def change(block: Block) -> Change:
        start, stop = block.start, block.stop
        value, _ = gather(unit.inputs, reader, rows_read(unit, start), rows_read(unit, stop))
        given = rows_statistics(unit, start, stop, source) if source is not None else ()
        for op in unit.ops:
            if op.quantizes:
                value, given = _every(step, -start % step, value, given)
                made, _ = op.apply(value, given)
                break
            value, _ = op.apply(value)
        delta_RI = numbers(value, DType.F32).rows_RI - numbers(made, DType.F32).rows_RI
        rows = slice(start + -start % step, stop, step)
        return sum((use.change(delta_RI, rows, sensitivity) for use in uses), Change())

    blocks = cut(unit, job.container.layout, min(BLOCK_BYTES, options.max_memory // (2 * options.jobs)))
    # In the order of the blocks, so that the sum does not depend on the threads.
    done: dict[int, Change] = {}

    def keep(block: Block) -> tuple[int, Change]:
        return block.start, change(block)

    done.update(bounded(blocks, keep, options.jobs, options.max_memory))
    return sum((done[start] for start in sorted(done)), Change())


def _every(
    step: int, first: int, value: Value, given: Sequence[RowStatistics]
) -> tuple[Value, tuple[RowStatistics, ...]]:
    """Every `step`-th row from `first` on, and the statistics of those."""

    def before(row: int) -> int:
        return max(0, -(-(row - first) // step))

    runs = (replace(each, first=before(each.first), last=before(each.last)) for each in given)
    picked = tuple(np.ascontiguousarray(array[first::step]) for array in value.arrays)
    return value.with_arrays(picked), tuple(run for run in runs if run.first < run.last)


@dataclass(frozen=True, slots=True)
class _Use:
    """A role that a unit's output serves: the weights whose rows it has, and E[g_o^2] of each, float32 [R].

    A row of those that are looked at stands for `share` rows.
    """

    role: str
    rows: WrittenRows
    squares_R: np.ndarray
    share: float

    def change(self, delta_RI: np.ndarray, rows: slice, sensitivity: Sensitivity) -> Change:
        """What errors in these rows of the output do."""
        squares_R = self.squares_R[rows]
        if sensitivity.layer is None:
            return Change(unsampled=self.share * sensitivity.cost(delta_RI, squares_R, self.role))
        found, number_R, row_R = Change(), self.rows.parameter_R[rows], self.rows.row_R[rows]
        for number in np.unique(number_R[number_R >= 0]):
            own_R = number_R == number
            of = (delta_RI[own_R], row_R[own_R], squares_R[own_R], self.share)
            found += sensitivity.change(input_key(self.rows.parameters[number]), *of)
        return found


def _use(unit: Unit, role: str, architecture: Architecture, sensitivity: Sensitivity, step: int) -> _Use:
    rows = written_rows(unit, architecture, 0, unit.output.rows)
    squares_R = np.zeros(unit.output.rows, np.float32)
    for number, parameter in enumerate(rows.parameters):
        own_R = rows.parameter_R == number
        if own_R.any():
            squares_R[own_R] = _squares_of(parameter, role, sensitivity)[rows.row_R[own_R]]
    share = float(squares_R.sum()) / (float(squares_R[::step].sum()) or 1.0)
    return _Use(role, rows, squares_R, share)


def _squares_of(parameter: Parameter, role: str, sensitivity: Sensitivity) -> np.ndarray:
    """Of one weight; of an expert that no token was routed to, the mean of the others."""
    key = StatisticsKey(role) if role in _TABLES else input_key(parameter)
    found = sensitivity.outputs.get(key)
    if found is not None:
        return found
    others = [each for k, each in sensitivity.outputs.items() if k.role == key.role]
    squares_O: np.ndarray = np.mean(others or [np.zeros(parameter.shape[0])], axis=0)
    return squares_O.astype(np.float32)
