"""Computes the tensors of a GGUF file that come from config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.models.gguf.declaration import Constant, Facts

if TYPE_CHECKING:
    import numpy as np


def constants_of(facts: Facts) -> dict[str, np.ndarray]:
    """These tensors, float32, by name."""
    declared = facts.model.constants
    return {constant.name: _values(constant) for constant in (declared(facts) if declared else ())}


def _values(constant: Constant) -> np.ndarray:
    import numpy as np

    from qconvert.quant.llama3_rope import llama3_factors

    llama3 = constant.scaling
    if llama3 is None:
        return np.array(constant.values, np.float32)
    return llama3_factors(
        llama3.head_dim,
        llama3.theta,
        llama3.factor,
        llama3.low_freq_factor,
        llama3.high_freq_factor,
        llama3.context,
    )
