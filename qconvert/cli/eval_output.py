"""Prints and writes the reports of `qconvert eval`, and judges them by --fail-above and --fail-above-kl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import error_record
from qconvert.cli.printing import terminal_columns
from qconvert.errors import CheckFailed

if TYPE_CHECKING:
    from qconvert.evaluate.perplexity_report import PerplexityReport
    from qconvert.evaluate.records import Comparison
    from qconvert.evaluate.weights_report import WeightReport


def _stem(_context: click.Context, _option: click.Parameter, value: Path | None) -> Path | None:
    from qconvert.report.files import stem_of

    return None if value is None else stem_of(value)


report_option = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="STEM",
    callback=_stem,
    help="Write STEM.json, .md and .html.",
)


def command_line() -> tuple[str, ...]:
    """The words of the command line, as they were typed."""
    words = click.get_current_context().find_root().obj
    return tuple(words) if isinstance(words, tuple) else ()


def write(report: PerplexityReport | WeightReport, stem: Path, *, quiet: bool) -> None:
    """Write the three files of a report, and say so."""
    from qconvert.report.files import write_report

    for path in write_report(report, stem):
        if not quiet:
            click.echo(f"wrote {path}", err=True)


def show_report(
    report: PerplexityReport | WeightReport, *, as_json: bool, failure: CheckFailed | None = None
) -> None:
    """Print a report: one JSON object, with the error of a failed check, or the page as text."""
    show_reports([report], as_json=as_json, failure=failure)


def show_reports(
    reports: Sequence[PerplexityReport | WeightReport], *, as_json: bool, failure: CheckFailed | None = None
) -> None:
    """Print reports: pages as text one after the other, or one JSON object, which lists several.

    With the error of a failed check; the glossary once, at the end.
    """
    from qconvert.report.page import to_terminal

    if as_json:
        found = [report.to_json() for report in reports]
        record = {"schema": 1, "ok": failure is None, **(found[0] if len(found) == 1 else {"reports": found})}
        if failure is not None:
            record["error"] = error_record(failure)
        click.echo(json.dumps(record))
        return
    last = len(reports) - 1
    columns = terminal_columns()
    pages = (
        to_terminal(report.page(), glossary=i == last, columns=columns) for i, report in enumerate(reports)
    )
    click.echo("\n".join(pages), nl=False)


def check_target(stem: Path | None) -> None:
    """Raise unless the report can be written, before anything is measured for it."""
    from qconvert.formats.io.local_file import require_writable
    from qconvert.report.files import SUFFIXES, report_path

    if stem is not None:
        for suffix in SUFFIXES:
            require_writable(report_path(stem, suffix))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model may lose against the reference; None is no limit.

    `ratio` is how far its perplexity ratio may exceed 1, `kl` the mean KL divergence in nats per token.
    """

    ratio: float | None = None
    kl: float | None = None

    @staticmethod
    def taken_from(options: dict[str, Any]) -> Limits:
        """Take the values of --fail-above and --fail-above-kl out of a command's options."""
        return Limits(options.pop("fail_above"), options.pop("fail_above_kl"))

    def exceeded(self, report: PerplexityReport) -> CheckFailed | None:
        """What to say of the models that lost more; a figure that is not a number is more."""
        lost = [
            f"{model.label}: {said}"
            for model in report.models
            if model.versus is not None and (said := self._said(model.versus)) is not None
        ]
        if not lost:
            return None
        hint = "use more bits, a smaller group, or --rule for the sensitive roles"
        return CheckFailed("; ".join(lost), hint)

    def _said(self, versus: Comparison) -> str | None:
        ratio, kl = versus.perplexity_ratio.value, versus.kl.mean.value
        if self.ratio is not None and not ratio <= 1 + self.ratio:
            return f"perplexity is {ratio:.4f} times the reference's, more than {1 + self.ratio:.4f}"
        if self.kl is not None and not kl <= self.kl:
            return f"the mean KL divergence is {kl:.4g} nats per token, more than {self.kl:.4g}"
        return None
