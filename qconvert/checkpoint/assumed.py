"""Opens a model whose weights are not here: names and shapes that its config.json, and an index, promise.

What is planned for it has the sizes of the real thing to the byte; there is nothing to read. A quantized
model is left as its config alone, for its arrays are told by their headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from qconvert.checkpoint.open import Checkpoint, checkpoint_of
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.huggingface.folder import CONFIG_FILE, open_config
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE
from qconvert.formats.huggingface.shard_index import ShardIndex, read_index
from qconvert.formats.layouts import registry
from qconvert.models import Architecture
from qconvert.models.declared import Declaration

_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".ckpt")
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


def without_weights(path: Path, declared: Declaration | None = None) -> Checkpoint | None:
    """The model that a config.json, and an index beside it, describe; None where weights are there.

    `Checkpoint.assumed` says what it is told from. Raises CorruptCheckpoint where index and config disagree,
    UnsupportedModel for a family whose weights a config does not tell.
    """
    if is_gguf(path) or not _is_config(path):
        return None
    index = _index(path)
    files = open_config(path)
    source = CONFIG_FILE if index is None else f"{CONFIG_FILE} and {INDEX_FILE}"
    if registry.claimed_method(files.config) is not None:
        note = [] if index is None else _claimed_note(index)
        bare = replace(files, warnings=(*files.warnings, *note))
        return Checkpoint(bare, {}, registry.writer(registry.DEFAULT), declared, assumed=source)
    architecture = declared.architecture(files.config) if declared else Architecture.of(files.config)
    specs, notes = _promised(architecture, index)
    held = replace(files, specs=specs, warnings=(*files.warnings, *notes))
    return replace(checkpoint_of(held, declared), assumed=source)


def _folder(path: Path) -> Path:
    """The folder of a model that is named by itself, or by one of its files."""
    return path.parent if path.name in (CONFIG_FILE, INDEX_FILE) else path


def _index(path: Path) -> ShardIndex | None:
    index = _folder(path) / INDEX_FILE
    return read_index(index) if index.is_file() else None


def _is_config(path: Path) -> bool:
    """Whether what is named is a config with no weights beside it.

    Where some are there (or links to them), the others are missing, and whoever opens them says so.
    """
    folder = _folder(path)
    if not folder.is_dir():
        return path.suffix == ".json" and path.is_file()
    entries = list(folder.iterdir())
    there = any(entry.suffix == ".safetensors" for entry in entries)
    others = any(entry.suffix in _OTHER_WEIGHTS for entry in entries) and not (folder / INDEX_FILE).is_file()
    adapter = folder / "adapter_config.json"
    return (folder / CONFIG_FILE).is_file() and not (there or adapter.exists() or others)


def _promised(
    architecture: Architecture, index: ShardIndex | None
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The arrays of a plain model, and what is to be said of them."""
    names = architecture.stored if index is None else index.weight_map
    architecture = architecture.spelled_like(names)
    shapes = _shapes(architecture, architecture.stored if index is None else names)
    dtype, notes = _dtype(architecture, shapes, index)
    specs = {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}
    others = [name for name in names if name not in shapes] if index is not None else []
    if index is not None and others:
        taken = _bytes_of_rest(specs.values(), index)
        notes.append(
            f"{INDEX_FILE}: {len(others):,} of its tensors are not of the language model "
            f"({shown(others[0])}, ...){taken}, and are not counted here"
        )
    return specs, notes


def _shapes(architecture: Architecture, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found = ((name, architecture.parameter(name)) for name in names)
    stored = architecture.stored_shapes
    return {name: stored.get(name, place.shape) for name, place in found if place is not None}


def _dtype(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], index: ShardIndex | None
) -> tuple[DType, list[str]]:
    """What a number is stored in: as the index's total has it, else as config.json says."""
    settings = architecture.settings
    named = settings.get("dtype") or settings.get("torch_dtype")
    dtype = _DTYPES.get(str(named), DType.F32)
    unnamed = [] if str(named) in _DTYPES else ["config.json names no dtype: counted as float32"]
    if index is None or not isinstance(index.total_size, int) or len(shapes) != len(index.weight_map):
        return dtype, unnamed
    numbers = sum(TensorSpec(name, DType.F32, shape).nbytes for name, shape in shapes.items()) // 4
    if numbers * dtype.nbytes == index.total_size:
        return dtype, []
    other = next((d for d in (DType.BF16, DType.F32) if numbers * d.nbytes == index.total_size), None)
    if other is not None:
        said = f"config.json says {shown(named)}, " if named else ""
        return other, [
            f"{said}{INDEX_FILE} counts {other.nbytes} bytes for each number: taken for {other.label}"
        ]
    return dtype, [
        f"{INDEX_FILE} counts {index.total_size:,} bytes, its tensors in {dtype.label} have "
        f"{numbers * dtype.nbytes:,}"
    ]


def _bytes_of_rest(specs: Iterable[TensorSpec], index: ShardIndex) -> str:
    if not isinstance(index.total_size, int):
        return ""
    rest = index.total_size - sum(spec.nbytes for spec in specs)
    return f", take {rest:,} bytes" if rest > 0 else ""


def _claimed_note(index: ShardIndex) -> list[str]:
    if not isinstance(index.total_size, int):
        return []
    return [f"{INDEX_FILE} counts {index.total_size:,} bytes of weights"]


def refuse_quantized(checkpoint: Checkpoint, name: str) -> None:
    """Raise UnsupportedModel where a config says that the weights are quantized, and none are here."""
    method = registry.claimed_method(checkpoint.config)
    if checkpoint.assumed and method is not None:
        raise UnsupportedModel(
            f"{name}: config.json says {method}, and the sizes of quantized weights are in their headers",
            "give the whole model folder, or its name on the Hub",
        )
