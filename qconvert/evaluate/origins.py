"""Records which files were measured: their paths, and hashes that identify the weights.

A folder that qconvert made is identified by the SHA-256 of its manifest, which holds those of its files; any
other model by those of its weight files, which are read for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.containers.gguf_file import TARGET
from qconvert.core.dtypes import Json
from qconvert.evaluate.records import Origin, WeightFile
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.io.output_folder import MANIFEST_FILE
from qconvert.formats.io.read_back import file_sha256
from qconvert.formats.io.strict_json import parse_json_object, read_json_object


def origin_of(checkpoint: Checkpoint, name: str, commit: str | None = None) -> Origin:
    """The files of an opened checkpoint that was asked for as `name`.

    Weight files are hashed unless a manifest beside them has their sizes and hashes.
    """
    path = checkpoint.path.absolute()
    manifest = path / MANIFEST_FILE
    record = read_json_object(manifest) if manifest.is_file() else {}
    known = {file["name"]: file for file in record.get("files", ())}
    files = [(file.path, file.size) for file in checkpoint.files.files]
    trusted = bool(files) and all(_recorded(known, path.name, size) for path, size in files)
    return Origin(
        name=name,
        path=str(path),
        commit=commit,
        manifest_sha256=file_sha256(manifest) if trusted else None,
        files=tuple(
            WeightFile(path.name, size, known[path.name]["sha256"] if trusted else file_sha256(path))
            for path, size in files
        ),
        target=_target(path, record),
    )


def _recorded(known: Mapping[str, Json], name: str, size: int) -> bool:
    """Whether a manifest holds the hash of a file of this name and size."""
    entry = known.get(name, {})
    return entry.get("bytes") == size and bool(entry.get("sha256"))


def _target(path: Path, manifest: Json) -> Json | None:
    """What a target made of the model's weights, where its manifest or its GGUF file says so."""
    if path.is_file() and is_gguf(path):
        with GGUFFile(path) as file:
            entry = file.kv.get(TARGET)
        return parse_json_object(str(entry.value).encode(), TARGET) if entry else None
    found = manifest.get("target")
    return found if isinstance(found, dict) else None


def labels_of(names: Sequence[str]) -> list[str]:
    """What to call models in a report: the shortest ends of their paths that tell them apart.

    The same model given twice is numbered.
    """
    parts = [_parts(name) for name in names]
    labels = []
    for own in parts:
        others = [other for other in parts if other != own]
        lengths = range(1, len(own) + 1)
        enough = (n for n in lengths if all(other[-n:] != own[-n:] for other in others))
        labels.append("/".join(own[-next(enough, len(own)) :]).replace("//", "/"))
    counts = [labels[: i + 1].count(label) for i, label in enumerate(labels)]
    return [label if n == 1 else f"{label} ({n})" for label, n in zip(labels, counts, strict=True)]


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a path, from the root for one that is here; of a Hub name, which has a part before."""
    path = Path(name)
    return path.absolute().parts if path.exists() else tuple(part for part in name.split("/") if part)
