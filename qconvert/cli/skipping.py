"""Tells --json's readers of outputs, leaves out what is there already, and keeps names apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.convert.job import Job

Tell = Callable[[dict[str, Any]], None]


def one_object(found: dict[str, Any]) -> None:
    """Print what is told under --json of the only model."""
    click.echo(json.dumps(found))


def require_own_name(out: Path, taken: Sequence[Path]) -> None:
    """Raise BadRecipe for a name that the output of another model of the same command has."""
    if out in taken:
        raise BadRecipe(
            f"{out}: two of the models have outputs of this name",
            "convert them one by one, each with its own -o",
        )


def skipped(job: Job, out: Path, tell: Tell, *, dry_run: bool, as_json: bool, quiet: bool) -> bool:
    """Whether the output is there already, and was therefore skipped, which is told."""
    from qconvert.convert.existing import is_written

    if not is_written(job, out):
        return False
    path = out.with_name(job.container.files(out)[0].name) if job.compiled.is_gguf else out
    if as_json:
        tell({"schema": 1, "ok": True, "dry_run": dry_run, "skipped": True, "out": str(path)})
    elif quiet:
        click.echo(str(path))
    else:
        click.echo(f"{path}: already complete, skipped", err=True)
    return True
