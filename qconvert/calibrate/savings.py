"""Chooses how calibration fits a memory: first by means that change no byte of the output.

Legend: I columns of an input, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qconvert.core.dtypes import Json

BATCH_TOKENS = 4096
"""Tokens that visit a layer together, unless one window has more: enough to amortise reading its weights."""


@dataclass(frozen=True, slots=True)
class HessianForm:
    """How the Hessian of an input is kept and factored.

    In float64 or float32 (`single`); with a target shift or without; whole, or its diagonal blocks of
    `columns` columns, which have no shift.
    """

    single: bool = False
    shift: bool = True
    columns: int | None = None

    def blocks(self, width: int) -> list[slice]:
        """The columns of an input that are kept together."""
        size = self.columns or width
        return [slice(start, min(start + size, width)) for start in range(0, width, size)]


WHOLE = HessianForm()


@dataclass(frozen=True, slots=True)
class Savings:
    """What is done with less: tokens of a batch, weights that are not held, and Hessians by their width.

    `batch_tokens` visit a layer together, of the backward pass `backward_tokens` (None: its own choice);
    blocks of rows that are rounded take `rows_bytes` in all, where that is less than the run's memory.
    """

    batch_tokens: int = BATCH_TOKENS
    backward_tokens: int | None = None
    streamed: bool = False
    forms: Mapping[int, HessianForm] = field(default_factory=dict)
    rows_bytes: int | None = None

    def form(self, width: int) -> HessianForm:
        """How the Hessian of an input of that many columns is kept."""
        return self.forms.get(width, WHOLE)

    @property
    def record(self) -> Json:
        """What the manifest says of it; empty where nothing was saved."""
        changed = {width: form for width, form in sorted(self.forms.items()) if form != WHOLE}
        inputs = [
            {
                "columns": width,
                "factor": "float32" if form.single else "float64",
                "target_shift": form.shift,
                "columns_together": form.columns or width,
            }
            for width, form in changed.items()
        ]
        return {
            **({"tokens_together": self.batch_tokens} if self.batch_tokens != BATCH_TOKENS else {}),
            **({"gradient_tokens_together": self.backward_tokens} if self.backward_tokens else {}),
            **({"weights": "read as they are needed"} if self.streamed else {}),
            **({"rows_bytes": self.rows_bytes} if self.rows_bytes else {}),
            **({"inputs": inputs} if inputs else {}),
        }

    @property
    def sentence(self) -> str:
        """The same in words; empty where nothing was saved."""
        done = []
        if self.batch_tokens != BATCH_TOKENS:
            done.append(f"{self.batch_tokens:,} tokens go through a layer at a time")
        if self.backward_tokens:
            done.append(f"{self.backward_tokens:,} of the backward pass")
        if self.streamed:
            done.append("weights are read again whenever they are needed")
        if self.rows_bytes:
            done.append(f"rows are rounded in {self.rows_bytes / 1e6:.0f} MB")
        for width, form in sorted(self.forms.items()):
            if form.columns:
                kept = f"of {width:,} columns, blocks of {form.columns:,} are chosen together"
            elif not form.shift:
                kept = f"weights of {width:,} columns do not make up for the layers before"
            elif form.single:
                kept = f"the Hessian of {width:,} columns is factored in float32"
            else:
                continue
            done.append(kept)
        return "; ".join(done)


NOTHING_SAVED = Savings()
