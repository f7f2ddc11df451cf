"""Holds the values of a writing command's options, and what a conversion is told by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.cli.hub_source import network_of
from qconvert.cli.options import (
    CONNECTIONS,
    DEFAULT_MAX_MEMORY,
    DEFAULT_SHARD_SIZE,
    PATIENCE,
    available_cores,
)
from qconvert.core.sizes import parse_size
from qconvert.errors import BadRecipe, UnsupportedModel

if TYPE_CHECKING:
    from qconvert.calibrate.calibration import Calibration
    from qconvert.calibrate.text import CalibrationText
    from qconvert.checkpoint.network import Network
    from qconvert.convert.job import OpenedModel, RunOptions
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
    events: Path | None = None
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
