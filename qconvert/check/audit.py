"""Holds an output against its own manifest: sizes, hashes of files, hashes of tensors, numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from qconvert.checkpoint.gguf_model import GGUFModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.containers.gguf_file import REORDERED, SCALING
from qconvert.convert.manifest import manifest_path
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import GgmlBlocks, ModelTensor
from qconvert.core.values import DenseRows
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.read_back import file_sha256
from qconvert.formats.io.strict_json import parse_json_object, read_json_object
from qconvert.quant.casts import first_nonfinite
from qconvert.quant.dequantize import numbers
from qconvert.report.tables import count

_WINDOW_BYTES = 4 << 20


def audit(checkpoint: Checkpoint) -> tuple[Json, list[str], bool]:
    """Findings to show, problems (sentences that each name a file or a tensor), and whether any hash is
    recorded that bytes could be compared with.

    Without one the structure is still checked, and NaN and Inf are looked for.
    """
    path = manifest_path(checkpoint.path)
    findings: Json = {"tensors": len(checkpoint.tensors)}
    problems = [f"{name}: NaN or Inf" for name in _nonfinite(checkpoint)]
    if not path.is_file():
        return {**findings, "manifest": "none (structure and numbers checked)"}, problems, False
    files, tensors = _recorded(checkpoint, path)
    problems += _file_problems(path, files)
    problems += _tensor_problems(checkpoint, tensors)
    arrays = [digest for entry in tensors.values() for digest in entry["parts"].values()]
    hashed, hashed_arrays = sum(bool(entry["sha256"]) for entry in files), sum(map(bool, arrays))
    found = f"{count(hashed, 'file')} and {count(hashed_arrays, 'array')}"
    if (hashed, hashed_arrays) != (len(files), len(arrays)):
        found += f" with hashes, of {count(len(files), 'file')} and {count(len(arrays), 'array')}"
    return {**findings, "manifest": found}, problems, bool(hashed or hashed_arrays)


def reordered_in(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of tensors that the manifest, or a GGUF's own key, says to be in another order than in the
    source.
    """
    if isinstance(checkpoint.files, GGUFModel):
        entry = checkpoint.files.kv.get(REORDERED)
        return frozenset(map(str, entry.value)) if entry and isinstance(entry.value, tuple) else frozenset()
    path = manifest_path(checkpoint.path)
    if not path.is_file():
        return frozenset()
    return frozenset(name for name, entry in _recorded(checkpoint, path)[1].items() if entry.get("reordered"))


def scaling_in(checkpoint: Checkpoint) -> Json:
    """What the manifest, or a GGUF's own key, says of inputs whose channels are scaled (`plan.scales`).

    `sources` of it are what makes them, by name; empty where nothing is scaled.
    """
    if isinstance(checkpoint.files, GGUFModel):
        entry = checkpoint.files.kv.get(SCALING)
        found = parse_json_object(str(entry.value).encode(), SCALING) if entry else {}
    else:
        path = manifest_path(checkpoint.path)
        found = (_manifest(checkpoint, path) if path.is_file() else {}).get("scaling", {})
    sources = found.get("sources", {}) if isinstance(found, dict) else None
    if not isinstance(sources, dict) or not all(map(_is_scaled, sources.values())):
        raise CorruptCheckpoint(
            f"{checkpoint.path.name}: says of scaled inputs what qconvert does not write",
            "write the output again, or remove the file",
        )
    return {"sources": sources}


def errors_in(checkpoint: Checkpoint) -> dict[str, float]:
    """The relative error of every quantized weight, as the manifest has it; of a GGUF file none are known."""
    path = manifest_path(checkpoint.path)
    if isinstance(checkpoint.files, GGUFModel) or not path.is_file():
        return {}
    errors = {name: entry.get("error") for name, entry in _recorded(checkpoint, path)[1].items()}
    found = {name: error.get("relative_rms") for name, error in errors.items() if isinstance(error, dict)}
    return {name: error for name, error in found.items() if isinstance(error, float)}


def _manifest(checkpoint: Checkpoint, path: Path) -> Json:
    tensors = len(checkpoint.files.specs)
    return read_json_object(path, limits.manifest_bytes(tensors), times=limits.manifest_values(tensors))


def _is_scaled(source: object) -> bool:
    factors = source.get("factors") if isinstance(source, dict) else None
    return (
        isinstance(factors, list) and len(factors) == 2 and all(isinstance(f, float | int) for f in factors)
    )


