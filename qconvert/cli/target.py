"""Adds target sizes and divergences to a command: options, the run before planning, its messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.calibrate.sensitivity import Sensitivity
    from qconvert.calibrate.text import CalibrationText
    from qconvert.cli.flags import Flags
    from qconvert.cli.target_told import Told
    from qconvert.convert.candidates import Candidates, Decision
    from qconvert.convert.job import Job, OpenedModel
    from qconvert.convert.publish import Destination
    from qconvert.convert.saved_prices import SavedPrices
    from qconvert.convert.target import Chosen, Measure, Prepare
    from qconvert.core.dtypes import Json
    from qconvert.plan.budget import Target
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
            help="Mix encodings for least loss at this size: 4.5bpw (tensors over all weights, the embedding "
            "too), or 3.2GB (weight files with their headers; of a GGUF all of the file). With --method "
            "feedback or two-sided, the mix and the best single encoding are both made, and the better "
            "one is kept: twice the time of one output.",
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
        """The target, None without one. Raises BadRecipe for one that cannot be reached."""
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
    """Makes the request that reaches a target, once the model is opened; then tells what it chose.

    A mix for a size is measured beside its rival of one encoding: before anything is written where codes are
    the nearest ones, else as both were written (`settled`).
    """

    wanted: Wanted
    target: Target
    request: Request
    flags: Flags
    chosen: Chosen | None = field(default=None, init=False)
    read: Json = field(default_factory=dict, init=False)
    measured_on: Json = field(default_factory=dict, init=False)
    _measure: Measure | None = field(default=None, init=False)
    _saved: SavedPrices | None = field(default=None, init=False)
    _written: Prepare | None = field(default=None, init=False)

    def __call__(self, source: OpenedModel) -> Request:
        """The request; runs the model over the text, forwards and backwards, or takes what was stored."""
        from qconvert.calibrate.calibration import DAMPING
        from qconvert.calibrate.statistics_file import open_statistics
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
        damping = DAMPING if self._together else None

        def prepared(request: Request) -> Any:
            return prepare(source, request, flags.options, pre_tokenizer=flags.pre_tokenizer)

        calibration = flags.calibration(source, aims=True)

        def written(request: Request) -> Any:
            named = flags.pre_tokenizer
            return prepare(source, request, flags.options, calibration=calibration, pre_tokenizer=named)

        self._written = written
        found, record = self._stored(request) or self._measured(source, damping)
        self.chosen = chosen = choose(
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
        if chosen.rival is not None and self._measure is not None and not self._together:
            from qconvert.evaluate.planned import compared

            kls = self._measure([prepared(each.request) for each in (chosen.best, chosen.rival)])
            self._take(compared(kls, {"as_written": False, "unseen": False}))
        return self.chosen.request

    @contextmanager
    def settled(self, job: Job, out: Path, destination: Destination | None) -> Iterator[Job]:
        """The job that is to be written to `out`: of the mix and its rival the one that is better as written.

        Both are made where codes are chosen together; all blocks of the better one are there then, unless it
        goes to a destination. Raises what `cli.running.executed` raises.
        """
        assert self.chosen is not None and self._written is not None
        if self.chosen.rival is None or not self._together:
            yield job
            return
        from qconvert.convert.candidates import Candidates

        candidates = Candidates((job, self._written(self.chosen.rival.request)), out)
        if self.flags.talks:
            click.echo("making the mix and one encoding throughout; the better one is finished", err=True)
        if job.options.restart:
            candidates.clear()
        decision = candidates.decided()
        if decision is None:
            candidates.check()
            decision = self._measure_written(candidates)
            candidates.decide(decision)
        self._take(decision)
        if destination is None:
            candidates.promote(mixed=decision.mixed)
        candidates.drop()
        best = candidates.jobs[0 if decision.mixed else 1]
        yield replace(best, options=replace(best.options, restart=False))
        candidates.clear()

    @property
    def _together(self) -> bool:
        """Whether codes are chosen together, on a text."""
        return self.flags.method_traits.together

    def _measure_written(self, candidates: Candidates) -> Decision:
        """Make both candidates, and measure them."""
        from qconvert.calibrate.activation_file import scratch_folder
        from qconvert.cli.events import name_of, stage_to
        from qconvert.cli.running import candidates_made
        from qconvert.evaluate.planned import compared, divergences_of, unseen_windows

        job, scratch, flags = candidates.jobs[0], scratch_folder(candidates.out), self.flags
        assert job.calibration is not None

        def read(tokens: int) -> CalibrationText:
            return replace(flags, tokens=tokens).read_text(job.source, 0)

        read_BT, used = job.calibration.tokens_BT, self.read["tokens"]
        tokens_BT, unseen = unseen_windows(read_BT, used, None if flags.tokens is None else read)
        with (
            candidates_made(candidates, flags, scratch) as weights,
            stage_to(flags.events, "measure", [name_of(job.source)], "window") as lines,
        ):
            kls = divergences_of(weights, job, tokens_BT, scratch=scratch, progress=lines.tell)
        return compared(kls, {"as_written": True, "unseen": unseen})

    def _take(self, decision: Decision) -> None:
        assert self.chosen is not None
        self.chosen = self.chosen.decided(decision.nats, mixed=decision.mixed)
        self.measured_on = decision.on

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
        from qconvert.calibrate.activation_file import scratch_folder
        from qconvert.calibrate.calibration import Calibration
        from qconvert.calibrate.fit import fitted_weighing
        from qconvert.calibrate.measure_sensitivity import sensitivities_of
        from qconvert.calibrate.memory import Work
        from qconvert.calibrate.memory_limit import memory_limit
        from qconvert.cli.events import name_of, stage_to
        from qconvert.cli.progress import layers_passed
        from qconvert.convert.saved_prices import SavedPrices
        from qconvert.evaluate.planned import planned_divergences, planned_memory
        from qconvert.runtime.config import DecoderConfig

        flags = self.flags
        text = flags.read_text(source, DEFAULT_TOKENS)
        scratch = scratch_folder(flags.out or Path("output"))
        names = [name_of(source)]

        def measure(jobs: Sequence[Job]) -> Any:
            with stage_to(flags.events, "measure", names, "window") as lines:
                return planned_divergences(jobs, text.tokens_BT, scratch=scratch, progress=lines.tell)

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
            with (
                stage_to(flags.events, "weigh", names, "pass") as lines,
                layers_passed(text.tokens, talks=flags.logs, also=lines.tell) as progress,
            ):
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
        return self._told.lines()

    def to_json(self) -> Json:
        """The same as plain data, every option of every weight with it."""
        return self._told.to_json()

    @property
    def _told(self) -> Told:
        from qconvert.cli.target_told import Told

        assert self.chosen is not None
        method = self.flags.method if self._together else None
        return Told(
            self.chosen, self.target, (self.wanted.target_size, self.wanted.target_kl), self.read,
            self.measured_on, method, self._saved,
        )  # fmt: skip
