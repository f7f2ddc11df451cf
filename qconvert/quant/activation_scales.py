"""Proposes factors for the channels of an input, from how large its channels are (AWQ).

Columns that read a large channel are multiplied by more, and lose less for it when their group is quantized;
the channel is divided by as much. Source of the form `s = x^r`: AWQ (arXiv 2306.00978), llm-awq's
`auto_scale`; the magnitudes are root mean squares here, which importance matrices hold, not means.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast

POWERS = tuple(step / 20 for step in range(20))
"""Exponents that are tried; with the first, no channel is scaled."""
# The least magnitude that counts, as a share of the largest: a channel that is never active gains nothing.
_LEAST = 1e-4


def candidates(mean_squares_I: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Yields every power and its factors, float32 [I], the first ones 1.

    The smallest and the largest of them are each other's inverse. `mean_squares_I` are of the input's
    channels: finite, not negative.
    """
    size_I = np.sqrt(mean_squares_I.astype(np.float64))
    size_I = np.maximum(size_I, _LEAST * size_I.max(initial=0.0))
    for power in POWERS:
        factors_I = size_I**power if size_I.any() else np.ones_like(size_I)
        yield power, (factors_I / np.sqrt(factors_I.max() * factors_I.min())).astype(np.float32)


def factors_of_norm(weight_I: np.ndarray, factors_I: np.ndarray, offset: float, dtype: DType) -> np.ndarray:
    """The factors by which a norm's weights are really divided once they are stored as `dtype`.

    `(w + offset) / factors - offset` is rounded; readers whose columns are multiplied by what this returns,
    float32 [I], compensate the rounding. Channels that the norm makes 0 keep their weight.
    """
    used_I = weight_I + np.float32(offset)
    asked_I = np.where(used_I == 0, np.float32(1), factors_I)
    stored = cast(DenseRows((used_I / asked_I - np.float32(offset))[:, None], DType.F32), dtype)[0]
    kept_I = cast(stored, DType.F32)[0].rows_RI[:, 0].astype(np.float64) + offset
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_I = used_I.astype(np.float64) / kept_I
    return np.where((used_I != 0) & np.isfinite(ratio_I) & (ratio_I > 0), ratio_I, 1.0).astype(np.float32)
