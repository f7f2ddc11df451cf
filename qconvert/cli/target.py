"""Lets a command aim at a size or a divergence: its options, the run before planning, what is told of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.calibrate.sensitivity import Sensitivity
    from qconvert.cli.flags import Flags
    from qconvert.convert.job import OpenedModel
    from qconvert.convert.saved_prices import SavedPrices
    from qconvert.convert.target import Chosen, Measure
    from qconvert.core.dtypes import Json
    from qconvert.plan.budget import Mix, Target
    from qconvert.plan.request import Request

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TOKENS = 16 << 10
"""Of calibration text, for the costs of encodings."""


def target_options(choices: str, default: str) -> Callable[[F], F]:
    """The options of a target; `choices` names the option that lists the encodings to choose among."""
    options = (
        click.option(
            "--target-size",
            metavar="SIZE",
            help="Mix encodings for least loss at this size: 4.5bpw (of all weights), 3.2GB.",
        ),
        click.option(
            "--target-kl",
            metavar="NATS",
            help="Mix encodings for the smallest size whose expected KL divergence is at most this.",
        ),
        click.option(
            f"--{choices}",
            "choices",
            metavar="LIST",
            show_default=default,
            help="Encodings that a target chooses among, separated by commas.",
        ),
        click.option(
            "--prices",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Keep the prices of encodings in FILE, and take them from there: of one model and text, "
            "many targets cost one run of the text, and --dry-run fills it too.",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values of `target_options`; `default` are the encodings where none are named."""

    default: str
    target_size: str | None = None
    target_kl: str | None = None
    choices: str | None = None
    prices: Path | None = None

    @staticmethod
    def taken_from(values: dict[str, Any], default: str) -> Wanted:
        """Take the values of these options out of a command's."""
        names = ("target_size", "target_kl", "choices", "prices")
        return Wanted(default, **{name: values.pop(name) for name in names})

    @property
    def target(self) -> Target | None:
        """What is aimed at; None for nothing. Raises BadRecipe for what cannot be aimed at."""
        if self.target_size is None and self.target_kl is None:
            for name, value in (("--schemes, --types", self.choices), ("--prices", self.prices)):
                if value:
                    hint = "add --target-size 4.5bpw, or leave it out"
                    raise BadRecipe(f"{name}: given without a target", hint)
            return None
        from qconvert.plan.budget import Target, parse_target_kl, parse_target_size

        labels = tuple(label.strip() for label in (self.choices or self.default).split(",") if label.strip())
        return Target(
            tuple(dict.fromkeys(labels)),
            None if self.target_size is None else parse_target_size(self.target_size),
            None if self.target_kl is None else parse_target_kl(self.target_kl),
        )

    @property
    def suffix(self) -> str:
        """What the derived name of an output says of the target."""
        text = self.target_size or f"kl{self.target_kl}"
        return re.sub(r"[^\w.]+", "", text).lower()


