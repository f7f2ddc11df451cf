"""Carries out a writing command: open, compile, tell, execute, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import click

from qconvert.cli.exit_codes import after_the_work, typed
from qconvert.cli.hub_source import fetched, network_of, tell_source
from qconvert.cli.options import (
    CONNECTIONS,
    DEFAULT_MAX_MEMORY,
    DEFAULT_SHARD_SIZE,
    PATIENCE,
    available_cores,
)
from qconvert.cli.progress import compile_kernels, progress
from qconvert.cli.signals import Stopped, ending_in_time
from qconvert.cli.skipping import Tell, one_object, require_own_name, skipped
from qconvert.core.sizes import parse_size
from qconvert.errors import BadRecipe, QConvertError, UnsupportedModel

if TYPE_CHECKING:
    from qconvert.calibrate.calibration import Calibration
    from qconvert.calibrate.text import CalibrationText
    from qconvert.checkpoint.network import Network
    from qconvert.convert.job import Job, OpenedModel, Result, RunOptions
    from qconvert.convert.resume import RunJournal
    from qconvert.core.dtypes import Json
    from qconvert.plan.recipe import Recipe
    from qconvert.plan.request import Request


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of `options.writing_options`, and of options that some writing commands have.

    Of several models, outputs with derived names go into `folder`, and `taken` are those that were made.
    """

    out: Path | None = None
    overwrite: bool = False
    restart: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    verify: bool = True
    jobs: int | None = None
    max_memory: int | None = None
    shard_size: int | None = parse_size(DEFAULT_SHARD_SIZE)
    hash_sources: bool = False
    dtype: str | None = None
    revision: str | None = None
    keep_source: bool = False
    connections: int = CONNECTIONS
    patience: int = PATIENCE
    allow_unknown: bool = False
    allow_nonfinite: bool = False
    statistics: Path | None = None
    method: str = "nearest"
    texts: tuple[str, ...] = ()
    tokens: int | None = 0
    window: int | None = None
    inputs: str = "quantized"
    pre_tokenizer: str | None = None
    beside: tuple[str, ...] = ()
    skip_existing: bool = False
    folder: Path = Path()
    taken: tuple[Path, ...] = ()

    @property
    def options(self) -> RunOptions:
        from qconvert.convert.job import RunOptions

        return RunOptions(
            self.jobs or available_cores(),
            parse_size(DEFAULT_MAX_MEMORY) if self.max_memory is None else self.max_memory,
            self.shard_size,
            verify=self.verify,
            overwrite=self.overwrite,
            hash_sources=self.hash_sources,
            restart=self.restart,
            process_memory=self.max_memory,
        )

    def calibration(self, source: OpenedModel, *, aims: bool) -> Calibration | None:
        """The calibration that is asked for, on the tokens of a model; None where there is none.

        Raises BadRecipe for a text that neither a method nor a target (`aims`) would read.
        """
        from qconvert.cli.calibration_options import DEFAULT_TOKENS, check_idle, method_named

        method = method_named(self.method)
        if method == "nearest":
            given = {"--text": self.texts, "--tokens": self.tokens != 0, "--window": self.window}
            check_idle(given, aims=aims)
            check_idle({"--inputs": self.inputs != "quantized"}, aims=False)
            return None
        if method == "awq" and self.statistics is not None:
            return None
        if self.statistics is not None:
            raise BadRecipe(
                f"--calibration: --method {self.method} measures its own statistics",
                "leave out one of the two",
            )
        from qconvert.calibrate.calibration import Calibration

        if method == "awq":
            _require_decoder(source)
        text = self.read_text(source, DEFAULT_TOKENS)
        return Calibration(text.tokens_BT, text.record, method, shift=self.inputs == "quantized")

    def check(self, *, aims: bool) -> None:
        """Raise BadRecipe for options that do not go with --skip-existing, or with --method awq."""
        if self.skip_existing and (self.overwrite or aims):
            other = "--overwrite" if self.overwrite else "a target, whose choice is measured each time"
            raise BadRecipe(f"--skip-existing: given beside {other}", "leave out one of the two")
        if self.method != "awq":
            return
        if aims:
            raise BadRecipe(
                "--method awq: given beside a target, which would not know what scaling wins",
                "leave out one of the two",
            )
        given = {"--text": self.texts, "--tokens": self.tokens, "--window": self.window}
        idle = next((name for name, value in given.items() if value), None)
        if self.statistics is not None and idle:
            raise BadRecipe(f"{idle}: --calibration has what is measured", "leave out one of the two")

    def read_text(self, source: OpenedModel, most: int) -> CalibrationText:
        """The calibration text in the tokens of a model: `most` where no number was asked for."""
        from qconvert.calibrate.run import read_text

        tokens = most if self.tokens == 0 else self.tokens
        return read_text(source.checkpoint, self.texts or ("default",), tokens, self.window)

    def network(self, *, aims: bool) -> Network | None:
        """What reads a Hub model while it is converted; None where it is downloaded first.

        That is where it is asked for, and where weights are read more than once: for a calibrated method, or
        for a target (`aims`).
        """
        again = aims or (self.method != "nearest" and not self.dry_run)
        return (
            None
            if self.keep_source or again
            else network_of(self.connections, self.patience, talks=self.talks)
        )

    @property
    def talks(self) -> bool:
        return not (self.quiet or self.as_json)

    def request(self, command: str, recipe: Recipe, **more: Any) -> Request:
        """The request of a command with this recipe; `more` are other fields of it."""
        from qconvert.calibrate.calibration import METHODS
        from qconvert.core.dtypes import DTYPE_BY_CODE
        from qconvert.plan.request import Request

        return Request(
            command,
            recipe,
            dtype=DTYPE_BY_CODE[self.dtype.upper()] if self.dtype else None,
            allow_unknown=self.allow_unknown,
            allow_nonfinite=self.allow_nonfinite,
            scale_inputs=METHODS[self.method] == "awq",
            **more,
        )


