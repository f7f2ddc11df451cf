"""Goes on after a model that fails, under --keep-going, and says so at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import error_record, one_of, say_error
from qconvert.errors import BadUsage, QConvertError

if TYPE_CHECKING:
    from qconvert.core.dtypes import Json


@dataclass(frozen=True)
class PassedOver:
    """The errors of those of several models that a command passes over, where it is told to keep going."""

    models: Sequence[str]
    keep_going: bool
    as_json: bool
    errors: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def one(self, model: str) -> Iterator[None]:
        """Around work on one model: its error ends the command, or is noted and said."""
        try:
            with one_of(self.models, model):
                yield
        except QConvertError as error:
            if not self.keep_going or len(self.models) == 1 or isinstance(error, BadUsage):
                raise
            self.errors.append(error_record(error))
            if not self.as_json:
                say_error(self.errors[-1])

    def told(self, key: str, done: Sequence[Json]) -> Json:
        """The object of --json about what was `done`, with all errors, of which the first is `error`."""
        failed = {"error": self.errors[0], "errors": self.errors} if self.errors else {}
        return {"schema": 1, "ok": not self.errors, **failed, key: list(done)}

    def leave(self) -> None:
        """Leave with the exit code of the first error, if there was one."""
        if self.errors:
            raise click.exceptions.Exit(self.errors[0]["exit_code"])
