"""Determines whether an output exists already, complete, and is what a job would write from its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qconvert.convert.files_at import FilesAt, LocalFiles
from qconvert.convert.gguf_sidecars import MANIFEST, sidecar
from qconvert.convert.identity import adapter_config_hash, source_etags, source_samples
from qconvert.convert.job import Job, OpenedModel
from qconvert.convert.manifest import FILE_NAME
from qconvert.core.dtypes import Json
from qconvert.errors import OutputExists
from qconvert.formats.io.planned_files import FilePlan

# The hint where what is there is not the whole output.
_REDO = "add --overwrite: it then writes again what is not complete, and leaves the rest"


def is_written(
    job: Job,
    out: Path,
    *,
    read: bool = False,
    manifest: bool = False,
    at: FilesAt | None = None,
    shown_as: str = "",
) -> bool:
    """Whether all of a job's output is at `out`: files, sizes, headers, recipe and source.

    Its files may be looked at elsewhere (`at`), under the name `shown_as`; there, some may be what a run has
    left that was killed.

    The source is told by what its files hold (`identity.source_samples`), where a manifest records that;
    else no file of it may be newer than the output. Where the output is to be `read`, its bytes must have the
    hashes that its manifest records, too; a `manifest` beside a GGUF must be there where it is asked for.
    Raises OutputExists where something else is there, or the output is cut or damaged.
    """
    files, at = job.container.files(out), at or _local(job, out)
    if not at.is_output([file.name for file in files]):
        begun = [file for file in files if at.size(file.name) is not None]
        if why := next((found for file in begun if (found := _other_file(at, file))), ""):
            raise _taken(shown_as or out, why)
        return False
    why = next((found for file in files if (found := _other_file(at, file))), "")
    record = at.manifest(files[0].name)
    if not why and not job.compiled.is_gguf:
        why = _other_recipe(job, record)
    if not why and manifest and not record:
        why = f"{sidecar(Path(files[0].name), MANIFEST).name} is missing or damaged"
    if not why:
        why = _other_source(job.source, record, at.changed_ns(files[0].name))
    if not why and read:
        recorded = _hashes_in(record)
        why = next((found for file in files if (found := _damaged(at, file.name, recorded))), "")
    if why:
        raise _taken(shown_as or out, why)
    return True


def _taken(told: Path | str, why: str) -> OutputExists:
    return OutputExists(f"{told}: already exists, and is not what this command writes ({why})", _REDO)


def recorded_hashes(job: Job, out: Path, at: FilesAt | None = None) -> dict[str, str]:
    """The SHA-256 of an output's files by name, as its manifest records them; none where it has none."""
    at = at or _local(job, out)
    return _hashes_in(at.manifest(job.container.files(out)[0].name))


def _local(job: Job, out: Path) -> LocalFiles:
    return LocalFiles(out, is_file=job.compiled.is_gguf)


def _hashes_in(record: Json) -> dict[str, str]:
    try:
        return {file["name"]: file["sha256"] for file in record["files"] if file["sha256"]}
    except (KeyError, TypeError):
        return {}


def _damaged(at: FilesAt, name: str, recorded: Mapping[str, str]) -> str:
    """What is wrong with the bytes of a file; empty where they have the recorded hash."""
    if name not in recorded:
        return f"no SHA-256 of {name} is recorded to compare it with"
    return "" if at.sha256(name) == recorded[name] else f"{name} is not what was recorded of it"


def _other_file(at: FilesAt, planned: FilePlan) -> str:
    """What tells a file from the planned one; empty where nothing does."""
    size = at.size(planned.name)
    if size is None:
        return f"{planned.name} is missing"
    if size != planned.size:
        return f"{planned.name} has {size:,} bytes, not {planned.size:,}"
    same = at.begins_with(planned.name, planned.head_parts())
    return "" if same else f"{planned.name} has another header"


def _other_recipe(job: Job, record: Json) -> str:
    if not record:
        return f"{FILE_NAME} is missing or damaged"
    request, calibration = job.compiled.request, job.calibration
    wanted = {
        "command": request.command,
        "recipe": request.recipe.to_json(),
        "method": calibration.method if calibration else None,
    }
    found = {
        "command": record.get("command"),
        "recipe": record.get("recipe"),
        "method": (record.get("calibration") or {}).get("method"),
    }
    return next((f"{FILE_NAME} names another {key}" for key in wanted if wanted[key] != found[key]), "")


def _other_source(source: OpenedModel, record: Json, made: int) -> str:
    """What tells the source from that of the output, made then (ns); empty where nothing does."""
    place, before = source.location.place, record.get("source") or {}
    if before and before.get("adapter_config_sha256") != adapter_config_hash(source.location):
        return "it was made with another adapter"
    if place.repo_id is not None or place.address is not None:
        return _other_place(source, before)
    recorded = {file["name"]: file.get("sample_sha256") for file in before.get("files", ())}
    if None not in (recorded or {"": None}).values():
        return "it was made from other weights" if recorded != source_samples(source) else ""
    files = (file.path for file in source.checkpoint.files.files)
    newer = next((path.name for path in files if path.stat().st_mtime_ns > made), None)
    return f"the source's {newer} is newer" if newer else ""


def _other_place(source: OpenedModel, before: Json) -> str:
    """What tells a source on the Hub, in a bucket or on a web server from the one that a record names."""
    if before and source.location.known_as != before.get("name"):
        return f"it was made from {before.get('name')}"
    commits = {source.location.place.commit, before.get("commit")} - {None}
    if len(commits) > 1:
        return "it was made from another commit of the source"
    recorded = {file["name"]: file.get("sample_sha256") for file in before.get("files", ())}
    if any(recorded.get(name, sample) != sample for name, sample in source_samples(source).items()):
        return "it was made with another adapter"
    return _changed_there(source, before.get("files", ()))


def _changed_there(source: OpenedModel, before: Sequence[Json]) -> str:
    """Which file of a bucket or web server has changed; empty where none has, or nothing is recorded."""
    etags = source_etags(source)
    sizes = {file.path.name: file.size for file in source.checkpoint.files.files}
    recorded = {file["name"]: (file["bytes"], file.get("etag")) for file in before if etags}
    for name, (size, etag) in recorded.items():
        if sizes.get(name) != size:
            return f"the source's {name} has another size"
        if None not in (etag, etags[name]) and etag != etags[name]:
            return f"the source's {name} has another ETag"
    return "the source has other files" if recorded and sizes.keys() != recorded.keys() else ""
