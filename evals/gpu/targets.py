"""What is asked of the decoder on an H200, and what a run found of it.

Each target is a floor under our figure, or a peer of the same run that must not be ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from evals.gpu.reading import WIKITEXT_TOKENS
from evals.gpu.rows import OURS, Ceiling, Decoding, Product, Reading, Row, of_kind

TOKENS_PER_SECOND = (
    ("qwen2.5-1.5b", "int4, 16-bit head", 1100),
    ("qwen2.5-7b", "int4, 16-bit head", 600),
    ("qwen2.5-7b", "bf16", 255),
)
GATE_UP_7B = (37888, 3584)
COPY_FRACTION = 0.75
MATMUL_FRACTION = 0.55
READERS = ("qwen2.5-7b", "qwen3-8b")
WIKITEXT_MODEL, WIKITEXT_SECONDS = "qwen3-8b", 10.0
RIVALS = {"nf4": "int4", "nf4, 16-bit head": "int4, 16-bit head"}
"""Which of our forms stands beside a form that only a peer has."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked and what was measured, in one unit; `measured` is None where a run has no figure."""

    what: str
    asked: float
    measured: float | None
    unit: str
    most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the measured figure is at least (`most`: at most) the asked one; None without one."""
        if self.measured is None:
            return None
        return self.measured <= self.asked if self.most else self.measured >= self.asked


def ceiling(rows: Sequence[Row], name: str) -> float | None:
    """A ceiling that the run measured."""
    return next((each.value for each in of_kind(rows, Ceiling) if each.name == name), None)


def wikitext_seconds(reading: Reading) -> float:
    """Of all of wikitext-2: measured if it was read whole, else in proportion."""
    return reading.seconds if reading.whole else reading.seconds * WIKITEXT_TOKENS / reading.tokens


def targets(rows: Sequence[Row]) -> list[Target]:
    """All targets, with what the run found."""
    return [*_decoding(rows), *_product(rows), *_reading(rows), *_peers(rows)]


def _decoding(rows: Sequence[Row]) -> Iterator[Target]:
    ours = [row for row in of_kind(rows, Decoding) if row.via == OURS and row.context == 0]
    for model, encoding, asked in TOKENS_PER_SECOND:
        found = [1 / row.seconds_per_token for row in ours if (row.model, row.encoding) == (model, encoding)]
        yield Target(f"{model} {encoding}, batch 1", asked, _best(found), "tokens/s")


def _product(rows: Sequence[Row]) -> Iterator[Target]:
    copy = ceiling(rows, "copy")
    found = [
        row.nbytes / row.seconds / copy
        for row in of_kind(rows, Product)
        if row.via == OURS
        and (row.encoding, row.out, row.width, row.rows) == ("int4", *GATE_UP_7B, 1)
        and copy
    ]
    yield Target("int4 matmul, gate_up of qwen2.5-7b", COPY_FRACTION, _best(found), "of copy")


def _reading(rows: Sequence[Row]) -> Iterator[Target]:
    matmul, ours = ceiling(rows, "matmul"), [row for row in of_kind(rows, Reading) if row.via == OURS]
    for model in READERS:
        for encoding in ("int4, 16-bit head", "bf16"):
            mine = [row for row in ours if (row.model, row.encoding) == (model, encoding)]
            found = [row.flops / row.seconds / matmul for row in mine if matmul]
            yield Target(f"perplexity of {model} {encoding}", MATMUL_FRACTION, _best(found), "of matmul")
            if model == WIKITEXT_MODEL:
                # The whole text where it was read, as the sample is part of the same figure.
                seconds = [wikitext_seconds(row) for row in sorted(mine, key=lambda row: row.whole)][-1:]
                what = f"wikitext-2 by {model} {encoding}"
                yield Target(what, WIKITEXT_SECONDS, _best(seconds), "s", most=True)


def _peers(rows: Sequence[Row]) -> Iterator[Target]:
    """Every peer's best figure is asked of our best one of the same kind."""
    yield from _beside(
        of_kind(rows, Decoding),
        lambda row: (row.model, row.context),
        lambda row: 1 / row.seconds_per_token,
        lambda key: f"{key[0]} after {key[1]} tokens",
        "tokens/s",
    )
    yield from _beside(
        of_kind(rows, Reading),
        lambda row: (row.model,),
        lambda row: row.tokens / row.seconds,
        lambda key: f"reading {key[0]}",
        "tokens/s",
    )
    yield from _beside(
        [row for row in of_kind(rows, Product) if row.rows == 1 and (row.out, row.width) == GATE_UP_7B],
        lambda row: (row.out, row.width),
        lambda row: 1e-6 / row.seconds,
        lambda key: "gate_up of qwen2.5-7b, 1 row",
        "products/us",
    )


def _beside(  # type: ignore[no-untyped-def]
    rows,
    key_of: Callable[..., tuple[object, ...]],
    rate_of: Callable[..., float],
    name_of: Callable[..., str],
    unit: str,
) -> Iterator[Target]:
    for key in dict.fromkeys(key_of(row) for row in rows):
        group = [row for row in rows if key_of(row) == key]
        for via, encoding in dict.fromkeys((row.via, row.encoding) for row in group if row.via != OURS):
            theirs = max(rate_of(row) for row in group if (row.via, row.encoding) == (via, encoding))
            form_of_ours = RIVALS.get(encoding, encoding)
            ours = [rate_of(row) for row in group if (row.via, row.encoding) == (OURS, form_of_ours)]
            yield Target(f"{name_of(key)}: {form_of_ours} ahead of {via}", theirs, _best(ours), unit)


def _best(found: Sequence[float]) -> float | None:
    return max(found, default=None)
