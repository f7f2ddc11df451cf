"""Sums what observers see of the inputs of linears. Legend: N rows, I in features, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.moments import InputMoments, InputStatistics
from qconvert.core.statistics import InputKey
from qconvert.errors import QConvertError
from qconvert.models.architecture import ParameterKey


@dataclass(slots=True)
class MomentSums:
    """Running sums of every input that is shown, in float64: an `Observer`."""

    inputs: dict[InputKey, InputMoments] = field(default_factory=dict)

    def __call__(self, key: InputKey, x_NI: Tensor) -> None:
        """Add rows; products are of float32, their sums of float64.

        Raises QConvertError where one is not finite.
        """
        x_NI = x_NI.float()
        squares_I, sums_I = ((part.sum(0, dtype=torch.float64)).cpu().numpy() for part in (x_NI * x_NI, x_NI))
        if not np.isfinite(squares_I).all():
            raise _not_finite(key, x_NI)
        found = InputMoments(squares_I, sums_I, len(x_NI))
        self.inputs[key] = self.inputs[key] + found if key in self.inputs else found

    def statistics(
        self, shapes: Mapping[ParameterKey, tuple[int, ...]], tokens_BT: np.ndarray, vocab: int
    ) -> InputStatistics:
        """The sums as statistics of these tokens; `shapes` are those of the model's parameters.

        An expert that no token was routed to has moments of nothing, if another one of its layer was shown.
        """
        counts_V = np.bincount(tokens_BT.ravel(), minlength=vocab).astype(np.int64)
        return InputStatistics(self.inputs | dict(_unrouted(shapes, self.inputs)), counts_V)


def _not_finite(key: InputKey, x_NI: Tensor) -> QConvertError:
    bad = int((~torch.isfinite(x_NI * x_NI)).any(1).sum())
    place = "" if key.layer is None else f"layer {key.layer}: "
    expert = "" if key.expert is None else f" of expert {key.expert}"
    return QConvertError(
        f"{place}the input of {', '.join(key.roles)}{expert} holds NaN or infinity in {bad} of"
        f" {len(x_NI)} rows",
        "look for weights that are not finite (`qconvert verify`), or use an undamaged checkpoint",
    )


def _unrouted(
    shapes: Mapping[ParameterKey, tuple[int, ...]], inputs: Mapping[InputKey, InputMoments]
) -> Iterator[tuple[InputKey, InputMoments]]:
    """Moments of nothing for the inputs of experts that no token was routed to."""
    shown = {replace(key, expert=None): key.expert for key in inputs if key.expert is not None}
    for place, expert in shown.items():
        role = place.roles[0].replace(".experts.", ".experts.{}.")
        width, number = shapes[role.format(expert), place.layer, "weight"][-1], 0
        while (role.format(number), place.layer, "weight") in shapes:
            key = replace(place, expert=number)
            if key not in inputs:
                yield key, InputMoments(np.zeros(width), np.zeros(width), 0)
            number += 1
