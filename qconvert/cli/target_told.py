"""Reports what a target chose, from what, and how it measures: as text and as plain data."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.cli.printing import terminal_columns
from qconvert.report.tables import size, table

if TYPE_CHECKING:
    from qconvert.convert.saved_prices import SavedPrices
    from qconvert.convert.target import Chosen
    from qconvert.core.dtypes import Json
    from qconvert.plan.budget import Mix, Target


@dataclass(frozen=True, slots=True)
class Told:
    """What a target became, the size and the divergence that were `asked` for, the text that was `read`.

    `measured_on` says on what a mix and its rival were measured; `method` is the one by which codes are
    chosen together, None for the nearest ones; `saved` are the prices that are kept.
    """

    chosen: Chosen
    target: Target
    asked: tuple[str | None, str | None]
    read: Json
    measured_on: Json
    method: str | None
    saved: SavedPrices | None

    def lines(self) -> list[str]:
        """What was chosen, as a table for people."""
        chosen, labels = self.chosen, self._labels
        rows: dict[str, tuple[Counter[str], int, float]] = {}
        for group, option in chosen.mix.chosen:
            kind = re.sub(r"\.\d+\.", ".N.", group.name)
            counts, nbytes, cost = rows.get(kind, (Counter(), 0, 0.0))
            counts[option.label] += 1
            rows[kind] = (counts, nbytes + option.nbytes, cost + option.cost)
        cells = [
            [kind, *(str(counts[label] or "") for label in labels), size(nbytes), f"{cost:.5f}"]
            for kind, (counts, nbytes, cost) in rows.items()
        ]
        return [
            *table(["weights loaded alike", *labels, "bytes", "expected KL"], cells, most=terminal_columns()),
            f"{self._sized()}; expected KL {chosen.mix.cost:.5f} nats per token (on "
            f"{self.read['tokens']:,} tokens of {', '.join(map(_text_named, self.read['texts']))})",
            *self._text_lines(),
            self._compared(),
            *self._measured_lines(),
            *(f"{label} is left out: {why}" for label, why in chosen.left_out.items()),
            *self._saved_lines(),
        ]

    def _text_lines(self) -> list[str]:
        """The advice where no calibration text was given."""
        if self.read["texts"] != ["default"]:
            return []
        return ["a mix is as good as its text: --text FILE, one like yours, makes it lose less there"]

    def _sized(self) -> str:
        """The size in the terms of the target: of whole files for a number of bytes, else of the tensors."""
        chosen, target = self.chosen, self.target.size
        if target is not None and target.nbytes is not None:
            return f"{size(chosen.nbytes)} with headers and tokenizer, of {size(target.nbytes)} asked"
        bits = f"{chosen.bits_per_weight:.3f} bits for each of {chosen.weights:,} weights"
        return f"{size(chosen.nbytes)} of tensors, {bits}"

    @property
    def _labels(self) -> list[str]:
        return [label for label in self.target.labels if label not in self.chosen.left_out]

    def _compared(self) -> str:
        same, kls = self.chosen.uniform, self.chosen.measured
        if same is None:
            return "no single encoding reaches the target"
        label, fewer = _label(same), 1 - self.chosen.mix.nbytes / same.nbytes
        if len(kls) == 2 and self.chosen.mix.labels == same.labels:
            surely = "" if kls[0] >= kls[1] else ", which is not surely less"
            return f"{label} throughout: measured KL {kls[1]:.5f}, that of the best mix {kls[0]:.5f}{surely}"
        return (
            f"with {label} throughout: expected KL {same.cost:.5f}, and {100 * abs(fewer):.1f} % "
            f"{'more' if fewer > 0 else 'fewer'} bytes of these weights"
        )

    def _measured_lines(self) -> list[str]:
        """What was measured of the mix and of its rival, or that a run will do so."""
        chosen, kls = self.chosen, self.chosen.measured
        if chosen.rival is not None and not kls and self.method:
            both = size(chosen.best.nbytes + chosen.rival.nbytes)
            return [
                f"a run makes this mix and {_label(chosen.rival.mix)} throughout, both with --method "
                f"{self.method}, and finishes the one that is measured to be better: twice the time "
                f"of one, and {both} of disk meanwhile"
            ]
        if not kls or chosen.best is chosen.rival:
            return []
        beside = f", {_label(chosen.uniform)} throughout {kls[1]:.5f}" if len(kls) == 2 else ""
        return [f"measured {self._how_measured()}: KL {kls[0]:.5f}{beside}"]

    def _how_measured(self) -> str:
        on = self.measured_on
        if not on.get("as_written"):
            return "rounded to nearest, on this text"
        kind = "tokens of it that nothing was chosen on" if on["unseen"] else "of its tokens"
        return f"as written, on {on['tokens']:,} {kind}"

    def _saved_lines(self) -> list[str]:
        if self.saved is None:
            return []
        taken, path = self.saved.taken, self.saved.path
        return [
            f"prices of {', '.join(taken)} are those in {path}" if taken else f"prices are kept in {path}"
        ]

    def to_json(self) -> Json:
        """The same as plain data, every option of every weight with it."""
        chosen, same = self.chosen, self.chosen.uniform
        return {
            "target": dict(zip(("size", "kl"), self.asked, strict=True)),
            "choices": self._labels,
            "left_out": dict(chosen.left_out),
            "text": dict(self.read),
            "bytes": chosen.nbytes,
            "weights": chosen.weights,
            "expected_kl": chosen.mix.cost,
            "measured_kl": dict(zip(("mix", "uniform"), chosen.measured, strict=False)),
            "measured_on": dict(self.measured_on),
            "uniform": None
            if same is None
            else {"choice": _label(same), "bytes": same.nbytes, "expected_kl": same.cost},
            "groups": [
                {
                    "weights": list(group.members),
                    "choice": option.label,
                    "options": [
                        {"choice": each.label, "bytes": each.nbytes, "expected_kl": each.cost}
                        for each in group.options
                    ],
                }
                for group, option in chosen.mix.chosen
            ],
        }


def _text_named(name: str) -> str:
    """A calibration text as a reader knows it."""
    return "the bundled text" if name == "default" else name


def _label(mix: Mix | None) -> str:
    assert mix is not None
    return mix.chosen[0][1].label
