"""Records outputs for --json, skips those that exist already, and keeps their names distinct."""

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
    from qconvert.convert.publish import Destination
    from qconvert.core.dtypes import Json

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


def is_complete(job: Job, out: Path, flags: Flags, destination: Destination | None = None) -> bool:
    """Whether --skip-existing leaves the output as it is: it is there, and whole.

    That is at a destination where its files say so. What an earlier run has begun to send there is continued
    from what it left here, or else sent again. Raises OutputExists where something else is there, or is
    damaged, unless it may be overwritten.
    """
    from qconvert.convert.existing import is_written
    from qconvert.convert.gguf_sidecars import MANIFEST

    if not flags.skips:
        return False
    read, at = flags.verify_existing, destination.files if destination else None
    try:
        if at is None or destination is None:
            return is_written(job, out, read=read, manifest=MANIFEST in flags.beside)
        if any(path.exists() for path in job.container.partial(out)):
            return False
        manifest = MANIFEST in flags.beside
        return is_written(job, out, read=read, manifest=manifest, at=at, shown_as=destination.shown)
    except OutputExists:
        if not flags.overwrite:
            raise
        return False


def tell_skipped(
    job: Job,
    out: Path,
    flags: Flags,
    tell: Tell,
    sent: Json | None = None,
    destination: Destination | None = None,
) -> None:
    """Say that the output is there already and was skipped; of its files the recorded hashes.

    Where it belongs elsewhere, too, `sent` says what is there; with a `destination`, it is only there.
    """
    from qconvert.cli.conversion_report import files_json
    from qconvert.cli.events import say_skipped
    from qconvert.convert.existing import recorded_hashes

    files = job.container.files(out)
    path = out.with_name(files[0].name) if job.compiled.is_gguf else out
    told, at = (str(path), None) if destination is None else (destination.shown, destination.files)
    if not flags.dry_run:
        say_skipped(flags.events, told)
        if destination is None:
            write_texts_beside(job, path, flags, anew=False)
    if flags.as_json:
        record = {"schema": 1, "ok": True, "dry_run": flags.dry_run, "skipped": True, "out": told}
        there = {"sent": sent} if sent else {}
        tell(record | {"files": files_json(job, out), "sha256": recorded_hashes(job, out, at)} | there)
    elif flags.quiet:
        click.echo(told)
    else:
        click.echo(f"{told}: already complete, skipped", err=True)


def write_texts_beside(job: Job, path: Path, flags: Flags, *, anew: bool = True) -> None:
    """Write the card and Modelfile that were asked for beside a GGUF; if not `anew`, what is not there."""
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.convert import gguf_sidecars
    from qconvert.models.parameter_table import table_of_tensors

    for suffix in flags.beside if job.compiled.is_gguf else ():
        target = gguf_sidecars.sidecar(path, suffix)
        if target.exists() and not anew:
            continue
        if suffix == gguf_sidecars.CARD:
            written = open_checkpoint(path)
            binding, traits = written.bind(allow_unknown=True), written.layout.traits
            table = table_of_tensors(written.tensors, binding, traits)
            name, beside_it = job.source.location.name, gguf_sidecars.MODELFILE in flags.beside
            card = gguf_sidecars.card(path, table, job.source.checkpoint, name, modelfile=beside_it)
            target.write_text(card, encoding="utf-8")
        elif suffix == gguf_sidecars.MODELFILE:
            target.write_text(gguf_sidecars.modelfile(path, job.source.checkpoint), encoding="utf-8")
