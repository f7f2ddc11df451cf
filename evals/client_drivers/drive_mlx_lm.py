"""Loads checkpoints with mlx-lm: `python drive_mlx_lm.py JOBS.json` (see `driving.py`).

The way "float32" widens what is not packed: on a CPU, MLX gathers experts of plain numbers in no other type.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from driving import Answer, Windows, drive, of_tokens
from mlx import nn
from mlx_lm.utils import load_model


def _weights(model: nn.Module) -> dict[str, np.ndarray]:
    """What each linear multiplies by: as mlx decodes it, in the type of its scales."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            weight_OI = mx.dequantize(module.weight, module.scales, module.get("biases"), **how)
        elif isinstance(module, nn.Linear):
            weight_OI = module.weight
        else:
            continue
        found[name] = np.array(weight_OI.astype(mx.float32))
    return found


def _compute(model: str, way: str, tokens: Windows) -> Answer:
    loaded, _ = load_model(Path(model))
    if way != "auto":
        loaded.set_dtype(getattr(mx, way))
    computing = str(loaded.model.norm.weight.dtype).rpartition(".")[2]
    rows = []
    for window in tokens:
        logits_TV = loaded(mx.array([window]))[0].astype(mx.float32)
        rows.append(of_tokens(np.array(logits_TV), window))
    return Answer(np.array(rows), _weights(loaded), computing)


drive(_compute)
