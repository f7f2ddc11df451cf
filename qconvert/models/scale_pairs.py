"""Finds the inputs of a model's linears whose channels may be scaled, with all that makes and reads them.

Whatever makes an input channel by channel (a norm, or a linear whose outputs are only multiplied on their
way) may make each channel smaller by a factor that the columns of every linear that reads it compensate:
the model computes the same, and columns that matter lose less when they are quantized (AWQ, arXiv
2306.00978). Which these are is declared by the families (`ScalePair`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.models.architecture import Architecture
from qconvert.models.expanded import Parameter
from qconvert.models.parameters import ScalePair


@dataclass(frozen=True, slots=True)
class ScalableInput:
    """An input: `sources` (a weight, and its bias if it has one) make it, `readers` are multiplied by it.

    Channel i is row i of the sources and column i of the readers. `offset` is what the graph adds to the
    weight of a norm before it multiplies by it.
    """

    sources: tuple[Parameter, ...]
    readers: tuple[Parameter, ...]
    offset: float = 0.0

    @property
    def name(self) -> str:
        """The name of the weight that makes the input."""
        return self.sources[0].name

    @property
    def channels(self) -> int:
        return self.sources[0].shape[0]

    @property
    def by_norm(self) -> bool:
        """Whether a norm makes it, which is stored as plain numbers."""
        return self.sources[0].kind == "norm"


def scalable_inputs(architecture: Architecture) -> tuple[ScalableInput, ...]:
    """Every input of a model whose channels may be scaled, in the order of the layers.

    Every source, and every column, is in one of them at most.
    """
    by_key: _ByKey = {(p.role, p.layer, p.param): p for p in architecture.parameters.values()}
    found: list[ScalableInput] = []
    for layer in range(architecture.layers):
        experts = architecture.dimensions[layer].get("experts", 0)
        taken: set[str] = set()
        for pair in architecture.family.scale_pairs:
            if any(architecture.settings.get(key) for key in pair.unless):
                continue
            for made in _of_pair(pair, layer, experts, by_key, architecture.family.norm_offset):
                readers = tuple(reader for reader in made.readers if reader.name not in taken)
                if readers:
                    found.append(ScalableInput(made.sources, readers, made.offset))
                    taken |= {reader.name for reader in readers}
    return tuple(found)


_ByKey = Mapping[tuple[str, int | None, str], Parameter]


def _of_pair(
    pair: ScalePair, layer: int, experts: int, by_key: _ByKey, offset: float
) -> Iterator[ScalableInput]:
    for expert in range(experts) if pair.per_expert else (None,):
        source = pair.source.format(expert=expert)
        weight, bias = (by_key.get((source, layer, param)) for param in ("weight", "bias"))
        if weight is None:
            continue
        roles = [role for reader in pair.readers for role in _roles(reader, expert, experts)]
        weights = (by_key.get((role, layer, "weight")) for role in roles)
        # Heads of queries that share a head of values read one row of it as many columns.
        readers = tuple(w for w in weights if w is not None and w.shape[-1] == weight.shape[0])
        sources = (weight,) if bias is None else (weight, bias)
        yield ScalableInput(sources, readers, offset if weight.kind == "norm" else 0.0)


def _roles(reader: str, expert: int | None, experts: int) -> list[str]:
    numbers = range(experts) if expert is None else (expert,)
    return [reader.format(expert=n) for n in numbers] if "{expert}" in reader else [reader]
