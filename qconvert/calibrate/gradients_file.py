"""Names the sums of squares of gradients in a file of statistics, and finds them there.

`layers.3.attn.q.gradients` float32 [O], of experts [E, O]; `model.embed.gradients` [D] and
`model.lm_head.gradients` [V]; `gradient_tokens` int64 [1]. What they are: `GradientMoments`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from qconvert.calibrate.moments import GradientMoments
from qconvert.core.statistics import EMBED, HEAD, StatisticsKey
from qconvert.errors import CorruptCheckpoint, shown

_TOKENS = "gradient_tokens"
_NAME = re.compile(r"(?:layers\.(\d{1,6})|model)\.([\w.]+)\.gradients")
_AGAIN = "collect them with `qconvert calibrate --sensitivities`"


def gradient_arrays(gradients: GradientMoments, linears: Iterable[StatisticsKey]) -> dict[str, np.ndarray]:
    """The arrays by name; an expert of `linears` that has no gradients has zeros."""
    stacks: dict[tuple[str, int | None], list[StatisticsKey]] = {}
    for key in sorted({*linears, EMBED}, key=lambda key: (key.layer or 0, key.role, key.expert or 0)):
        stacks.setdefault((key.role, key.layer), []).append(key)
    arrays: dict[str, np.ndarray] = {_TOKENS: np.array([gradients.tokens], np.int64)}
    for (role, layer), keys in stacks.items():
        found = [gradients.squares.get(key) for key in keys]
        width = next((len(each) for each in found if each is not None), None)
        if width is not None:
            place = "model" if layer is None else f"layers.{layer}"
            rows_EO = np.stack([np.zeros(width) if each is None else each for each in found])
            whole = rows_EO if keys[0].expert is not None else rows_EO[0]
            arrays[f"{place}.{role}.gradients"] = whole.astype(np.float32)
    return arrays


def gradients_in(arrays: Mapping[str, np.ndarray], file: str) -> GradientMoments | None:
    """The gradients among the arrays of a file; None where it has none.

    Raises CorruptCheckpoint for what are no sums of squares.
    """
    if _TOKENS not in arrays:
        return None
    found: dict[StatisticsKey, np.ndarray] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            if not 1 <= array.ndim <= 2 or not (np.isfinite(array).all() and (array >= 0).all()):
                raise CorruptCheckpoint(f"{file}: {shown(name)} holds no sums of squares", _AGAIN)
            layer = None if match[1] is None else int(match[1])
            rows_EO = array.reshape(-1, array.shape[-1]).astype(np.float64)
            for i, row_O in enumerate(rows_EO):
                found[StatisticsKey(match[2], layer, i if array.ndim == 2 else None)] = row_O
    tokens = arrays[_TOKENS]
    if tokens.shape != (1,) or tokens[0] < 1 or not {EMBED, HEAD} <= found.keys():
        raise CorruptCheckpoint(f"{file}: lacks gradients of the embedding, the head or any token", _AGAIN)
    return GradientMoments(found, int(tokens[0]))
