"""A checkpoint as the decoder wants it: whole weights by role (see `runtime.weight_source.Weights`)."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import rows_of
from qconvert.core.encodings import ModelTensor
from qconvert.core.values import Value
from qconvert.models import FusedParameter

_Key = tuple[str, int | None, str]


class CheckpointWeights:
    """Reads weights by role and layer; each call reads anew, nothing is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Hold the checkpoint's tensors against its architecture; raises what `bind` raises."""
        binding = checkpoint.bind()
        self._reader = checkpoint.reader
        self._tensors: dict[_Key, tuple[ModelTensor, int, int]] = {}
        for name, parameter in binding.parameters.items():
            tensor = checkpoint.tensors[name]
            self._tensors[parameter.role, parameter.layer, parameter.param] = tensor, 0, tensor.rows
            entry = binding.architecture.fused.get(name)
            if entry is not None and entry.fusion.per_expert and not entry.fusion.interleaved:
                self._tensors |= _experts(tensor, entry)

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        """All rows of a weight or bias; None when the model has no such tensor."""
        found = self._tensors.get((role, layer, kind))
        return None if found is None else self._reader.read(*found)


def _experts(
    stack: ModelTensor, entry: FusedParameter
) -> Iterator[tuple[_Key, tuple[ModelTensor, int, int]]]:
    """Where each part of a stack of experts has its rows: one part after the other."""
    start = 0
    for part in entry.members:
        stop = start + rows_of(part.shape)
        yield (part.role, part.layer, part.param), (stack, start, stop)
        start = stop
