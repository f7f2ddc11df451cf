"""Holds the values of a writing command's options, and what a conversion is told by them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.cli.hub_source import network_of
from qconvert.cli.launchers import processes_here
from qconvert.cli.options import (
    CONNECTIONS,
    DEFAULT_MAX_MEMORY,
    DEFAULT_SHARD_SIZE,
    PATIENCE,
    available_cores,
    url_of,
)
from qconvert.core.ranks import is_divided
from qconvert.core.sizes import parse_size
from qconvert.errors import BadRecipe, UnsupportedModel

if TYPE_CHECKING:
    from qconvert.calibrate.calibration import Calibration, MethodTraits
    from qconvert.calibrate.text import CalibrationText
    from qconvert.checkpoint.network import Network
    from qconvert.convert.job import OpenedModel, RunOptions
    from qconvert.core.ranks import Rank
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
    push_to: str | None = None
    private: bool = False
    drop_pushed: bool = False
    skip_existing: bool = False
    verify_existing: bool = False
    keep_going: bool = False
    rank: Rank | None = None
    events: Path | None = None
    folder: Path = Path()
    taken: tuple[Path, ...] = ()

    @property
    def options(self) -> RunOptions:
        from qconvert.convert.job import RunOptions

        return RunOptions(
            self.jobs or max(1, available_cores() // (processes_here() if self.shared else 1)),
            parse_size(DEFAULT_MAX_MEMORY) if self.max_memory is None else self.max_memory,
            self.shard_size,
            verify=self.verify,
            overwrite=self.overwrite,
            hash_sources=self.hash_sources,
            restart=self.restart,
            process_memory=self.max_memory,
            drop=self.drop_pushed or (self.to_store and not self.reads_back),
            keep=self.keeps,
            sending=self._sending_bytes,
        )

    @property
    def _sending_bytes(self) -> int:
        """What sending to the Hub takes of the memory of the process."""
        if self.push_to is None:
            return 0
        from qconvert.convert.hub_repository import sending_bytes

        return sending_bytes(self.max_memory)

    @property
    def to_store(self) -> bool:
        """Whether the output goes to an object storage."""
        return url_of(self.out or self.folder) is not None

    @property
    def stays(self) -> bool:
        """Whether the output is sent nowhere."""
        return self.push_to is None and not self.to_store

    @property
    def keeps(self) -> bool:
        """Whether there is an output on this disk in the end."""
        return not (self.drop_pushed or self.to_store)

    @property
    def skips(self) -> bool:
        """Whether an output that is there and complete is left as it is."""
        return self.skip_existing or self.verify_existing

    @property
    def reads_back(self) -> bool:
        """Whether the method reads weights that it has written."""
        return self.method_traits.together

    @property
    def method_traits(self) -> MethodTraits:
        """What the method does that is asked for."""
        from qconvert.calibrate.calibration import METHODS, TRAITS

        return TRAITS[METHODS[self.method]]

    def calibration(self, source: OpenedModel, *, aims: bool) -> Calibration | None:
        """The calibration that is asked for, on the tokens of a model; None where there is none.

        Raises BadRecipe for a text that neither a method nor a target (`aims`) would read.
        """
        from qconvert.cli.calibration_options import DEFAULT_TOKENS, check_idle

        traits = self.method_traits
        if not traits.measures:
            given = {"--text": self.texts, "--tokens": self.tokens != 0, "--window": self.window}
            check_idle(given, aims=aims)
            check_idle({"--inputs": self.inputs != "quantized"}, aims=False)
            return None
        if traits.scales_inputs and self.statistics is not None:
            return None
        if self.statistics is not None:
            raise BadRecipe(
                f"--calibration: --method {self.method} measures its own statistics",
                "leave out one of the two",
            )
        from qconvert.calibrate.calibration import METHODS, Calibration

        if not traits.together:
            _require_decoder(source)
        text = self.read_text(source, DEFAULT_TOKENS)
        method, shift = METHODS[self.method], self.inputs == "quantized"
        return Calibration(text.tokens_BT, text.record, method, shift=shift)

    def check(self, *, aims: bool) -> None:
        """Raise BadRecipe for options that do not go with others, or with several processes."""
        if self.shared:
            self._check_shared(aims=aims)
        if aims and self.skips:
            raise BadRecipe(
                "--skip-existing: given together with a target, whose choice is measured each time",
                "leave out one of the two",
            )
        if not self.method_traits.scales_inputs:
            return
        if aims:
            raise BadRecipe(
                "--method awq: given together with a target, which would not know what scaling wins",
                "leave out one of the two",
            )
        given = {"--text": self.texts, "--tokens": self.tokens, "--window": self.window}
        idle = next((name for name, value in given.items() if value), None)
        if self.statistics is not None and idle:
            raise BadRecipe(f"{idle}: --calibration has what is measured", "leave out one of the two")

    def _check_shared(self, *, aims: bool) -> None:
        """Raise BadRecipe for what one process alone can do, where this is one of several."""
        alone = {
            "--restart": self.restart,
            "--card, --modelfile or --manifest": self.beside,
            "an object storage": self.to_store,
            "a target": aims,
        }
        given = next((name for name, value in alone.items() if value), None)
        if given:
            assert self.rank is not None
            raise BadRecipe(
                f"{given}: works in one process only, and this is one of {self.rank.world}",
                "leave it out, or give --rank 0/1",
            )

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
        again = aims or (self.method_traits.measures and not self.dry_run)
        return (
            None
            if self.keep_source or again
            else network_of(self.connections, self.patience, talks=self.talks)
        )

    @property
    def shared(self) -> bool:
        """Whether other processes make the same output."""
        return is_divided(self.rank)

    @property
    def speaks(self) -> bool:
        """Whether this process says what all processes would say: it is alone, or the first."""
        return self.rank is None or self.rank.number == 0

    @property
    def talks(self) -> bool:
        return self.speaks and not (self.quiet or self.as_json)

    @property
    def logs(self) -> bool:
        """Whether it is told how far the work is: also under --json where lines say it, and no bar."""
        return self.talks or (self.as_json and self.speaks and not self.quiet and not sys.stderr.isatty())

    def request(self, command: str, recipe: Recipe, **more: Any) -> Request:
        """The request of a command with this recipe; `more` are other fields of it."""
        from qconvert.core.dtypes import DTYPE_BY_CODE
        from qconvert.plan.request import Request

        return Request(
            command,
            recipe,
            dtype=DTYPE_BY_CODE[self.dtype.upper()] if self.dtype else None,
            allow_unknown=self.allow_unknown,
            allow_nonfinite=self.allow_nonfinite,
            scale_inputs=self.method_traits.scales_inputs,
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
