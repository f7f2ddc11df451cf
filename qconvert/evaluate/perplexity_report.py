"""Reports a perplexity evaluation: its record as JSON, and the page that people read.

Losses and divergences are in nats per token unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from qconvert.core.dtypes import Json
from qconvert.evaluate.figures import perplexity_figures, short_role
from qconvert.evaluate.mix_table import mix_grid
from qconvert.evaluate.paired_statistics import Estimate
from qconvert.evaluate.provenance import origins_grid, run_facts
from qconvert.evaluate.records import Comparison, MemoryUse, ModelResult, PromptSample, relative_rms
from qconvert.evaluate.scales import GLOSSARY, GLOSSARY_ALONE, SCALES
from qconvert.evaluate.verdict import perplexity_verdict
from qconvert.evaluate.weights_report import WeightReport, layer_grids
from qconvert.report.html import Figure
from qconvert.report.page import Grid, Page, Sample, number, to_terminal
from qconvert.report.tables import count, size

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """The conditions of an evaluation, and the figures of every model.

    `windows` says in words how the protocol cuts the text; `tokens` counts the text, `scored_tokens`
    those that the protocol counts in `chunks` windows, fewer than `planned_chunks` when interrupted;
    `noise_floor` compares the reference with itself, computed in batches of another size;
    `weights` holds the errors of each model's weights, where they were compared; `samples` what the models
    wrote. `date` is in UTC, `command` the words of the command line, `request` what they asked for (empty
    where there was none), `saved_reference` the file that the reference was read from. `memory` is what was
    taken where layers were read in turn.
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
    date: str = ""
    command: tuple[str, ...] = ()
    request: Json = field(default_factory=dict)
    saved_reference: str | None = None
    samples: tuple[PromptSample, ...] = ()
    memory: MemoryUse | None = None

    def __str__(self) -> str:
        """What the command prints, without its glossary."""
        return to_terminal(self.page(), glossary=False)

    @property
    def partial(self) -> bool:
        """Whether the evaluation was interrupted before its end."""
        return self.chunks < self.planned_chunks

    @property
    def verdict(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return perplexity_verdict(self.models, self.reference)

    def to_json(self) -> Json:
        head = {"report": "perplexity", "version": FORMAT_VERSION, "partial": self.partial}
        scales = {"scales": [scale.to_json() for scale in SCALES]}
        record = head | {"verdict": list(self.verdict)} | asdict(self) | scales
        if self.memory is None:
            del record["memory"]
        return record

    def figures(self) -> list[Figure]:
        found = perplexity_figures(self.models, self.reference, self.noise_floor)
        return [*found, *(figure for report in self.weights for figure in report.figures())]

    def page(self) -> Page:
        """The page that people read: the verdict, conditions, then figures."""
        return Page(
            f"Perplexity on {self.text}",
            tuple(self._facts()),
            tuple(self._grids()),
            self.notes,
            verdict=self.verdict,
            glossary=GLOSSARY_ALONE if self.reference is None else GLOSSARY,
            details=tuple(self._details()),
            samples=tuple(_sample(i, sample) for i, sample in enumerate(self.samples)),
            sources=self._sources(),
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        scored = f"{self.scored_tokens:,} tokens scored in {count(self.chunks, 'chunk')}"
        yield "protocol", f"{self.protocol}: {scored}, {self.windows}"
        yield "text", f"{self.tokens:,} tokens, {self.text_bytes:,} bytes, sha256 {self.text_sha256[:12]}"
        yield "tokenizer", f"sha256 {self.tokenizer_sha256[:12]}"
        yield from self._arithmetic()
        if self.saved_reference is not None:
            yield "reference", f"{self.reference}, as saved in {self.saved_reference}"
        if self.memory is not None:
            asked, peak = size(self.memory.asked_bytes), size(self.memory.peak_bytes)
            yield "memory", f"{peak} at most of {asked}, layers read in turn"
        yield from run_facts(self.date, self.command, self.environment)

    def _arithmetic(self) -> Iterator[tuple[str, str]]:
        """A line for every kind of arithmetic, with the models that it is of where there are several."""
        labels: dict[str, list[str]] = {}
        for model in self.models:
            labels.setdefault(model.arithmetic, []).append(model.label)
        for words, alike in labels.items():
            yield "arithmetic", words if len(labels) == 1 else f"{', '.join(alike)}: {words}"

    def _grids(self) -> Iterator[Grid]:
        head: tuple[str, ...] = ("model", "size", "bpw", "perplexity", "ratio", "bits/byte", "eval tokens/s")
        yield Grid("Quality", head, tuple(_quality_row(model) for model in self.models))
        if self.reference is not None:
            head = ("model", "KL mean", "median", "p90", "p99", "p99.9", "max", "same top-1", "RMS dp")
            compared = [(model.label, model.versus) for model in self.models]
            compared.append((f"{self.reference}, again", self.noise_floor))
            rows = (_distance_row(label, versus) for label, versus in compared if versus is not None)
            yield Grid(f"Distance from {self.reference}, in nats", head, tuple(rows))

    def _sources(self) -> tuple[Grid, ...]:
        known = [(model.label, model.origin) for model in self.models if model.origin]
        return (origins_grid(*zip(*known, strict=True)),) if known else ()

    def _details(self) -> Iterator[Grid]:
        if any(report.errors for report in self.weights):
            yield _weights_grid(self.weights)
        for model in self.models:
            target = model.origin.target if model.origin else None
            if target and (grid := mix_grid(model.label, target)):
                yield grid
        yield from layer_grids(self.weights)


def _sample(i: int, sample: PromptSample) -> Sample:
    texts = [(each.label, each.text, each.same) for each in sample.continuations]
    shown = (*texts, ("(the text itself)", sample.text, len(sample.text)))
    return Sample(f"Sample {i + 1}: what the models write next", sample.prompt, shown)


def _weights_grid(reports: tuple[WeightReport, ...]) -> Grid:
    """Relative RMS errors by role, a column for every model."""
    roles = dict.fromkeys(short_role(error.role) for report in reports for error in report.errors)
    rows = []
    for role in roles:
        alike = ([e for e in report.errors if short_role(e.role) == role] for report in reports)
        rows.append((role, *(f"{relative_rms(errors):.4g}" if errors else "" for errors in alike)))
    labels = (report.b for report in reports)
    return Grid("Errors of the weights by role, relative RMS", ("role", *labels), tuple(rows))


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
