"""Prints values that hold very many tensors in a few lines: a heading, the first tensors, how many more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

_FIRST = 3


def few_lines(heading: str, rows: Iterable[Sequence[str]], count: int) -> str:
    """The heading, and the first of `count` rows in aligned columns."""
    first = list(islice(rows, _FIRST))
    widths = [max(map(len, column)) for column in zip(*first, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in first)
    more = [f"  … and {count - len(first):,} more"] if count > len(first) else []
    return "\n".join([heading, *(f"  {'  '.join(row)}".rstrip() for row in cells), *more])
