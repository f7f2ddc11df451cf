"""Opens a checkpoint as a decoder that reads its layers when they are needed, and keeps none."""

from __future__ import annotations

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.protocols import Rows
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import Streaming, load_decoder
from qconvert.runtime.model import Decoder


def layer_by_layer(
    checkpoint: Checkpoint,
    rows: Rows | None = None,
    *,
    device: torch.device | str = "cpu",
    layout: Layout = Layout.REFERENCE,
    streaming: Streaming = Streaming.NOTHING,
) -> Decoder:
    """A float32 decoder of a checkpoint, or of the `rows` that stand for its own; inputs are not rounded.

    Raises UnsupportedModel for a family that is not run here, and what `load_decoder` raises.
    """
    config, weights = DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint, rows)
    return load_decoder(config, weights, device=device, layout=layout, on_demand=True, streaming=streaming)
