"""Prices what units of several plans make of the same weights: exact bytes, and nats per token.

Whatever a container, a layout or a scheme does to a weight is in its unit; so the units themselves are run,
block by block of rows, and what comes out is compared with the plain numbers that went into its encoder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qconvert.calibrate.sensitivity import Sensitivity
from qconvert.convert.job import Job
from qconvert.convert.runner import BLOCK_BYTES, Block, bounded, cut, gather, rows_read, rows_statistics
from qconvert.convert.written_rows import parameters_of, written_rows
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
    weights = _weights(jobs)
    prices: dict[tuple[str, str], float] = {}
    for sensitivity in sensitivities:
        for weight in weights:
            if weight.layer == sensitivity.layer:
                prices |= {(weight.name, label): c for label, c in _prices(weight, jobs, sensitivity)}
    return _groups(jobs, weights, prices)


def sized_groups(jobs: Mapping[str, Job]) -> list[Group]:
    """The same groups and bytes, all options for nothing: what is known before a text is run."""
    return _groups(jobs, _weights(jobs), defaultdict(float))


def _groups(
    jobs: Mapping[str, Job], weights: Sequence[_Weight], prices: Mapping[tuple[str, str], float]
) -> list[Group]:
    compiled, by_name = next(iter(jobs.values())).compiled, {weight.name: weight for weight in weights}
    alone = [(name,) for name in by_name]
    names = alone if compiled.is_gguf else alike(list(by_name), compiled.architecture)
    return [_group(members, by_name, jobs, prices) for members in names]


def _group(
    members: tuple[str, ...],
    weights: Mapping[str, _Weight],
    jobs: Mapping[str, Job],
    prices: Mapping[tuple[str, str], float],
) -> Group:
    def option(label: str, job: Job) -> Option:
        outputs = [weights[name].units[label].output for name in members]
        nbytes = sum(spec.nbytes for output in outputs for spec in job.container.layout.stored_arrays(output))
        return Option(label, nbytes, sum(prices[name, label] for name in members))

    return Group(members[0], members, tuple(option(label, job) for label, job in jobs.items()))


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


def _prices(
    weight: _Weight, jobs: Mapping[str, Job], sensitivity: Sensitivity
) -> Iterator[tuple[str, float]]:
    """The cost of every option; those that are made alike are made once."""
    known: dict[tuple[object, ...], float] = {}
    for label, unit in weight.units.items():
        if not unit.quantizes:
            yield label, 0.0
            continue
        made = (unit.ops, unit.output.encoding, unit.inputs)
        if made not in known:
            known[made] = _price(weight, unit, jobs[label], sensitivity)
        yield label, known[made]


def _price(weight: _Weight, unit: Unit, job: Job, sensitivity: Sensitivity) -> float:
    if any(op.needs_reduction for op in unit.ops):
        raise BadRecipe(
            f"{unit.output.name}: {unit.output.encoding.label} takes its scales from the whole tensor",
            "choose among integers, or GGUF types; this one cannot be priced",
        )
    architecture, options = job.source.checkpoint.architecture, job.options
    reader, source = job.source.checkpoint.reader, job.compiled.request.statistics
    step = 1 if weight.layer is None else max(1, unit.output.rows // MOST_ROWS)
    squares = {role: _squares(unit, role, architecture, sensitivity) for role in weight.roles}
    shares = {
        role: float(each_R.sum()) / (float(each_R[::step].sum()) or 1.0) for role, each_R in squares.items()
    }

    def price(block: Block) -> float:
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
        costs = (
            shares[role] * sensitivity.cost(delta_RI, squares_R[rows], role)
            for role, squares_R in squares.items()
        )
        return sum(costs)

    blocks = cut(unit, job.container.layout, min(BLOCK_BYTES, options.max_memory // (2 * options.jobs)))
    # In the order of the blocks, so that the sum does not depend on the threads.
    done: dict[int, float] = {}

    def keep(block: Block) -> tuple[int, float]:
        return block.start, price(block)

    done.update(bounded(blocks, keep, options.jobs, options.max_memory))
    return sum(done[start] for start in sorted(done))


def _every(
    step: int, first: int, value: Value, given: Sequence[RowStatistics]
) -> tuple[Value, tuple[RowStatistics, ...]]:
    """Every `step`-th row from `first` on, and the statistics of those."""

    def before(row: int) -> int:
        return max(0, -(-(row - first) // step))

    runs = (replace(each, first=before(each.first), last=before(each.last)) for each in given)
    picked = tuple(np.ascontiguousarray(array[first::step]) for array in value.arrays)
    return value.with_arrays(picked), tuple(run for run in runs if run.first < run.last)


def _squares(unit: Unit, role: str, architecture: Architecture, sensitivity: Sensitivity) -> np.ndarray:
    """E[g_o^2] of every row of a unit's output, float32 [R]; 0 of rows of zeros."""
    rows = written_rows(unit, architecture, 0, unit.output.rows)
    squares_R = np.zeros(unit.output.rows, np.float32)
    for number, parameter in enumerate(rows.parameters):
        own_R = rows.parameter_R == number
        if own_R.any():
            squares_R[own_R] = _squares_of(parameter, role, sensitivity)[rows.row_R[own_R]]
    return squares_R


def _squares_of(parameter: Parameter, role: str, sensitivity: Sensitivity) -> np.ndarray:
    """Of one weight; of an expert that no token was routed to, the mean of the others."""
    key = StatisticsKey(role) if role in _TABLES else input_key(parameter)
    found = sensitivity.outputs.get(key)
    if found is not None:
        return found
    others = [each for k, each in sensitivity.outputs.items() if k.role == key.role]
    squares_O: np.ndarray = np.mean(others or [np.zeros(parameter.shape[0])], axis=0)
    return squares_O.astype(np.float32)
