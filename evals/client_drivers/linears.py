"""Finds what the linears of a torch model multiply by, whatever they store."""

from __future__ import annotations

import numpy as np
import torch


def effective_weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What each linear makes of the rows of the identity, less its bias: float32 [O, I] by module name."""
    dtype = next(each.dtype for each in model.parameters() if each.dtype.is_floating_point)
    found = {}
    for name, module in model.named_modules():
        columns = getattr(module, "in_features", None)
        if columns is not None and not any(hasattr(each, "in_features") for each in module.children()):
            with torch.no_grad():
                weight_IO = module(torch.eye(columns, dtype=dtype)).float()
            bias = getattr(module, "bias", None)
            found[name] = (weight_IO if bias is None else weight_IO - bias.float()).T.numpy()
    return found
