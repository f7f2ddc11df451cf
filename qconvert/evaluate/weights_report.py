"""Compares the weights of two checkpoints by role and layer; needs no text.

The relative RMS error of a weight, `|b - a| / |a|`, is 0.1 for a plain 4-bit grid and 0.007 for an
8-bit one; a layer or role that stands out is where a recipe should spend its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING

from qconvert.check import compare
from qconvert.core.dtypes import Json
from qconvert.evaluate.figures import errors_by_layer, weight_figures
from qconvert.evaluate.provenance import origins_grid, run_facts
from qconvert.evaluate.records import Origin, WeightError, relative_rms
from qconvert.evaluate.scales import GLOSSARY_WEIGHTS, RMS_ERROR
from qconvert.evaluate.verdict import weights_verdict
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
    date: str = ""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()

    @property
    def verdict(self) -> tuple[str, ...]:
        """What was found, in a sentence."""
        return weights_verdict(self.a, self.b, self.errors, self.equal)

    def to_json(self) -> Json:
        head = {"report": "weights", "version": FORMAT_VERSION, "verdict": list(self.verdict)}
        return head | asdict(self) | {"scales": [RMS_ERROR.to_json()]}

    def figures(self) -> list[Figure]:
        return weight_figures(self.errors, self.a, self.b)

    def page(self) -> Page:
        """The page that people read: one row per role, with its worst layer."""
        head = ("role", "weights", "rel. RMS", "worst", "in layer", "max", "steps")
        facts = (
            ("from", self.a),
            ("to", self.b),
            ("equal", f"{self.equal} tensors"),
            *run_facts(self.date, self.command, self.environment),
        )
        roles = dict.fromkeys(error.role for error in self.errors)  # in the order of the model
        rows = tuple(_row(role, [each for each in self.errors if each.role == role]) for role in roles)
        total = (_row("all", self.errors),) if len(rows) > 1 else ()
        files = (origins_grid((self.a, self.b), self.origins),) if self.origins else ()
        return Page(
            "Errors of the weights",
            facts,
            (Grid("By role", head, rows + total),),
            self.notes,
            verdict=self.verdict,
            glossary=GLOSSARY_WEIGHTS,
            details=layer_grids([self]),
            sources=files,
        )


def layer_grids(reports: Iterable[WeightReport]) -> tuple[Grid, ...]:
    """The errors of every layer and role, a table for every comparison that has some."""
    grids = []
    for report in reports:
        roles, values = errors_by_layer(report.errors)
        title = f"Errors of the weights of {report.b} by layer, relative RMS"
        rows = (
            (str(layer), *("" if x is None else f"{x:.3g}" for x in line))
            for layer, line in enumerate(values)
        )
        if values:
            grids.append(Grid(title, ("layer", *roles), tuple(rows)))
    return tuple(grids)


def compare_weights(
    a: Checkpoint,
    b: Checkpoint,
    labels: tuple[str, str],
    progress: Callable[[float, int], None] = lambda done, total: None,
) -> WeightReport:
    """Every weight of A against its counterpart in B, in bounded blocks of rows.

    `progress` is told how many weights of A's are compared.
    """
    errors, equal, notes = [], 0, []
    order = {name: i for i, name in enumerate(a.architecture.parameters)}
    counts = {name: prod(tensor.shape) for name, tensor in a.tensors.items() if name not in a.ignored}
    done, total = 0, sum(counts.values())
    for found in compare.compare_checkpoints(a, b):
        done += counts.pop(found.name, 0)
        progress(done, total)
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
