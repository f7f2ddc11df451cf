"""Shows how a report can be traced: date, command line, versions, and the files that were measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from qconvert.evaluate.records import Origin
from qconvert.report.page import Grid
from qconvert.report.tables import count


def now() -> str:
    """The date and time in UTC, to the second: `2026-01-31T23:59:59Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_facts(date: str, command: Sequence[str], environment: dict[str, str]) -> list[tuple[str, str]]:
    """When, by what command line, and with which versions; what is not known is left out."""
    said = ", ".join(f"{name} {version}" for name, version in environment.items())
    facts = [("date", date.replace("T", " ").replace("Z", " UTC")), ("command", shlex.join(command))]
    return [(name, value) for name, value in (*facts, ("environment", said)) if value]


def origins_grid(labels: Iterable[str], origins: Iterable[Origin | None]) -> Grid:
    """The files that were measured: what each model was called on the command line, and its hash."""
    rows = [(label, *_row(origin)) for label, origin in zip(labels, origins, strict=True) if origin]
    return Grid("Files measured", ("model", "given as", "sha256", "of"), tuple(rows), left=4)


def _row(origin: Origin) -> tuple[str, str, str]:
    given = f"{origin.name} at {origin.commit[:12]}" if origin.commit else origin.name
    if origin.manifest_sha256 is not None:
        return given, origin.manifest_sha256[:12], "qconvert.json"
    what = origin.files[0].name if len(origin.files) == 1 else count(len(origin.files), "file")
    return given, origin.weights_sha256[:12], what
