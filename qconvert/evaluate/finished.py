"""Resumes an evaluation that is complete: its report is read back instead of measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.resolved import open_found
from qconvert.core.dtypes import Json
from qconvert.errors import BadRecipe, QConvertError
from qconvert.evaluate.corpora import load_text
from qconvert.evaluate.origins import origin_of
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.plain_data import from_plain
from qconvert.evaluate.saved_reference import SavedReference
from qconvert.formats.io.strict_json import read_json_object

_AGAIN = "leave out --resume to measure again"


def finished_report(path: Path, request: Json) -> PerplexityReport | None:
    """The report in a STEM.json, if it is of what is asked for now; None if it was interrupted.

    Raises BadRecipe for one of another request, or of models or a text that have changed since.
    """
    try:
        report = from_plain(PerplexityReport, read_json_object(path))
    except (ValueError, QConvertError) as error:
        raise BadRecipe(f"{path}: is not a report that can be resumed ({error})", _AGAIN) from error
    if report.partial:
        return None
    for name, value in request.items():
        before = report.request.get(name)
        if before != value:
            raise BadRecipe(
                f"{path}: is complete, but of another command: {name} was {_shown(before)},"
                f" now it is {_shown(value)}",
                _AGAIN,
            )
    text = Path(str(request["text"]))
    if text.is_file() and load_text(text).sha256 != report.text_sha256:
        raise BadRecipe(f"{path}: the text {text.name} has changed since {report.date}", _AGAIN)
    for model in report.models:
        if model.origin is None or _hashes_now(report, model.origin.name, model.label) != (
            model.origin.manifest_sha256,
            model.origin.files,
        ):
            raise BadRecipe(f"{path}: the weights of {model.label} have changed since {report.date}", _AGAIN)
    return report


def _shown(value: Any) -> str:
    """A value as people type it; `not given` for none."""
    return " ".join(value) if isinstance(value, list) else "not given" if value is None else str(value)


def _hashes_now(report: PerplexityReport, name: str, label: str) -> object:
    if report.saved_reference is not None and label == report.reference:
        origin = SavedReference(Path(report.saved_reference)).model.origin
    else:
        found = resolve(name, revision=report.request["revision"])
        origin = origin_of(open_found(found), name, found.commit)
    return None if origin is None else (origin.manifest_sha256, origin.files)
