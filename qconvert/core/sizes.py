"""Parses sizes as people type them: `500MB`, `5GB`, `2GiB`, or a number of bytes."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(?P<number>\d{1,16}(?:\.\d{1,15})?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Returns the number of bytes; units are decimal unless written with an i. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 500MB, 5GB or 2GiB")
    power = " KMGT".index(match["unit"].upper() or " ")
    factor: int = (1024 if match["binary"] else 1000) ** power
    return round(float(match["number"]) * factor)
