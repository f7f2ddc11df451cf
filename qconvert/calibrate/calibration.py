"""Defines what a calibrated conversion is asked: the text, and how its statistics are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qconvert.core.dtypes import Json
from qconvert.core.statistics import StatisticsKey

if TYPE_CHECKING:
    import numpy as np

Method = Literal["nearest", "feedback"]
"""How codes are chosen: each at the nearest number, or together, so that errors make up for one another."""
METHODS: dict[str, Method] = {"nearest": "nearest", "feedback": "feedback", "gptq": "feedback"}
"""Methods by the names that users know them by."""
DAMPING = 0.01
"""What most tools of error feedback add to a Hessian's diagonal, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A text as tokens, and how its statistics are used.

    `tokens_BT` int64: windows of tokens, none of which sees another. `text` says where they come from, for
    the manifest. `damping` times the mean diagonal is added to a Hessian's. With `shift`, the inputs of a
    linear are those that the layers quantized before it make, and it aims at what the original one gave
    for the original inputs; without, both are the original model's.
    """

    tokens_BT: np.ndarray
    text: Json = field(default_factory=dict)
    method: Method = "feedback"
    damping: float = DAMPING
    shift: bool = True

    @property
    def record(self) -> Json:
        """What the manifest says of it."""
        return {
            "method": self.method,
            "text": self.text,
            "tokens": int(self.tokens_BT.size),
            "window": int(self.tokens_BT.shape[1]),
            "damping": self.damping,
            "inputs": "quantized" if self.shift else "original",
        }


@dataclass(frozen=True, slots=True)
class PlannedStatistics:
    """Says, before anything is measured, that the input of every linear will be.

    The embedding, which is looked up, has none; so has a head that is its embedding.
    """

    record: Json

    def __contains__(self, key: object) -> bool:
        return isinstance(key, StatisticsKey) and (key.layer is not None or key.role == "lm_head")

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """Raises KeyError: nothing is measured yet."""
        raise KeyError(key)

    def rounding(self, key: StatisticsKey) -> None:
        """Nothing is measured yet."""
