"""Carries an evaluation out as one of several processes, of which one writes the report and tells it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.core.ranks import is_divided
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.core.ranks import Rank
    from qconvert.evaluate.perplexity_report import PerplexityReport
    from qconvert.evaluate.ranks import Share


def check_divided(options: dict[str, Any]) -> None:
    """Raise BadRecipe for what one of several processes cannot do."""
    if not is_divided(options["rank"]):
        return
    if options["out"] is None:
        raise BadRecipe("--rank: the processes meet beside the report, which has no name", "add -o STEM")
    alone = {
        "--save-reference": options["save_reference"],
        "--samples": options["samples"],
        "a second --text": len(options["texts"]) > 1,
    }
    given = next((name for name, value in alone.items() if value), None)
    if given:
        raise BadRecipe(f"{given}: works in one process only", "leave it out, or give --rank 0/1")


def report_with_others(
    stem: Path,
    rank: Rank,
    *,
    finished: Callable[[], PerplexityReport | None],
    measured: Callable[[Share], PerplexityReport],
    written: Callable[[PerplexityReport], PerplexityReport],
) -> PerplexityReport | None:
    """Measure as one of several processes; the report if this one is to tell it.

    That is the one that has `written` it; one that was `finished` before is read back, and told by the first.
    """
    from qconvert.evaluate.ranks import Share
    from qconvert.formats.io.shared_folder import Published, is_shared

    record = stem.with_name(f"{stem.name}.json")
    if record.exists() and not is_shared(stem):
        try:
            found = finished()
        except BadRecipe as error:
            raise BadRecipe(error.fact, f"remove {record}, or choose another -o") from error
        if found is not None:
            return found if rank.number == 0 else None
    share, made = Share(stem, rank), []
    try:
        report = measured(share)
        share.finish(lambda: made.append(written(report)))
    except Published:
        return None
    finally:
        share.close()
    return made[0] if made else None