def _recorded(checkpoint: Checkpoint, path: Path) -> tuple[list[Json], dict[str, Json]]:
    """What a manifest says about files and tensors, if it is one."""
    manifest = _manifest(checkpoint, path)
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if (
        isinstance(files, list)
        and isinstance(tensors, dict)
        and all(isinstance(entry, dict) and {"name", "bytes", "sha256"} <= set(entry) for entry in files)
        and all(
            isinstance(e, dict) and "form" in e and isinstance(e.get("parts"), dict) for e in tensors.values()
        )
    ):
        return files, tensors
    raise CorruptCheckpoint(
        f"{path.name}: not a manifest of qconvert", "write the output again, or remove the file"
    )


def _nonfinite(checkpoint: Checkpoint) -> list[str]:
    tensors = checkpoint.tensors.values()
    blocks = [tensor for tensor in tensors if isinstance(tensor.encoding, GgmlBlocks)]
    plain = (tensor for tensor in tensors if not isinstance(tensor.encoding, GgmlBlocks))
    arrays = {spec.name: spec for tensor in plain for spec in checkpoint.layout.stored_arrays(tensor)}
    bad = [n for n, spec in arrays.items() if spec.dtype.is_float and not _is_finite(checkpoint, spec)]
    bad += [checkpoint.layout.stored_arrays(t)[0].name for t in blocks if not _decodes_finite(checkpoint, t)]
    return list(dict.fromkeys(bad))


def _decodes_finite(checkpoint: Checkpoint, tensor: ModelTensor) -> bool:
    """Whether all numbers that GGML blocks stand for are finite."""
    step = max(1, _WINDOW_BYTES // (4 * tensor.width))
    return all(
        first_nonfinite(numbers(checkpoint.reader.read(tensor, a, min(a + step, tensor.rows)), DType.F32)) < 0
        for a in range(0, tensor.rows, step)
    )


def _is_finite(checkpoint: Checkpoint, spec: TensorSpec) -> bool:
    return all(
        first_nonfinite(DenseRows(checkpoint.files.read(spec.name, a, b), spec.dtype)) < 0
        for a, b in _windows(spec)
    )


def _windows(spec: TensorSpec) -> list[tuple[int, int]]:
    step = max(1, _WINDOW_BYTES // max(1, spec.width * spec.dtype.nbytes))
    return [(a, min(a + step, spec.rows)) for a in range(0, spec.rows, step)]


def _file_problems(manifest: Path, files: Iterable[Json]) -> list[str]:
    problems = []
    for entry in files:
        path = manifest.parent / str(entry["name"])
        if path.parent != manifest.parent or not _is_file(path):
            problems.append(f"{entry['name']}: named in {manifest.name}, but not here")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(
                f"{entry['name']}: {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
            )
        elif entry["sha256"] and file_sha256(path) != entry["sha256"]:
            problems.append(f"{entry['name']}: its SHA-256 is not the manifest's")
    return problems


def _is_file(path: Path) -> bool:
    """Whether a file of this name is there; no name of a manifest that no disk can have is."""
    try:
        return path.is_file()
    except OSError:  # longer than any
        return False


def _tensor_problems(checkpoint: Checkpoint, tensors: Mapping[str, Json]) -> list[str]:
    problems = []
    by_file = isinstance(checkpoint.files, GGUFModel)  # whose manifest has the names of the file
    for name, entry in tensors.items():
        tensor = checkpoint.tensors.get(name)
        # A number beside the weights is an array of the file, and no tensor of the model.
        beside = tensor is None and checkpoint.layout.scale_stored_as(name) is not None
        if not by_file and not beside and (tensor is None or tensor.encoding.label != entry["form"]):
            found = tensor.encoding.label if tensor else "nothing"
            problems.append(f"{name}: {found}, the manifest says {entry['form']}")
            continue
        for part, expected in entry["parts"].items():
            spec = checkpoint.files.specs.get(part)
            if spec is None:
                problems.append(f"{part}: named in the manifest, but not here")
            elif expected and _sha256(checkpoint, spec) != expected:
                problems.append(f"{part}: its SHA-256 is not the manifest's")
    return problems


def _sha256(checkpoint: Checkpoint, spec: TensorSpec) -> str:
    digest = hashlib.sha256()
    for a, b in _windows(spec):
        digest.update(octets(checkpoint.files.read(spec.name, a, b)))
    return digest.hexdigest()
