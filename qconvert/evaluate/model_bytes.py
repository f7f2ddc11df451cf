"""Counts the bytes of models whose layers are read in turn: of a layer, of reading it, of the head.

Found from the headers and a few rows of every kind of weight, which are decoded as the model's own would be.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout, place_table

_PROBED = 8
"""Rows of a weight that are read to learn what a row takes."""
# Weights that are read together, which may be stored as one: that of q, k and v, that of gate and up.
_TOGETHER = re.compile(r"(attn)\.(?:q|k|v)|(mlp|mlp\.experts\.\d+|mlp\.shared)\.(?:gate|up)")

RowBytes = Callable[[str, int | None], tuple[float, float]]
"""What a row of the weight of a role in a layer takes: as stored, and as it is computed with."""


class HeadForm(Enum):
    """How heads are held while tokens are scored; the first is the fastest."""

    PLACED = "held as in a run in memory"
    STORED = "held as they are stored"
    STREAMED = "read again for every batch"


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The bytes of a model: its largest layer, what reading that takes beside it, its head by form.

    `weights` are those of all layers and the head, as they are read; `dtype` is what is computed in.
    """

    config: DecoderConfig
    dtype: torch.dtype
    layer: int
    reading: int
    heads: Mapping[HeadForm, int]
    weights: int

    @staticmethod
    def of(
        config: DecoderConfig, weights: CheckpointWeights, dtype: torch.dtype, layout: Layout
    ) -> ModelBytes:
        """Those of a checkpoint that is computed with on the CPU."""
        return _counted(config, dtype, _Probe(weights, dtype, layout))

    @staticmethod
    def of_float32(config: DecoderConfig) -> ModelBytes:
        """Those of a model whose weights are made in float32."""

        def row(role: str, layer: int | None) -> tuple[float, float]:
            nbytes = 4.0 * config.shapes[role, layer, "weight"][1]
            return nbytes, nbytes

        return _counted(config, torch.float32, row)


class _Probe:
    """Reads a few rows of every kind of weight, once; (0, 0) for one that the model does not have."""

    def __init__(self, weights: CheckpointWeights, dtype: torch.dtype, layout: Layout) -> None:
        self._weights, self._dtype, self._layout = weights, dtype, layout
        self._found: dict[Hashable, tuple[float, float]] = {}

    def __call__(self, role: str, layer: int | None) -> tuple[float, float]:
        source = self._weights.rows(role, layer)
        if source is None and (parts := _TOGETHER.fullmatch(role)):
            source = self._weights.rows("attn.qkv" if parts[1] else f"{parts[2]}.gate_up", layer)
        if source is None:
            return 0.0, 0.0
        kind = source.tensor.encoding, source.shape[1]
        if kind not in self._found:
            value = source.read(0, min(_PROBED, source.shape[0]))
            placed = place_table(value, torch.device("cpu"), self._dtype, self._layout)
            stored = sum(array.nbytes for array in value.arrays)
            self._found[kind] = stored / value.rows, placed.nbytes / value.rows
        return self._found[kind]


def _counted(config: DecoderConfig, dtype: torch.dtype, row_bytes: RowBytes) -> ModelBytes:
    layers, stored = [0.0] * config.layers, 0.0
    together: dict[tuple[int, str], float] = defaultdict(float)
    for (role, i, kind), shape in config.shapes.items():
        if i is None or kind != "weight" or len(shape) != 2:
            continue
        read, placed = row_bytes(role, i)
        layers[i] += shape[0] * placed
        stored += shape[0] * read
        parts = _TOGETHER.fullmatch(role)
        together[i, (parts[1] or parts[2]) if parts else role] += shape[0] * read
    read, placed = row_bytes("lm_head", None)
    if not placed:  # it is the embedding
        read, placed = row_bytes("embed", None)
    rows = config.shapes["embed", None, "weight"][0]
    heads = {
        # Where it is held in another form, both forms are there while it is read.
        HeadForm.PLACED: round(rows * (placed + (read if placed > read else 0))),
        HeadForm.STORED: round(rows * read),
        HeadForm.STREAMED: 0,
    }
    # As stored, and stacked or unpacked.
    reading = round(2 * max(together.values()))
    return ModelBytes(config, dtype, round(max(layers)), reading, heads, round(stored + rows * read))
