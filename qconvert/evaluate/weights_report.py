"""Compares the weights of two checkpoints by role and layer; needs no text.

The relative RMS error of a weight, `|b - a| / |a|`, is 0.1 for a plain 4-bit grid and 0.007 for an
8-bit one; a layer or role that stands out is where a recipe should spend its bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from qconvert.check import compare
from qconvert.core.dtypes import Json
from qconvert.evaluate.figures import weight_figures
from qconvert.evaluate.records import WeightError, relative_rms
from qconvert.report.html import Figure
from qconvert.report.page import Grid, Page

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The weights that differ between two checkpoints, and how many are equal."""

    a: str
    b: str
    errors: tuple[WeightError, ...]
    equal: int
    notes: tuple[str, ...]

    def to_json(self) -> Json:
        return {"report": "weights", "version": FORMAT_VERSION, **asdict(self)}

    def figures(self) -> list[Figure]:
        return weight_figures(self.errors, self.a, self.b)

    def page(self) -> Page:
        """The page that people read: one row per role, with its worst layer."""
        head = ("role", "weights", "rel. RMS", "worst", "in layer", "max", "steps")
        facts = (("from", self.a), ("to", self.b), ("equal", f"{self.equal} tensors"))
        roles = dict.fromkeys(error.role for error in self.errors)  # in the order of the model
        rows = tuple(_row(role, [each for each in self.errors if each.role == role]) for role in roles)
        total = (_row("all", self.errors),) if len(rows) > 1 else ()
        return Page("Errors of the weights", facts, (Grid("By role", head, rows + total),), self.notes)


def compare_weights(a: Checkpoint, b: Checkpoint, labels: tuple[str, str]) -> WeightReport:
    """Every weight of A against its counterpart in B, in bounded blocks of rows."""
    errors, equal, notes = [], 0, []
    order = {name: i for i, name in enumerate(a.architecture.parameters)}
    for found in compare.compare_checkpoints(a, b):
        difference = found.difference
        if found.status == "equal":
            equal += 1
        elif difference is None:
            notes.append(f"{found.name}: {found.status} {found.note}".rstrip())
        else:
            place = a.architecture.parameter(found.name)
            sums = (difference.sum_sq_diff, difference.sum_sq_a, difference.max_abs)
            layer = None if place is None else place.layer
            errors.append(WeightError(found.name, found.role, layer, *sums, found.max_steps))
    errors.sort(key=lambda error: order.get(error.name, len(order)))
    return WeightReport(*labels, tuple(errors), equal, tuple(notes))


def _row(role: str, errors: Iterable[WeightError]) -> tuple[str, ...]:
    errors = list(errors)
    worst = max(errors, key=lambda error: error.relative_rms)
    steps = [error.max_steps for error in errors if error.max_steps is not None]
    return (
        role,
        str(len(errors)),
        f"{relative_rms(errors):.4f}",
        f"{worst.relative_rms:.4f}",
        "" if worst.layer is None else str(worst.layer),
        f"{max(error.max_abs for error in errors):.3g}",
        f"{max(steps):.2f}" if steps else "",
    )
