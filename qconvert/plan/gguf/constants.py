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

    rope = constant.rope
    if rope is None:
        return np.array(constant.values, np.float32)
    scaling = rope.scaling
    factors_F = llama3_factors(
        rope.head_dim,
        rope.theta,
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_context,
    )
    rest = max(0, rope.room // 2 - len(factors_F))
    return np.concatenate([factors_F, np.ones(rest, np.float32)])