def _require_decoder(source: OpenedModel) -> None:
    """Raise UnsupportedModel for a family whose inputs cannot be measured here."""
    from qconvert.runtime.config import DecoderConfig

    try:
        DecoderConfig.of(source.checkpoint.architecture)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{error.fact}, so what its weights read cannot be measured",
            "give --calibration FILE: an importance matrix that llama-imatrix measured",
        ) from error


Ask = Callable[["OpenedModel"], "Request"]
"""Makes a request for an opened model."""


@runtime_checkable
class Explained(Protocol):
    """Makes a request for an opened model of one that leaves something open, and tells what it chose."""

    request: Request

    def __call__(self, source: OpenedModel) -> Request: ...

    def lines(self) -> list[str]:
        """What was chosen and why, for people; once it was called."""
        ...

    def to_json(self) -> Json:
        """The same as plain data."""
        ...


def write(
    model: str, ask: Request | Ask | Explained, suffix: str, flags: Flags, tell: Tell = one_object
) -> Path:
    """Carry out a writing command on one model, and print its result; under --json give it to `tell`.

    `ask` is the request, or what makes it of the opened model; `suffix` completes the derived name, the name
    of the dtype where it is empty. Returns the path of the output.
    """
    from qconvert.cli.conversion_report import advice, report_of
    from qconvert.convert.execute import open_model, prepare
    from qconvert.formats.io.local_file import require_free_disk

    with typed():
        flags.check(aims=isinstance(ask, Explained))
    _check_before_download(model, ask, flags)
    chooser = ask if isinstance(ask, Explained) else None
    known = chooser.request if chooser else None if callable(ask) else ask
    source = open_model(
        model,
        revision=flags.revision,
        declared=known.recipe.architecture if known else None,
        plan_only=flags.dry_run,
        network=flags.network(aims=chooser is not None),
    )
    started = time.perf_counter()
    request = ask(source) if callable(ask) else ask
    chosen_in = time.perf_counter() - started if chooser else 0.0
    job = prepare(
        source,
        request,
        flags.options,
        statistics=flags.statistics,
        calibration=flags.calibration(source, aims=chooser is not None),
        pre_tokenizer=flags.pre_tokenizer,
    )
    derived = suffix or (request.dtype.label if request.dtype else "")
    out = flags.out or flags.folder / job.container.default_out(derived)
    require_own_name(out, flags.taken)
    how = {"dry_run": flags.dry_run, "as_json": flags.as_json, "quiet": flags.quiet}
    if flags.skip_existing and skipped(job, out, tell, **how):
        return out
    if not flags.dry_run:
        job.container.check_target(out)
        _check_beside(out, flags)
    report = report_of(job, out)
    if not flags.as_json:
        for warning in report.warnings():
            click.echo(f"Warning: {warning}", err=True)
    chosen = chooser.lines() if chooser else []
    lines, extra = [*chosen, *report.lines()], {"target": chooser.to_json()} if chooser else {}
    if job.compiled.scalable:
        _tell_scaling(job, flags)
    elif job.calibration is not None and job.calibration.method != "awq":
        _tell_needs(job, flags)
    if flags.dry_run:
        assumed = source.checkpoint.assumed
        verdict = "dry run: nothing was written" + (f"; planned from {assumed} alone" if assumed else "")
        told = {"from": assumed} if assumed else {}
        _print(lines, lambda: report.plan_json() | extra | told, verdict, report.path, flags, tell)
        return out
    held = sum(path.stat().st_blocks * 512 for path in job.container.partial(out) if path.is_file())
    require_free_disk(out, job.container.bytes_needed - held)
    tell_source(source, talks=flags.talks)
    compile_kernels(job.compiled.plan, talks=flags.talks)
    started = time.perf_counter()
    result = _executed(job, out, flags)
    seconds = chosen_in + time.perf_counter() - started
    _write_beside(job, result, flags)
    with after_the_work():
        found = report.result_json(result, seconds) | extra | fetched(source)
        _print(lines, lambda: found, report.verdict(result, seconds), report.path, flags, tell)
        for line in advice(job, result.path) if flags.talks else ():
            click.echo(line, err=True)
    return out


