"""Determines whether an output exists already, complete, and is what a job would write from its source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qconvert.convert.identity import source_etags, source_samples
from qconvert.convert.job import Job, OpenedModel
from qconvert.convert.manifest import FILE_NAME, manifest_path
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, OutputExists
from qconvert.formats.io.local_file import explained
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import file_sha256
from qconvert.formats.io.strict_json import read_json_object

# The hint where what is there is not the whole output.
_REDO = "add --overwrite: it then writes again what is not complete, and leaves the rest"


def is_written(job: Job, out: Path, *, read: bool = False, manifest: bool = False) -> bool:
    """Whether all of a job's output is at `out`: files, sizes, headers, recipe and source.

    The source is told by what its files hold (`identity.source_samples`), where a manifest records that;
    else no file of it may be newer than the output. Where the output is to be `read`, its bytes must have the
    hashes that its manifest records, too; a `manifest` beside a GGUF must be there where it is asked for.
    Raises OutputExists where something else is there, or the output is cut or damaged.
    """
    files = job.container.files(out)
    folder = out.parent if job.compiled.is_gguf else out
    if not any((folder / file.name).exists() for file in files) and (
        job.compiled.is_gguf or not out.exists()
    ):
        return False
    why = next((found for file in files if (found := _other(folder / file.name, file))), "")
    record = _recorded(job, out)
    if not why and not job.compiled.is_gguf:
        why = _other_recipe(job, record)
    if not why and manifest and not record:
        why = f"{manifest_path(folder / files[0].name).name} is missing or damaged"
    if not why:
        why = _other_source(job.source, record, folder / files[0].name)
    if not why and read:
        recorded = recorded_hashes(job, out)
        why = next((found for file in files if (found := _damaged(folder / file.name, recorded))), "")
    if why:
        raise OutputExists(f"{out}: already exists, and is not what this command writes ({why})", _REDO)
    return True


def recorded_hashes(job: Job, out: Path) -> dict[str, str]:
    """The SHA-256 of an output's files by name, as its manifest records them; none where it has none."""
    try:
        return {file["name"]: file["sha256"] for file in _recorded(job, out)["files"] if file["sha256"]}
    except (KeyError, TypeError):
        return {}


def _recorded(job: Job, out: Path) -> Json:
    """The manifest of what is at `out`; empty where there is none that can be read."""
    first = out.with_name(job.container.files(out)[0].name) if job.compiled.is_gguf else out
    try:
        return read_json_object(manifest_path(first), max_bytes=1 << 30)
    except (CorruptCheckpoint, OSError):
        return {}


def _damaged(path: Path, recorded: dict[str, str]) -> str:
    """What is wrong with the bytes of a file; empty where they have the recorded hash."""
    if path.name not in recorded:
        return f"no SHA-256 of {path.name} is recorded to compare it with"
    return "" if file_sha256(path) == recorded[path.name] else f"{path.name} is not what was recorded of it"


def _other(path: Path, planned: FilePlan) -> str:
    """What tells a file from the planned one; empty where nothing does."""
    if not path.is_file():
        return f"{planned.name} is missing"
    size = path.stat().st_size
    if size != planned.size:
        return f"{planned.name} has {size:,} bytes, not {planned.size:,}"
    with explained(f"{path}: cannot be read"), path.open("rb") as file:
        same = all(file.read(len(part)) == part for part in planned.head_parts())
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


def _other_source(source: OpenedModel, record: Json, written: Path) -> str:
    """What tells the source from that of the output; empty where nothing does."""
    location, before = source.location, record.get("source") or {}
    if location.repo_id is not None or location.address is not None:
        if before and (location.repo_id or location.address) != before.get("name"):
            return f"it was made from {before.get('name')}"
        commits = {location.commit, before.get("commit")} - {None}
        if len(commits) > 1:
            return "it was made from another commit of the source"
        return _changed_there(source, before.get("files", ()))
    recorded = {file["name"]: file.get("sample_sha256") for file in before.get("files", ())}
    if None not in (recorded or {"": None}).values():
        return "it was made from other weights" if recorded != source_samples(source) else ""
    made = written.stat().st_mtime_ns
    files = (file.path for file in source.checkpoint.files.files)
    newer = next((path.name for path in files if path.stat().st_mtime_ns > made), None)
    return f"the source's {newer} is newer" if newer else ""


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
