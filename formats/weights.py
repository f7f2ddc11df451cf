"""A checkpoint as the decoder wants it: whole weights by role (see `decoder.weights.Weights`)."""

from __future__ import annotations

from qconvert.formats.checkpoint import Checkpoint
from qconvert.tensors import Value


class CheckpointWeights:
    """Reads weights by role and layer; each call reads anew, nothing is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Hold the checkpoint's tensors against its architecture; raises what `bind` raises."""
        binding = checkpoint.bind()
        self._reader = checkpoint.reader
        self._tensors = {
            (place.role, place.layer, place.part): checkpoint.tensors[name]
            for name, place in binding.places.items()
        }

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        """All rows of a weight or bias; None when the model has no such tensor."""
        tensor = self._tensors.get((role, layer, kind))
        return None if tensor is None else self._reader.read(tensor, 0, tensor.rows)