@dataclass
class Aiming:
    """Makes the request that reaches a target, once the model is opened; then tells what it chose."""

    wanted: Wanted
    target: Target
    request: Request
    flags: Flags
    chosen: Chosen | None = field(default=None, init=False)
    read: Json = field(default_factory=dict, init=False)
    _measure: Measure | None = field(default=None, init=False)
    _saved: SavedPrices | None = field(default=None, init=False)

    def __call__(self, source: OpenedModel) -> Request:
        """The request; runs the model over the text, forwards and backwards, or takes what was stored."""
        from dataclasses import replace

        from qconvert.calibrate.calibration import DAMPING
        from qconvert.calibrate.statistics_file import open_statistics
        from qconvert.cli.calibration_options import method_named
        from qconvert.convert.execute import is_tied, prepare
        from qconvert.convert.target import choose

        checkpoint, flags, request = source.checkpoint, self.flags, self.request
        if flags.statistics is not None:
            if self.wanted.prices is not None:
                raise BadRecipe(
                    "--prices: with --calibration, errors are weighed by what that file has",
                    "leave out one of the two",
                )
            request = replace(request, statistics=open_statistics(flags.statistics, checkpoint.architecture))
        together = method_named(flags.method) != "nearest" and request.statistics is None
        damping = DAMPING if together else None

        def prepared(request: Request) -> Any:
            return prepare(source, request, flags.options, pre_tokenizer=flags.pre_tokenizer)

        calibration = flags.calibration(source, aims=True)

        def written(request: Request) -> Any:
            named = flags.pre_tokenizer
            return prepare(source, request, flags.options, calibration=calibration, pre_tokenizer=named)

        found, record = self._stored(request) or self._measured(source, damping)
        self.chosen = choose(
            self.target,
            request,
            found,
            prepared,
            record=record,
            damping=damping,
            measure=self._measure,
            saved=self._saved,
            written=written,
            tied=is_tied(checkpoint, request),
        )
        return self.chosen.request

    def _stored(self, request: Request) -> tuple[Iterator[Sensitivity], Json] | None:
        """The sensitivities in the file of statistics, if it has any and no text was asked for."""
        from qconvert.calibrate.sensitivity import stored_sensitivities
        from qconvert.calibrate.statistics_file import StoredStatistics

        stored, flags = request.statistics, self.flags
        if not isinstance(stored, StoredStatistics) or stored.gradients is None:
            return None
        if flags.texts or flags.tokens != 0 or flags.window:
            return None
        self.read = stored.text | {"tokens": stored.gradients.tokens}
        if flags.talks:
            tokens = stored.gradients.tokens
            line = f"weighing encodings: sensitivities of {tokens:,} tokens in {flags.statistics}"
            click.echo(line, err=True)
        return stored_sensitivities(stored.gradients, stored.statistics), stored.record

    def _measured(self, source: OpenedModel, damping: float | None) -> tuple[Iterator[Sensitivity], Json]:
        """The sensitivities that a run forwards and backwards finds, and a record of its text."""
        from functools import partial

        from qconvert.calibrate.activation_file import scratch_folder
        from qconvert.calibrate.calibration import Calibration
        from qconvert.calibrate.fit import fitted_weighing
        from qconvert.calibrate.measure_sensitivity import sensitivities_of
        from qconvert.calibrate.memory import Work
        from qconvert.calibrate.memory_limit import memory_limit
        from qconvert.cli.progress import layers_passed
        from qconvert.convert.saved_prices import SavedPrices
        from qconvert.evaluate.planned import planned_divergences, planned_memory
        from qconvert.runtime.config import DecoderConfig

        flags = self.flags
        text = flags.read_text(source, DEFAULT_TOKENS)
        scratch = scratch_folder(flags.out or Path("output"))
        measure = partial(planned_divergences, tokens_BT=text.tokens_BT, scratch=scratch)
        self.read, self._measure = text.record, measure
        if self.wanted.prices is not None:
            self._saved = SavedPrices.at(self.wanted.prices, source, text.tokens_BT, damping)
        config = DecoderConfig.of(source.checkpoint.architecture)
        work = Work(config, Calibration(text.tokens_BT, shift=False, gradient_tokens=text.tokens), 1, 4.0)
        options = flags.options
        limit = memory_limit(options.process_memory)
        savings, room = fitted_weighing(work, limit, hessians=options.max_memory // 2)
        planned_memory(source.checkpoint, text.window, limit)  # which is said now, not after the weighing

        def found() -> Iterator[Sensitivity]:
            if flags.talks:
                line = f"weighing encodings: {text.tokens:,} tokens forwards and backwards through the model"
                click.echo(line, err=True)
            with layers_passed(text.tokens, talks=flags.talks) as progress:
                yield from sensitivities_of(
                    source.checkpoint,
                    text.tokens_BT,
                    scratch=scratch,
                    most_bytes=room,
                    holds=damping is not None,
                    savings=savings,
                    progress=progress,
                )

        record: Json = {"file": ", ".join(text.names), "dataset": None, "chunks": len(text.tokens_BT)}
        return found(), {**record, "texts": [text.record]}

    def lines(self) -> list[str]:
        """What was chosen, as a table for people."""
        from qconvert.report.tables import size, table

        assert self.chosen is not None
        chosen, labels = self.chosen, self._labels
        rows: dict[str, tuple[Counter[str], int, float]] = {}
        for group, option in chosen.mix.chosen:
            kind = re.sub(r"\.\d+\.", ".N.", group.name)
            counts, nbytes, cost = rows.get(kind, (Counter(), 0, 0.0))
            counts[option.label] += 1
            rows[kind] = (counts, nbytes + option.nbytes, cost + option.cost)
        cells = [
            [kind, *(str(counts[label] or "") for label in labels), size(nbytes), f"{cost:.5f}"]
            for kind, (counts, nbytes, cost) in rows.items()
        ]
        return [
            *table(["weights loaded alike", *labels, "bytes", "expected KL"], cells),
            f"{size(chosen.nbytes)}, {chosen.bits_per_weight:.3f} bits for each of {chosen.weights:,} "
            f"weights; expected KL {chosen.mix.cost:.5f} nats per token (on {self.read['tokens']:,} tokens"
            f" of {', '.join(self.read['texts'])})",
            self._compared(),
            *self._measured_lines(),
            *(f"{label} is left out: {why}" for label, why in chosen.left_out.items()),
            *self._saved_lines(),
        ]

    @property
    def _labels(self) -> list[str]:
        assert self.chosen is not None
        return [label for label in self.target.labels if label not in self.chosen.left_out]

    def _compared(self) -> str:
        assert self.chosen is not None
        same, kls = self.chosen.uniform, self.chosen.measured
        if same is None:
            return "no single encoding reaches the target"
        label, fewer = _label(same), 1 - self.chosen.mix.nbytes / same.nbytes
        if len(kls) == 2 and self.chosen.mix.labels == same.labels:
            return f"{label} throughout: measured KL {kls[1]:.5f}, that of the best mix {kls[0]:.5f}"
        return (
            f"with {label} throughout: expected KL {same.cost:.5f}, and {abs(fewer):.1%} "
            f"{'more' if fewer > 0 else 'fewer'} bytes of these weights"
        )

    def _measured_lines(self) -> list[str]:
        assert self.chosen is not None
        kls = self.chosen.measured
        same = self.chosen.uniform
        if not kls or (same is not None and same.labels == self.chosen.mix.labels):
            return []
        beside = f", {_label(self.chosen.uniform)} throughout {kls[1]:.5f}" if len(kls) == 2 else ""
        return [f"measured with nearest codes on this text: KL {kls[0]:.5f}{beside}"]

    def _saved_lines(self) -> list[str]:
        if self._saved is None:
            return []
        taken, path = self._saved.taken, self._saved.path
        return [
            f"prices of {', '.join(taken)} are those in {path}" if taken else f"prices are kept in {path}"
        ]

    def to_json(self) -> Json:
        """The same as plain data, every option of every weight with it."""
        assert self.chosen is not None
        chosen, same = self.chosen, self.chosen.uniform
        return {
            "target": {"size": self.wanted.target_size, "kl": self.wanted.target_kl},
            "choices": self._labels,
            "left_out": dict(chosen.left_out),
            "text": dict(self.read),
            "bytes": chosen.nbytes,
            "weights": chosen.weights,
            "expected_kl": chosen.mix.cost,
            "measured_kl": dict(zip(("mix", "uniform"), chosen.measured, strict=False)),
            "uniform": None
            if same is None
            else {"choice": _label(same), "bytes": same.nbytes, "expected_kl": same.cost},
            "groups": [
                {
                    "weights": list(group.members),
                    "choice": option.label,
                    "options": [
                        {"choice": each.label, "bytes": each.nbytes, "expected_kl": each.cost}
                        for each in group.options
                    ],
                }
                for group, option in chosen.mix.chosen
            ],
        }


def _label(mix: Mix | None) -> str:
    assert mix is not None
    return mix.chosen[0][1].label
