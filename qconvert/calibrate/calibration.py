"""Defines what a calibrated conversion is asked: the text, and how its statistics are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qconvert.calibrate.savings import NOTHING_SAVED, Savings
from qconvert.core.dtypes import Json
from qconvert.core.statistics import StatisticsKey

if TYPE_CHECKING:
    import numpy as np

Method = Literal["nearest", "awq", "feedback", "two-sided"]
"""How codes are chosen: each at the nearest number, of columns that are scaled by what they read or not; or
together, so that errors compensate one another: those of a row's columns, or those of rows too."""
METHODS: dict[str, Method] = {
    "nearest": "nearest",
    "rtn": "nearest",
    "awq": "awq",
    "feedback": "feedback",
    "gptq": "feedback",
    "two-sided": "two-sided",
    "yaqa": "two-sided",
}
"""Methods by the names that users know them by."""


@dataclass(frozen=True, slots=True)
class MethodTraits:
    """What a method does: the one place where methods differ for those who carry them out.

    It `measures` what linears read; it `scales_inputs`, the columns of weights and what is before them; it
    chooses the codes of a row `together`, layer after layer, and reads back what it has written, and does so
    `over_rows`, by gradients of outputs.
    """

    measures: bool = True
    scales_inputs: bool = False
    together: bool = False
    over_rows: bool = False


TRAITS: dict[Method, MethodTraits] = {
    "nearest": MethodTraits(measures=False),
    "awq": MethodTraits(scales_inputs=True),
    "feedback": MethodTraits(together=True),
    "two-sided": MethodTraits(together=True, over_rows=True),
}
DAMPING = 0.01
"""What most tools of error feedback add to a Hessian's diagonal, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A text as tokens, and how its statistics are used.

    `tokens_BT` int64: windows of tokens, none of which sees another. `text` says where they come from, for
    the manifest. `damping` times the mean diagonal is added to a Hessian's. With `shift`, the inputs of a
    linear are those that the layers quantized before it make, and it aims at what the original one gave
    for the original inputs; without, both are the original model's.

    Two-sided: gradients come from the first windows, of `gradient_tokens` tokens at least; `output_rows`
    consecutive rows of a weight compensate one another's errors; `output_damping` is that of E[g g^T].
    AWQ needs the mean squares of the original model's inputs alone.
    `savings` are what it is done with to fit a memory (`fit.fitted`).
    """

    tokens_BT: np.ndarray
    text: Json = field(default_factory=dict)
    method: Method = "feedback"
    damping: float = DAMPING
    shift: bool = True
    gradient_tokens: int = 16384
    output_damping: float = 0.1
    output_rows: int = 256
    savings: Savings = NOTHING_SAVED

    @property
    def traits(self) -> MethodTraits:
        """What its method does."""
        return TRAITS[self.method]

    @property
    def gradient_windows_WT(self) -> np.ndarray:
        """The windows that gradients are measured on."""
        return self.tokens_BT[: -(-self.gradient_tokens // self.tokens_BT.shape[1])]

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
            **(self._outputs if self.traits.over_rows else {}),
            **({"savings": self.savings.record} if self.savings.record else {}),
        }

    @property
    def _outputs(self) -> Json:
        return {
            "gradient_tokens": int(self.gradient_windows_WT.size),
            "output_damping": self.output_damping,
            "output_rows": self.output_rows,
        }


@dataclass(frozen=True, slots=True)
class PlannedStatistics:
    """States, before anything is measured, that the input of every linear will be measured.

    An embedding is looked up and has none, unless it is the head, too (`tied`).
    """

    record: Json
    tied: bool = False

    def __contains__(self, key: object) -> bool:
        outside = ("lm_head", "embed") if self.tied else ("lm_head",)
        return isinstance(key, StatisticsKey) and (key.layer is not None or key.role in outside)

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """Raises KeyError: nothing is measured yet."""
        raise KeyError(key)

    def rounding(self, key: StatisticsKey) -> None:
        """Nothing is measured yet."""
