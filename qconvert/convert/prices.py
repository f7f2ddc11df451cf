"""Prices what units of several plans make of the same weights: exact bytes, and nats per token.

Whatever a container, a layout or a scheme does to a weight is in its unit; so the units themselves are run,
block by block of rows, and what comes out is compared with the plain numbers that went into its encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.calibrate.sensitivity import Sensitivity
from qconvert.convert.job import Job
from qconvert.convert.runner import BLOCK_BYTES, Block, bounded, cut, gather, rows_read, rows_statistics
from qconvert.convert.written_rows import parameters_of, written_rows
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor
from qconvert.core.statistics import InputHessian, StatisticsKey, StatisticsSource
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Parameter
from qconvert.models.statistics_keys import input_key
from qconvert.plan.budget import Group, Option, alike
from qconvert.plan.plan import Unit
from qconvert.quant.dequantize import numbers

_HEADS = ("lm_head.weight", "output.weight")
_TABLES = ("embed", "lm_head")


@dataclass(frozen=True, slots=True)
class _Weight:
    """An output that some plan quantizes: its unit in every plan, by label, and the roles it serves."""

    name: str
    units: Mapping[str, Unit]
    roles: tuple[str, ...]
    layer: int | None


def priced_groups(
    jobs: Mapping[str, Job], sensitivities: Iterable[Sensitivity], *, weighted: bool = False
) -> list[Group]:
    """The weights that some of the jobs quantize, grouped as they must be alike; an option for every job.

    The jobs are of one model and differ in the encodings of its weights. `weighted` gives encoders of units
    that name statistics the inputs' mean squares that the sensitivities hold, in place of the statistics of
    the request. Raises BadRecipe for an operation that depends on more than its own rows.
    """
    first = next(iter(jobs.values()))
    weights = _weights(jobs)
    prices: dict[tuple[str, str], float] = {}
    for sensitivity in sensitivities:
        for weight in weights:
            if weight.layer == sensitivity.layer:
                prices |= {
                    (weight.name, label): c for label, c in _prices(weight, jobs, sensitivity, weighted)
                }
    by_name = {weight.name: weight for weight in weights}
    architecture = first.compiled.architecture
    names = alike(list(by_name), architecture) if not first.compiled.is_gguf else [(n,) for n in by_name]
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


@dataclass(frozen=True, slots=True)
class _Moments:
    """The mean squares of a layer's inputs as the statistics of units."""

    sensitivity: Sensitivity

    def __contains__(self, key: object) -> bool:
        return isinstance(key, StatisticsKey) and key.role in self.sensitivity.inputs

    @property
    def record(self) -> Json:
        return {}

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        return self.sensitivity.inputs[key.role].second_moments_I

    def rounding(self, key: StatisticsKey) -> InputHessian | None:
        """None: options are priced as they are rounded without error feedback."""
        return None


def _prices(
    weight: _Weight, jobs: Mapping[str, Job], sensitivity: Sensitivity, weighted: bool
) -> Iterator[tuple[str, float]]:
    """The cost of every option; those that are made alike are made once."""
    known: dict[tuple[object, ...], float] = {}
    for label, unit in weight.units.items():
        if not unit.quantizes:
            yield label, 0.0
            continue
        made = (unit.ops, unit.output.encoding, unit.inputs)
        if made not in known:
            source = _Moments(sensitivity) if weighted else jobs[label].compiled.request.statistics
            known[made] = _price(weight, unit, jobs[label], sensitivity, source)
        yield label, known[made]


def _price(
    weight: _Weight, unit: Unit, job: Job, sensitivity: Sensitivity, source: StatisticsSource | None
) -> float:
    if any(op.needs_reduction for op in unit.ops):
        raise BadRecipe(
            f"{unit.output.name}: {unit.output.encoding.label} takes its scales from the whole tensor",
            "choose among integers, or GGUF types; this one cannot be priced",
        )
    architecture, options = job.source.checkpoint.architecture, job.options
    weights = [(role, _squares(unit, role, architecture, sensitivity)) for role in weight.roles]
    reader = job.source.checkpoint.reader

    def price(block: Block) -> float:
        start, stop = block.start, block.stop
        value, _ = gather(unit.inputs, reader, rows_read(unit, start), rows_read(unit, stop))
        given = rows_statistics(unit, start, stop, source) if source is not None else ()
        plain_RI: np.ndarray | None = None
        for op in unit.ops:
            if op.quantizes and plain_RI is None:
                plain_RI = numbers(value, DType.F32).rows_RI
            value, _ = op.apply(value, given if op.quantizes else ())
        assert plain_RI is not None
        delta_RI = plain_RI - numbers(value, DType.F32).rows_RI
        return sum(sensitivity.cost(delta_RI, squares_R[start:stop], role) for role, squares_R in weights)

    blocks = cut(unit, job.container.layout, min(BLOCK_BYTES, options.max_memory // (2 * options.jobs)))
    # In the order of the blocks, so that the sum does not depend on the threads.
    done: dict[int, float] = {}

    def keep(block: Block) -> tuple[int, float]:
        return block.start, price(block)

    done.update(bounded(blocks, keep, options.jobs, options.max_memory))
    return sum(done[start] for start in sorted(done))


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
