"""Sends an output that is here, whole, to where it is not yet."""

from __future__ import annotations

from pathlib import Path

from qconvert.convert.existing import recorded_hashes
from qconvert.convert.job import Job
from qconvert.convert.publish import Destination, sent_hash
from qconvert.convert.writing import facts_of
from qconvert.core.dtypes import Json
from qconvert.errors import OutputExists
from qconvert.formats.io.read_back import file_sha256


def send_where_lacking(job: Job, out: Path, destination: Destination) -> tuple[Json, bool]:
    """`send_written`, unless the destination has the output already; and whether it had."""
    weights = [file.name for file in job.container.files(out) if file.specs]
    before = destination.sent(sent_hash(facts_of(job, out, destination)), weights)
    return before or send_written(job, out, destination), before is not None


def send_written(job: Job, out: Path, destination: Destination) -> Json:
    """Send an output that `existing.is_written` has found at `out`; what is there then, as plain data.

    Every weight file is read first: OutputExists where it has not the hash that its manifest records, or
    where the destination has another model.
    """
    weights = [file.name for file in job.container.files(out) if file.specs]
    path = out.with_name(weights[0]) if job.compiled.is_gguf else out
    folder = path.parent if job.compiled.is_gguf else path
    recorded = recorded_hashes(job, out)
    job_name = sent_hash(facts_of(job, out, destination))
    destination.begin(job_name, weights, overwrite=job.options.overwrite, resumed=False)
    receipts: dict[str, str] = {}
    for name in weights:
        digest = file_sha256(folder / name)
        if recorded.get(name, digest) != digest:
            raise OutputExists(
                f"{folder / name}: is not what was recorded of it, and was not sent",
                "leave out --skip-existing and give --overwrite, to write it again",
            )
        receipts[name] = destination.put(name, folder / name, digest)
    return destination.finish(receipts, job.container.texts(folder, path))