def _check_beside(out: Path, flags: Flags) -> None:
    if flags.beside:
        from qconvert.convert.gguf_sidecars import check_sidecars

        check_sidecars(out, flags.beside, overwrite=flags.overwrite)


def _write_beside(job: Job, result: Result, flags: Flags) -> None:
    """Write the card and the Modelfile that were asked for, of the file as it is read back."""
    if not flags.beside:
        return
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.convert.gguf_sidecars import CARD, card, modelfile, sidecar

    source = job.source
    for suffix in flags.beside:
        text = (
            card(result.path, open_checkpoint(result.path), source.checkpoint, source.location.name)
            if suffix == CARD
            else modelfile(result.path)
        )
        sidecar(result.path, suffix).write_text(text, encoding="utf-8")


def _tell_scaling(job: Job, flags: Flags) -> None:
    """One line on the inputs that may be scaled, and on what they are measured."""
    inputs, calibration = len(job.compiled.scalable), job.calibration
    measured = f", measured on {calibration.tokens_BT.size:,} tokens of text" if calibration else ""
    if flags.talks:
        click.echo(f"{inputs} inputs whose channels may be scaled{measured}", err=True)


def _executed(job: Job, out: Path, flags: Flags) -> Result:
    """Carry out a job, and say what it goes on with, or what it leaves for the next run to go on with."""
    from qconvert.convert.execute import execute

    run: list[RunJournal] = []

    def opened(journal: RunJournal) -> None:
        run.append(journal)
        if flags.talks and journal.resumed:
            click.echo(f"resuming {_shown(journal.path)}: {percent(journal.share)} was done", err=True)

    def farewell() -> str:
        return f"stopped at {percent(run[0].share if run else 0.0)}; run the same command to go on"

    with progress(job.compiled.plan, talks=flags.talks) as bar, ending_in_time(farewell):
        try:
            return execute(job, out, bar.listen, opened, bar.verified)
        except KeyboardInterrupt as error:
            if not (run and run[0].kept):
                raise
            signum = error.signum if isinstance(error, Stopped) else Stopped().signum
            raise Stopped(signum, farewell()) from error
        except QConvertError as error:
            if run and run[0].kept:
                error.hint = f"{error.hint}; then run the same command to go on at {percent(run[0].share)}"
            raise


def percent(share: float) -> str:
    """A share of work as `43 %`: rounded down, since all of it is done only with the output's name."""
    return f"{min(99, int(100 * share))} %"


def _shown(path: Path) -> str:
    """A path from the current folder, where it is below it."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


def _tell_needs(job: Job, flags: Flags) -> None:
    """What calibration will take, and what it does to take no more; a warning where it is still too much."""
    from qconvert.calibrate.memory_limit import available_memory
    from qconvert.convert.calibration_memory import needed
    from qconvert.report.tables import size

    assert job.calibration is not None
    found, saved = needed(job), job.calibration.savings.sentence
    tokens = f"{job.calibration.tokens_BT.size:,} tokens of text"
    told = f"calibrating on {tokens} takes about {size(found.memory)} of memory"
    asked, available = flags.max_memory, available_memory()
    if asked is None and available is not None and found.memory > available:
        click.echo(f"Warning: {told}, {size(available)} is available", err=True)
    if flags.talks:
        click.echo(f"{told} and {size(found.disk)} of disk", err=True)
    if flags.talks and saved:
        within = "the memory that is available" if asked is None else f"--max-memory {size(asked)}"
        click.echo(f"to keep within {within}: {saved}", err=True)


def _check_before_download(model: str, ask: Request | Ask | Explained, flags: Flags) -> None:
    if flags.out is None or flags.dry_run or flags.skip_existing:
        return
    from qconvert.formats.gguf import writer
    from qconvert.formats.io import output_folder

    local = [path for path in (Path(model),) if path.exists()]
    known = ask.request if isinstance(ask, Explained) else ask
    to_file = not callable(known) and known.is_gguf
    check = writer.check_target if to_file else output_folder.check_target
    check(flags.out, overwrite=flags.overwrite, sources=local)


def _print(
    lines: list[str],
    described: Callable[[], dict[str, Any]],
    verdict: str,
    path: Path,
    flags: Flags,
    tell: Tell,
) -> None:
    """The table on stdout and the verdict on stderr; or plain data for --json, or the path alone."""
    if flags.as_json:
        tell(described())
    elif flags.quiet:
        click.echo(str(path))
    else:
        click.echo("\n".join(lines))
        click.echo(verdict, err=True)
