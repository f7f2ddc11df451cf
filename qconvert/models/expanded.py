"""Defines what a family's table becomes for one model: parameters by name, and what fusions make of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from sys import intern
from typing import NamedTuple

from qconvert.core.config_json import divide
from qconvert.core.dtypes import rows_of
from qconvert.models.parameters import Fusion


class Parameter(NamedTuple):
    """One tensor of a model: its role, layer (None outside the layers), and exact shape.

    `part` is "weight" or "bias"; `kind` is the template's kind for weights and "bias" for biases.
    `transposed` weights are stored with their last two dimensions exchanged.
    """

    name: str
    role: str
    layer: int | None
    param: str
    kind: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    transposed: bool = False

    @property
    def module(self) -> str:
        return self.name.rsplit(".", 1)[0]

    @property
    def group(self) -> str:
        """The role without the expert's number: `mlp.experts.up` for `mlp.experts.7.up`."""
        return group_of(self.role)


# Of a tuple of its fields, without a call of Python's: there are half a million.
_parameter: Callable[[tuple[object, ...]], Parameter] = partial(tuple.__new__, Parameter)


@dataclass(frozen=True, slots=True)
class AlikeParameters:
    """Parameters that differ in the number of their expert alone, `{expert}` in their names and roles."""

    name: str
    role: str
    layer: int | None
    param: str
    kind: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    transposed: bool = False

    def of(self, experts: int) -> list[Parameter]:
        """That of each of so many experts; one alone where the name has no number."""
        layer, param, kind, shape = self.layer, self.param, self.kind, self.shape
        dims, transposed = self.dims, self.transposed
        if "{expert}" not in self.name:
            return [Parameter(intern(self.name), self.role, layer, param, kind, shape, dims, transposed)]
        before, _, after = self.name.partition("{expert}")
        roles = roles_of(self.role, experts)
        names = [intern(f"{before}{number}{after}") for number in range(experts)]  # as headers have them
        rest = map(repeat, (layer, param, kind, shape, dims, transposed))
        return list(map(_parameter, zip(names, roles, *rest, strict=False)))


@cache
def roles_of(template: str, experts: int) -> tuple[str, ...]:
    """The roles of the weights of so many experts: the same texts for all layers."""
    return tuple(template.format(expert=expert) for expert in range(experts))


@cache
def group_of(role: str) -> str:
    """The role without the expert's number."""
    return re.sub(r"(?<=\.experts)\.\d+", "", role)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) of a member, in the order they have in the fused tensor."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A fused tensor, the parameters it holds, and the order of their rows.

    In an interleaved fusion the rows of two members of a pair alternate within their runs.
    """

    whole: Parameter
    members: tuple[Parameter, ...]
    groups: int
    fusion: Fusion

    @property
    def runs(self) -> tuple[Run, ...]:
        """The row runs, in order, of the members in so many groups."""
        shares = [divide(rows_of(part.shape), self.groups, part.dims[0], "groups") for part in self.members]
        return tuple(
            Run(i, group * share, (group + 1) * share)
            for group in range(self.groups)
            for i, share in enumerate(shares)
        )

    @property
    def rows(self) -> Iterator[range]:
        """Yields the rows of the fused tensor that each run takes, in the order of the runs."""
        offset = 0
        for run in self.runs:
            count = run.stop - run.start
            if self.fusion.interleaved:
                second = run.member % 2
                start = offset - second * count
                yield range(start + second, start + 2 * count, 2)
            else:
                yield range(offset, offset + count)
            offset += count
