"""Computes Llama 3.1's RoPE frequency factors, and recovers their parameters from them.

Source: Llama 3.1's apply_scaling, as llama.cpp's converter computes it (LlamaModel.generate_extra_tensors).
"""

from __future__ import annotations

import math

import numpy as np

# GGUF files keep only the factors; these are the contexts and parameters tried to recover.
_CONTEXTS = tuple(1 << power for power in range(4, 21))
_HIGH_FACTORS = (4.0, 2.0, 8.0, 32.0)


def llama3_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """Returns the values of `rope_freqs.weight`, float32 [head_dim / 2], by which llama.cpp divides
    frequencies.

    Computed in float32 throughout, as the converter does, to reproduce its bits.
    """
    f32 = np.float32
    frequencies = f32(1) / f32(theta) ** (np.arange(0, head_dim, 2, dtype=f32) / f32(head_dim))
    lengths = f32(2 * math.pi) / frequencies
    with np.errstate(divide="ignore", invalid="ignore"):  # equal bounds leave nothing between them
        smooth = (f32(context) / lengths - f32(low)) / f32(high - low)
        between = f32(1) / ((f32(1) - smooth) / f32(factor) + smooth)
    long = np.where(lengths > context / low, f32(factor), between)
    return np.asarray(np.where(lengths < context / high, f32(1), long).astype(f32))


def llama3_parameters(theta: float, factor: float, factors_F: np.ndarray) -> tuple[float, float, int] | None:
    """Returns the low and high frequency factors and the context that give these factors; None if none do.

    Tries candidates: only the largest factor can be read off the factors directly.
    """
    for context in _CONTEXTS:
        for high in _HIGH_FACTORS:
            found = llama3_factors(2 * len(factors_F), theta, factor, 1.0, high, context)
            if abs(found / factors_F - 1).max() < 1e-5:
                return 1.0, high, context
    return None
