"""Reads a checkpoint's weights by role, as the decoder needs them (`runtime.weight_source.Weights`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from qconvert.checkpoint.open import Checkpoint
from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.protocols import Rows
from qconvert.core.values import DenseRows, Value
from qconvert.formats.layouts.config_checks import base_of
from qconvert.models import FusedParameter
from qconvert.quant.casts import cast

Activations = Literal["as-loaded", "exact", "int8"]
AS_LOADED: Activations = "as-loaded"
EXACT: Activations = "exact"
INT8: Activations = "int8"
_Key = tuple[str, int | None, str]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Rows of a stored tensor: the ranges, one after the other, that make a parameter."""

    tensor: ModelTensor
    ranges: tuple[range, ...]


class CheckpointWeights:
    """Reads weights by role and layer; each call reads again, nothing is kept.

    Fused tensors whose members follow one another are given whole (`attn.qkv`, `mlp.gate_up`, an expert's
    `gate_up`); members that are interleaved are taken apart.
    """

    def __init__(
        self, checkpoint: Checkpoint, reader: Rows | None = None, *, activations: Activations = AS_LOADED
    ) -> None:
        """Hold the checkpoint's tensors against its architecture; raises what `bind` raises.

        `reader` gives their rows, where it is not the checkpoint's own. `activations` says whether `inputs`
        tells what loaders quantize ("as-loaded"), nothing ("exact"), or fast reading ("int8"): what loaders
        quantize, and the inputs of other quantized weights as `INT8_GROUPS`.
        """
        binding = checkpoint.bind()
        self._checkpoint, self._activations = checkpoint, activations
        self._reader = reader or checkpoint.reader
        self._stored: dict[_Key, _Stored] = {}
        for name, parameter in binding.parameters.items():
            tensor = checkpoint.tensors[name]
            entry = binding.architecture.fused.get(name)
            if entry is None or _in_order(entry):
                key = parameter.role, parameter.layer, parameter.param
                self._stored[key] = _Stored(tensor, (range(tensor.rows),))
            else:
                self._stored |= _members(tensor, entry)

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        """All rows of a weight or bias; None when the model has no such tensor."""
        found = self._stored.get((role, layer, kind))
        if found is None:
            return None
        return _joined([_read(self._reader, found.tensor, rows) for rows in found.ranges])

    def inputs(self, role: str, layer: int | None = None) -> InputQuantization | None:
        """How inputs of a linear are quantized, with its stored numbers; None for exact ones."""
        found = self._stored.get((role, layer, "weight"))
        if role == "lm_head" and found is None and self._activations == INT8:  # the embedding is the head
            tied = self._stored.get(("embed", None, "weight"))
            return INT8_GROUPS if tied is not None and _is_quantized(tied.tensor) else None
        if found is None or self._activations == EXACT:
            return None
        scheme = self._checkpoint.activations(found.tensor)
        if scheme is None:
            fast = self._activations == INT8 and _is_quantized(found.tensor)
            return INT8_GROUPS if fast else None
        stored = [_number(self._checkpoint, f"{base_of(found.tensor)}.{name}") for name in scheme.stored]
        if scheme.inverse and stored:
            stored[0] = float(np.float32(1) / np.float32(stored[0]))
        return InputQuantization(scheme, *stored)

    @property
    def activations_in_words(self) -> str:
        """What linears multiply: `exact`, or what inputs are rounded to, or would be by loaders."""
        schemes = (self._checkpoint.activations(stored.tensor) for stored in self._stored.values())
        labels = " and ".join(sorted({scheme.label for scheme in schemes if scheme is not None}))
        if self._activations == INT8 and any(
            _is_quantized(stored.tensor) for stored in self._stored.values()
        ):
            fast = f"{INT8_GROUPS.scheme.label} for fast reading"
            return f"{labels}, as loaders round them, else {fast}" if labels else fast
        if not labels:
            return EXACT
        exact = self._activations == EXACT
        return f"exact, though loaders use {labels}" if exact else f"{labels}, as loaders round them"

    def rows(self, role: str, layer: int | None = None) -> StoredRows | None:
        """The rows of a weight, to be read when they are needed; None when the model has no such tensor."""
        found = self._stored.get((role, layer, "weight"))
        return None if found is None else StoredRows(found.tensor, found.ranges, self._reader)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a stored tensor, the ranges one after the other, as one weight (`runtime.RowSource`)."""

    tensor: ModelTensor
    ranges: tuple[range, ...]
    reader: Rows

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.ranges)), self.tensor.width

    def read(self, start: int, stop: int) -> Value:
        """Rows [start, stop) of the weight."""
        parts, first = [], 0
        for rows in self.ranges:
            part = rows[max(0, start - first) : max(0, stop - first)]
            if part:
                parts.append(_read(self.reader, self.tensor, part))
            first += len(rows)
        return _joined(parts)


def _is_quantized(tensor: ModelTensor) -> bool:
    """Whether a weight is of codes."""
    return not isinstance(tensor.encoding, Unquantized)


def _joined(parts: list[Value]) -> Value:
    columns = zip(*(part.arrays for part in parts), strict=True)
    return parts[0] if len(parts) == 1 else parts[0].with_arrays(tuple(map(np.concatenate, columns)))


def _read(reader: Rows, tensor: ModelTensor, rows: range) -> Value:
    value = reader.read(tensor, rows.start, rows[-1] + 1)
    if rows.step == 1:
        return value
    return value.with_arrays(tuple(np.ascontiguousarray(a[:: rows.step]) for a in value.arrays))


def _in_order(entry: FusedParameter) -> bool:
    """Whether each member's rows lie together, so that the whole is a weight of its own."""
    fusion = entry.fusion
    return not fusion.per_expert and not fusion.interleaved and len(entry.runs) == len(entry.members)


def _members(stack: ModelTensor, entry: FusedParameter) -> dict[_Key, _Stored]:
    """Where each member of a fused tensor has its rows."""
    ranges: dict[int, list[range]] = {}
    for run, rows in zip(entry.runs, entry.rows, strict=True):
        ranges.setdefault(run.member, []).append(rows)
    members = ((entry.members[number], tuple(found)) for number, found in ranges.items())
    return {(p.role, p.layer, p.param): _Stored(stack, found) for p, found in members}


def _number(checkpoint: Checkpoint, name: str) -> float:
    """The only number of an array."""
    dtype, rows = checkpoint.files.specs[name].dtype, checkpoint.files.read(name, 0, 1)
    return float(cast(DenseRows(rows, dtype), DType.F32)[0].rows_RI.item() if dtype.is_float else rows.item())
