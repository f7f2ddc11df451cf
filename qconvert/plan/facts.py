"""Defines the facts about a source's bytes that a plan depends on; they are gathered before planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qconvert.core.activations import StoredScale
from qconvert.core.encodings import ModelTensor


@dataclass(frozen=True, slots=True)
class HeadDifference:
    """How a stored head differs from the embedding: in how many of its numbers, and by how much."""

    count: int
    differing: int
    max_abs: float


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What had to be read of a source before its conversion can be planned.

    `head` compares a stored head with the embedding, where tying is in question; `column_groups` hold the
    group of every column of weights in activation order, where that order is to be undone;
    `absorbable_divisors` are the names of NVFP4 weights whose block scales can absorb the number that
    divides them, exactly. `scales` are the arrays beside the weights that scale inputs or caches,
    `cache_format` the one that the config says caches have, "" for none.
    """

    head: HeadDifference | None = None
    column_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    absorbable_divisors: frozenset[str] = frozenset()
    scales: tuple[tuple[StoredScale, ModelTensor], ...] = ()
    cache_format: str = ""
