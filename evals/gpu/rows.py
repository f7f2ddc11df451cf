"""What a run on a GPU finds, one row per figure, and the file of JSON lines that holds them as they come.

Rows hold what was measured: seconds, bytes, operations. Rates and fractions are made of them where
they are printed, against the ceilings of the same run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from qconvert.core.dtypes import Json

OURS = "qconvert"
"""How rows name what is measured, among its peers."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the machine, in words."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """What was left out, and why: cut, failed, not installed."""

    text: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine itself reaches: `copy` in bytes/s, `matmul` in FLOP/s, `launch` in seconds."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Check:
    """A result against its reference on random data: `error` is ||result - reference|| / ||reference||.

    `stable` says whether repeated runs gave the same bits. A `peer` is checked too, so that what is
    timed beside us computes the same.
    """

    subject: str
    case: str
    error: float
    limit: float
    stable: bool

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.limit and self.stable


@dataclass(frozen=True, slots=True)
class Product:
    """`rows` of x times the transpose of a weight [out, width]: seconds each, in a captured graph.

    `nbytes` is the weight as it lies in memory; every call reads another copy of it, so that no cache
    holds it. `splits` is None for what has no such choice.
    """

    via: str
    encoding: str
    out: int
    width: int
    rows: int
    splits: int | None
    seconds: float
    nbytes: int
    graphed: bool


@dataclass(frozen=True, slots=True)
class Crossing:
    """One number of rows by both ways: the few-row kernel, and dequantizing before a dense product.

    `few_seconds` is None where the kernel does not go.
    """

    encoding: str
    out: int
    width: int
    rows: int
    few_seconds: float | None
    many_seconds: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """Generating at batch 1 after `context` tokens: wall clock of whole steps, by the median round.

    `weight_bytes` are read for every token, `kv_bytes` at this context; `launches` is the number of
    kernels in a step, None where nobody counted.
    """

    model: str
    via: str
    encoding: str
    context: int
    seconds_per_token: float
    weight_bytes: int
    kv_bytes: int
    launches: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading `tokens` in windows to the losses of all of them; `flops` counts all their operations.

    `whole` says that they are as many as wikitext-2 has.
    """

    model: str
    via: str
    encoding: str
    tokens: int
    seconds: float
    flops: float
    whole: bool


Row = Fact | Note | Ceiling | Check | Product | Crossing | Decoding | Reading
R = TypeVar("R", bound=Row)
_KINDS: dict[str, type[Row]] = {
    kind.__name__.lower(): kind for kind in (Fact, Note, Ceiling, Check, Product, Crossing, Decoding, Reading)
}


def to_json(section: str, row: Row) -> Json:
    """A row as plain JSON values, with its kind and its section; what is no number is null."""
    fields = {key: None if _is_nan(value) else value for key, value in asdict(row).items()}
    return {"row": type(row).__name__.lower(), "section": section, **fields}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def from_json(record: Json) -> tuple[str, Row]:
    """The inverse of `to_json`."""
    fields = dict(record)
    kind, section = _KINDS[fields.pop("row")], fields.pop("section")
    if kind is Check:
        fields = {key: math.nan if value is None else value for key, value in fields.items()}
    return section, kind(**fields)


def append(path: Path, section: str, row: Row) -> None:
    """Add a row to the file, at once: whatever ends the process, it is there."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(to_json(section, row)) + "\n")


def load(path: Path) -> list[tuple[str, Row]]:
    """All rows of the file, with their sections. A last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [from_json(json.loads(line)) for line in lines[:-1] if line]


def of_kind(rows: Iterable[Row], kind: type[R]) -> list[R]:
    """The rows of one kind, in their order."""
    return [row for row in rows if isinstance(row, kind)]
