"""Tells --json's readers of outputs, leaves out what is there already, and keeps names apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.errors import BadRecipe, OutputExists

if TYPE_CHECKING:
    from qconvert.cli.flags import Flags
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


def is_complete(job: Job, out: Path, flags: Flags) -> bool:
    """Whether --skip-existing leaves the output as it is: it is there, and whole.

    Raises OutputExists where something else is there, or is damaged, unless it may be overwritten.
    """
    from qconvert.convert.existing import is_written

    if not (flags.skip_existing or flags.verify_existing):
        return False
    try:
        return is_written(job, out, read=flags.verify_existing)
    except OutputExists:
        if not flags.overwrite:
            raise
        return False


def tell_skipped(job: Job, out: Path, flags: Flags, tell: Tell) -> None:
    """Say that the output is there already and was skipped; of its files the recorded hashes."""
    from qconvert.convert.existing import recorded_hashes

    files = job.container.files(out)
    path = out.with_name(files[0].name) if job.compiled.is_gguf else out
    if flags.as_json:
        record = {"schema": 1, "ok": True, "dry_run": flags.dry_run, "skipped": True, "out": str(path)}
        sizes = {"bytes": sum(file.size for file in files), "sha256": recorded_hashes(job, out)}
        tell(record | sizes)
    elif flags.quiet:
        click.echo(str(path))
    else:
        click.echo(f"{path}: already complete, skipped", err=True)
