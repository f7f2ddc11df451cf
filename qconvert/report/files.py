"""Writes a report as its record and the views of it: STEM.json, STEM.md and STEM.html."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from qconvert.core.dtypes import Json
from qconvert.formats.io.local_file import write_whole
from qconvert.report.html import Figure, to_html
from qconvert.report.page import Page, to_markdown

SUFFIXES = (".json", ".md", ".html")


class Report(Protocol):
    """What was measured, and the page and the pictures that show it."""

    def to_json(self) -> Json: ...

    def page(self) -> Page: ...

    def figures(self) -> list[Figure]: ...


def write_report(report: Report, stem: Path) -> list[Path]:
    """Write the three files beside each other; returns their paths."""
    record = json.dumps(report.to_json(), indent=1) + "\n"
    made = (record, to_markdown(report.page()), to_html(report.page(), report.figures()))
    for suffix, text in zip(SUFFIXES, made, strict=True):
        write_whole(report_path(stem, suffix), text.encode())
    return [report_path(stem, suffix) for suffix in SUFFIXES]


def report_path(stem: Path, suffix: str) -> Path:
    """The file of a report with this suffix."""
    return stem.with_name(stem.name + suffix)


def stem_of(path: Path) -> Path:
    """The stem of a report's files, of which one may be given: `report.html` is of `report`."""
    return path.with_suffix("") if path.suffix in SUFFIXES else path
