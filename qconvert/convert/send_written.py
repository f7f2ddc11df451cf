"""Sends an output that is here, whole, to where it is not yet."""

from __future__ import annotations

from pathlib import Path

from qconvert.convert.existing import recorded_hashes
from qconvert.convert.job import Job
from qconvert.convert.known_as import KnownAs, known_as
from qconvert.convert.publish import Destination, weight_names
from qconvert.convert.writing import facts_of
from qconvert.core.dtypes import Json
from qconvert.errors import OutputExists
from qconvert.formats.io.read_back import file_sha256


def already_sent(job: Job, out: Path, destination: Destination, *, by_any: bool = False) -> Json | None:
    """What the destination has of this very job, as plain data; None unless it has all of it.

    It may be what `by_any` version of qconvert was asked for the same.
    """
    return destination.sent(*_known_as(job, out, destination), by_any=by_any)


def send_where_lacking(
    job: Job, out: Path, destination: Destination, *, by_any: bool = False
) -> tuple[Json, bool]:
    """Send an output that `existing.is_written` has found at `out`, unless the destination has it already.

    Returns what is there then, as plain data, and whether it was before. Every weight file is read first:
    OutputExists where it has not the hash that its manifest records, or where the destination has another
    model.
    """
    name, weights = _known_as(job, out, destination)
    before = destination.sent(name, weights, by_any=by_any)
    if before is not None:
        return before, True
    path = out.with_name(weights[0]) if job.compiled.is_gguf else out
    folder = path.parent if job.compiled.is_gguf else path
    recorded = recorded_hashes(job, out)
    destination.begin(name, weights, overwrite=job.options.overwrite, resumed=False)
    receipts: dict[str, str] = {}
    for weight in weights:
        digest = file_sha256(folder / weight)
        if recorded.get(weight, digest) != digest:
            raise OutputExists(
                f"{folder / weight}: is not what was recorded of it, and was not sent",
                "leave out --skip-existing and give --overwrite, to write it again",
            )
        receipts[weight] = destination.put(weight, folder / weight, digest)
    return destination.finish(receipts, job.container.texts(folder, path)), False


def _known_as(job: Job, out: Path, destination: Destination) -> tuple[KnownAs, list[str]]:
    """What the destination knows a job by, and the names of its weight files."""
    return known_as(facts_of(job, out, destination)), weight_names(job, out)
