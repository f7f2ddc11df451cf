"""Reports a perplexity evaluation: its record as JSON, and the page that people read.

Losses and divergences are in nats per token unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from qconvert.core.dtypes import Json
from qconvert.evaluate.figures import perplexity_figures
from qconvert.evaluate.paired_statistics import Estimate
from qconvert.evaluate.records import Comparison, ModelResult
from qconvert.evaluate.weights_report import WeightReport
from qconvert.report.html import Figure
from qconvert.report.page import Grid, Page, number
from qconvert.report.tables import count, size

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """The conditions of an evaluation, and the figures of every model.

    `windows` says in words how the protocol cuts the text; `tokens` counts the text, `scored_tokens`
    those that the protocol counts in `chunks` windows, fewer than `planned_chunks` when interrupted;
    `noise_floor` compares the reference with itself, computed in batches of another size;
    `weights` holds the errors of each model's weights, where they were compared.
    """

    protocol: str
    windows: str
    text: str
    text_sha256: str
    text_bytes: int
    tokenizer_sha256: str
    tokens: int
    chunks: int
    planned_chunks: int
    scored_tokens: int
    reference: str | None
    models: tuple[ModelResult, ...]
    noise_floor: Comparison | None
    environment: dict[str, str]
    notes: tuple[str, ...]
    weights: tuple[WeightReport, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether the evaluation was interrupted before its end."""
        return self.chunks < self.planned_chunks

    def to_json(self) -> Json:
        head = {"report": "perplexity", "version": FORMAT_VERSION, "partial": self.partial}
        return head | asdict(self)

    def figures(self) -> list[Figure]:
        found = perplexity_figures(self.models, self.reference, self.noise_floor)
        return [*found, *(figure for report in self.weights for figure in report.figures())]

    def page(self) -> Page:
        """The page that people read: conditions, then figures."""
        environment = ", ".join(f"{name} {version}" for name, version in self.environment.items())
        scored = f"{self.scored_tokens:,} tokens scored in {count(self.chunks, 'chunk')}"
        facts = (
            ("protocol", f"{self.protocol}: {scored}, {self.windows}"),
            ("text", f"{self.tokens:,} tokens, {self.text_bytes:,} bytes, sha256 {self.text_sha256[:12]}"),
            ("tokenizer", f"sha256 {self.tokenizer_sha256[:12]}"),
            ("arithmetic", "; ".join(dict.fromkeys(model.arithmetic for model in self.models))),
            ("environment", environment),
        )
        head: tuple[str, ...] = ("model", "size", "bpw", "perplexity", "ratio", "bits/byte", "tokens/s")
        grids = [Grid("Quality", head, tuple(_quality_row(model) for model in self.models))]
        if self.reference is not None:
            head = ("model", "KL mean", "median", "p90", "p99", "p99.9", "max", "same top-1", "RMS dp")
            compared = [(model.label, model.versus) for model in self.models]
            compared.append((f"{self.reference}, again", self.noise_floor))
            rows = (_distance_row(label, versus) for label, versus in compared if versus is not None)
            grids.append(Grid(f"Distance from {self.reference}, in nats", head, tuple(rows)))
        return Page(f"Perplexity on {self.text}", facts, tuple(grids), self.notes)


def _estimate(estimate: Estimate, percent: bool = False) -> str:
    if not percent:
        return number(estimate.value, estimate.se)
    return number(100 * estimate.value, None if estimate.se is None else 100 * estimate.se) + " %"


def _quality_row(model: ModelResult) -> tuple[str, ...]:
    return (
        model.label,
        size(model.size_bytes),
        f"{model.bits_per_weight:.2f}",
        _estimate(model.perplexity),
        "" if model.versus is None else _estimate(model.versus.perplexity_ratio),
        f"{model.bits_per_byte:.4f}",
        f"{model.tokens_per_second:,.0f}",
    )


def _distance_row(label: str, versus: Comparison) -> tuple[str, ...]:
    kl = versus.kl
    tail = (f"{x:.2g}" for x in (kl.median, kl.p90, kl.p99, kl.p999, kl.max))
    agreement, change = _estimate(versus.top1_agreement, True), _estimate(versus.rms_delta_p, True)
    return (label, _estimate(kl.mean), *tail, agreement, change)
