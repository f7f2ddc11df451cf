"""Tells whether an output is there already, whole, and the one that a job would write."""

from __future__ import annotations

from pathlib import Path

from qconvert.convert.job import Job
from qconvert.convert.manifest import FILE_NAME, manifest_path
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, OutputExists
from qconvert.formats.io.local_file import explained
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import file_sha256
from qconvert.formats.io.strict_json import read_json_object

# The hint where what is there is not the whole output.
_REDO = "add --overwrite: it then writes anew what is not complete, and leaves the rest"


def is_written(job: Job, out: Path, *, read: bool = False) -> bool:
    """Whether all of a job's output is at `out`: its files, their sizes, their headers, and its recipe.

    Where it is to be `read`, its bytes must have the hashes that its manifest records, too. Raises
    OutputExists where something else is there, or the output is cut or damaged.
    """
    files = job.container.files(out)
    folder = out.parent if job.compiled.is_gguf else out
    if not any((folder / file.name).exists() for file in files) and (
        job.compiled.is_gguf or not out.exists()
    ):
        return False
    why = next((found for file in files if (found := _other(folder / file.name, file))), "")
    if not why and not job.compiled.is_gguf:
        why = _other_recipe(job, out / FILE_NAME)
    if not why and read:
        recorded = recorded_hashes(job, out)
        why = next((found for file in files if (found := _damaged(folder / file.name, recorded))), "")
    if why:
        raise OutputExists(f"{out}: already exists, and is not what this command writes ({why})", _REDO)
    return True


def recorded_hashes(job: Job, out: Path) -> dict[str, str]:
    """The SHA-256 of an output's files by name, as its manifest records them; none where it has none."""
    first = out.with_name(job.container.files(out)[0].name) if job.compiled.is_gguf else out
    try:
        record: Json = read_json_object(manifest_path(first), max_bytes=1 << 30)
        return {file["name"]: file["sha256"] for file in record["files"] if file["sha256"]}
    except (CorruptCheckpoint, OSError, KeyError, TypeError):
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


def _other_recipe(job: Job, path: Path) -> str:
    try:
        record = read_json_object(path, max_bytes=1 << 30)
    except (CorruptCheckpoint, OSError):
        return f"{FILE_NAME} is missing or damaged"
    request, calibration = job.compiled.request, job.calibration
    wanted = {
        "command": request.command,
        "recipe": request.recipe.to_json(),
        "source": job.source.location.repo_id or job.source.location.name,
        "method": calibration.method if calibration else None,
    }
    found = {
        "command": record.get("command"),
        "recipe": record.get("recipe"),
        "source": (record.get("source") or {}).get("name"),
        "method": (record.get("calibration") or {}).get("method"),
    }
    return next((f"{FILE_NAME} names another {key}" for key in wanted if wanted[key] != found[key]), "")
