"""Finds the factors of scaled inputs (AWQ) in the weights themselves, so that no record has to be believed.

What a norm was divided by is the source's weight over the output's. What the rows of a linear were divided
by is how much longer the source's rows are along the output's, which quantizing changes a little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.checkpoint.facts import numbers_of
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.runner import gather
from qconvert.convert.scaled_rows import scaled_rows
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor
from qconvert.core.factors import Factors
from qconvert.core.protocols import Reader, Rows
from qconvert.core.values import Value
from qconvert.models.scale_pairs import ScalableInput, scalable_inputs
from qconvert.plan.plan import RowSlice
from qconvert.plan.scales import ScaledInput, factors_by_tensor
from qconvert.quant.casts import cast

_BLOCK_ROWS = 1024
# How far factors may lie from the recorded ones: those of norms, and those of rows of codes.
_TOLERANCES = {True: 1e-3, False: 0.1}


@dataclass(frozen=True, slots=True)
class ScaledReader:
    """Reads tensors as what they became before they were rounded."""

    reader: Reader
    factors: Mapping[str, Factors]

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        """Rows [start, stop) of a tensor, scaled."""
        value, factors = self.reader.read(tensor, start, stop), self.factors.get(tensor.name)
        if factors is None:
            return value
        return scaled_rows(numbers_of(value), RowSlice(tensor, start, stop, factors=factors))


def factors_between(
    a: Checkpoint, b: Checkpoint, sources: Collection[str], located: Mapping[str, tuple[list[RowSlice], ...]]
) -> list[ScaledInput]:
    """The factors by which the inputs that these weights make differ between a model and its output.

    `located` are the rows of every weight in both.
    """
    inputs = [each for each in scalable_inputs(a.architecture) if each.name in sources]
    found: list[ScaledInput] = []
    # Norms first: the columns of linears that make other inputs are scaled by theirs.
    for each in sorted(inputs, key=lambda each: not each.by_norm):
        own = factors_by_tensor(a.tensors.values(), a.architecture, found) if not each.by_norm else {}
        blocks = _blocks(each, (ScaledReader(a.reader, own), b.reader), located[each.name])
        parts = [_of_norm(*rows, each.offset) if each.by_norm else _of_rows(*rows) for rows in blocks]
        found.append(ScaledInput(each, np.concatenate(parts), 0.0, 1.0))
    return found


def mismatch(each: ScaledInput, recorded: Mapping[str, list[float]]) -> str | None:
    """A sentence on factors that are not those that the output's record names; None where they are."""
    low, high = recorded[each.input.name]
    seen = float(each.factors_I.min()), float(each.factors_I.max())
    within = _TOLERANCES[each.input.by_norm]
    if all(abs(one - other) <= within * other for one, other in zip(seen, (low, high), strict=True)):
        return None
    return (
        f"{each.input.name}: divided by {seen[0]:.4g} to {seen[1]:.4g} as against the source, "
        f"the record says {low:.4g} to {high:.4g}"
    )


def _blocks(
    each: ScalableInput, readers: tuple[Rows, Rows], pieces: tuple[list[RowSlice], ...]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of the weight that makes an input in both models, float64, some at a time."""
    for start in range(0, each.channels, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, each.channels)
        values = (
            gather(tuple(of), reader, start, stop)[0] for reader, of in zip(readers, pieces, strict=True)
        )
        a_RI, b_RI = (cast(numbers_of(value), DType.F32)[0].rows_RI.astype(np.float64) for value in values)
        yield a_RI, b_RI[:, : a_RI.shape[1]]  # which may go on with zeros


def _of_norm(a_RI: np.ndarray, b_RI: np.ndarray, offset: float) -> np.ndarray:
    """What a norm's weights were divided by."""
    used_R, left_R = a_RI[:, 0] + offset, b_RI[:, 0] + offset
    return _ratio(used_R, left_R, (used_R != 0) & (left_R != 0))


def _of_rows(a_RI: np.ndarray, b_RI: np.ndarray) -> np.ndarray:
    """What rows were divided by before they were rounded."""
    along_R = (a_RI * b_RI).sum(axis=1)
    return _ratio((a_RI * a_RI).sum(axis=1), along_R, along_R > 0)


def _ratio(a_R: np.ndarray, b_R: np.ndarray, where_R: np.ndarray) -> np.ndarray:
    found_R: np.ndarray = np.divide(a_R, b_R, out=np.ones_like(a_R), where=where_R)
    return found_R.astype(np.float32)
