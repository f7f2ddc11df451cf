"""Loads checkpoints with mlx-lm: `python drive_mlx_lm.py JOBS.json` (see `driving.py`)."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from driving import Answer, Windows, drive, of_tokens
from mlx import nn
from mlx_lm.utils import load_model


def _weights(model: nn.Module, dtype: str) -> dict[str, np.ndarray]:
    """What each linear makes of the rows of the identity, less its bias, in the model's own type.

    mlx rounds in the type of its scales.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            columns = module.weight.shape[1]
            if isinstance(module, nn.QuantizedLinear):
                columns = columns * 32 // module.bits
            weight_IO = module(mx.eye(columns, dtype=getattr(mx, dtype)))
            bias = module.bias if "bias" in module else 0
            found[name] = np.array((weight_IO - bias).T.astype(mx.float32))
    return found


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    loaded, _ = load_model(Path(model))
    computing = str(loaded.model.norm.weight.dtype).rpartition(".")[2]
    rows = []
    for window in tokens:
        logits_TV = loaded(mx.array([window]))[0].astype(mx.float32)
        rows.append(of_tokens(np.array(logits_TV), window))
    return Answer(np.array(rows), _weights(loaded, computing), computing)


drive(_compute)
