"""Opens a GGUF model file as a checkpoint: config and tokenizer from its keys, tensors by the model's names.

Answers which array holds which tensor of the model. The invariant: an opened file has every tensor that
its keys promise; what is missing is named as the file would name it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import ModelTensor
from qconvert.core.ggml_types import IN_MEMORY_ALONE, KV, GGMLType
from qconvert.core.numbers import shortest
from qconvert.core.protocols import Sidecars
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.gguf.reader import GGUFFile, check_vocabulary
from qconvert.formats.io.local_file import open_regular, read_exactly
from qconvert.formats.layouts.gguf import GGUFLayout, Home, Stretch, form_of, llama3_scaling
from qconvert.formats.tokenizers.from_gguf import lost_tokenizer, tokenizer_files
from qconvert.formats.tokenizers.to_gguf import GGUFTokenizer
from qconvert.models import FusedParameter
from qconvert.models.gguf.metadata import FindScaling, Metadata
from qconvert.models.gguf.names import FACTOR, ROPE_FREQS
from qconvert.models.gguf.recognize import Reading, read_model

_OF_THE_FILE = frozenset(
    f"general.{name}" for name in ("architecture", "type", "file_type", "quantization_version", "alignment")
)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file that holds weights: where it is, its size, and the hash of what it says before them."""

    path: Path
    size: int
    header_sha256: str


@dataclass(frozen=True)
class GGUFModel:
    """An open GGUF model file, or all parts of one (a `tensors.Source` of its arrays).

    `config` is the config.json that its keys amount to; `path` the file.
    """

    path: Path
    config: Json
    file: GGUFFile
    warnings: tuple[str, ...] = ()
    readme: Path | None = None
    index_sha256: str | None = None

    def __repr__(self) -> str:
        return f"GGUFModel {self.path}: {len(self.specs):,} arrays, {len(self.kv):,} keys"

    @property
    def has_weights(self) -> bool:
        return True

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.file.specs

    @property
    def kv(self) -> Mapping[str, KV]:
        """The metadata, in the file's order."""
        return self.file.kv

    @property
    def tokenizer(self) -> GGUFTokenizer:
        """The keys of its tokenizer."""
        return GGUFTokenizer(tuple(e for key, e in self.kv.items() if key.startswith("tokenizer.")), ())

    @property
    def general(self) -> tuple[KV, ...]:
        """The keys that say what the model is called and who made it."""
        general = ((key, entry) for key, entry in self.kv.items() if key.startswith("general."))
        return tuple(entry for key, entry in general if key not in _OF_THE_FILE)

    @cached_property
    def files(self) -> tuple[WeightFile, ...]:
        """The parts of the file."""
        parts = zip(self.file.paths, self.file.headers, strict=True)
        return tuple(_weight_file(path, header.data_start) for path, header in parts)

    @cached_property
    def sidecars(self) -> Sidecars:
        """The tokenizer's files, made from the metadata; none where they cannot be (see `warnings`)."""
        lost = lost_tokenizer(self.file.kv) is not None
        return Sidecars((), (), {} if lost else tokenizer_files(self.file.kv))

    def source_offset(self, name: str) -> tuple[int, int]:
        """Where an array's bytes begin: number of the file in `files`, and offset in it."""
        return self.file.source_offset(name)

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Rows [start, stop) of an array as stored (see `GGUFFile.read`); any thread may call it."""
        return self.file.read(name, start, stop, columns=columns)

    def close(self) -> None:
        self.file.close()


def _weight_file(path: Path, header_bytes: int) -> WeightFile:
    fd = open_regular(path)
    try:
        header = memoryview(bytearray(header_bytes))
        read_exactly(fd, header, 0, path.name)
        return WeightFile(path, os.fstat(fd).st_size, hashlib.sha256(header).hexdigest())
    finally:
        os.close(fd)


def open_gguf(path: Path) -> tuple[GGUFModel, GGUFLayout, dict[str, ModelTensor]]:
    """Open a GGUF model file; any part of a split one stands for all. Only headers are read.

    Raises CorruptCheckpoint or UnsupportedModel naming the key or tensor that is missing or wrong.
    """
    file = GGUFFile(path)
    try:
        _check_types(file)
        metadata = _metadata(file)
        check_vocabulary(file.kv, file.tensors, file.name)
        reading = read_model(metadata)
        homes = _homes(file, reading)
    except BaseException:
        file.close()
        raise
    config = {**reading.config, "torch_dtype": _torch_dtype(file)}
    parameters = reading.facts.architecture.stored
    tensors = {name: ModelTensor(name, parameters[name].shape, form_of(home)) for name, home in homes.items()}
    lost = lost_tokenizer(file.kv)
    told = () if lost is None else (f"{file.name}: {lost}: use the model's own tokenizer files",)
    return GGUFModel(path, config, file, (*reading.warnings, *told)), GGUFLayout(homes), tensors


def _check_types(file: GGUFFile) -> None:
    """Raise UnsupportedModel for blocks that llama.cpp has in memory alone, and no reader decodes."""
    name = next((name for name, tensor in file.tensors.items() if tensor.type in IN_MEMORY_ALONE), None)
    if name is not None:
        raise UnsupportedModel(
            f"{shown(name)}: {file.tensors[name].type.name} blocks, which llama.cpp has only in memory",
            "make the file again from the 16-bit model, with another type",
        )


def _metadata(file: GGUFFile) -> Metadata:
    """The metadata of a file, for the architecture that it says it is of."""
    kind, entry = file.kv.get("general.type"), file.kv.get("general.architecture")
    if kind is not None and kind.value == "imatrix":
        raise UnsupportedModel(
            f"{file.name}: an importance matrix, not a model", "give it beside a model, as --imatrix FILE"
        )
    if entry is None or not isinstance(entry.value, str):
        is_ = "missing" if entry is None else f"{entry.value!r}, not text"
        raise CorruptCheckpoint(f"{file.name}: general.architecture is {is_}")
    scaling = _find_scaling(file)
    beside = {name for pair in _factors(file).values() for name in pair}
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in beside}
    return Metadata(file.name, entry.value, file.kv, tensors, lambda name: _vector(file, name), scaling)


def _factors(file: GGUFFile) -> dict[str, list[str]]:
    """What stands beside every NVFP4 weight: the factors of its numbers, and those of its inputs.

    Only GPUs that multiply 4-bit activations look at the second (llama.cpp's `input_scale`).
    """
    found: dict[str, list[str]] = {}
    for name, tensor in file.tensors.items():
        base = name.removesuffix(".weight")
        if tensor.type is GGMLType.NVFP4:
            names = (f"{base}.{ending}" for ending in (FACTOR, "input_scale"))
            found[name] = [beside for beside in names if beside in file.tensors]
    return found


def _factors_of(file: GGUFFile, name: str, pieces: int) -> list[float]:
    """The factor of each piece of a tensor: 1 where there is none, one for all, or one for each expert."""
    beside = f"{name.removesuffix('.weight')}.{FACTOR}"
    if beside not in file.tensors or file.tensors[name].type is not GGMLType.NVFP4:
        return [1.0] * pieces
    stored = _floats(file, beside)
    if len(stored) not in (1, pieces) or not np.isfinite(stored).all() or not stored.all():
        raise CorruptCheckpoint(
            f"{file.name}: {beside}: {len(stored)} factors for {pieces} matrices of {name}"
        )
    return [float(factor) for factor in np.broadcast_to(stored, pieces)]


def _vector(file: GGUFFile, name: str) -> tuple[float, ...]:
    """The numbers of a small float32 vector, each as the shortest decimal that stands for it."""
    return tuple(shortest(float(number)) for number in _floats(file, name))


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    spec = file.specs[name]
    if spec.dtype is not DType.F32 or len(spec.shape) != 1:
        raise CorruptCheckpoint(f"{file.name}: {name} is {spec.dtype.label} {list(spec.shape)}")
    return file.read(name, 0, spec.rows).reshape(-1)


def _find_scaling(file: GGUFFile) -> FindScaling | None:
    """What finds the parameters behind the file's `rope_freqs.weight`, None where it has none."""
    if ROPE_FREQS not in file.specs:
        return None
    factors_F = _floats(file, ROPE_FREQS)
    if not (np.isfinite(factors_F) & (factors_F > 0)).all():
        raise CorruptCheckpoint(f"{file.name}: {ROPE_FREQS} holds a factor that is not a positive number")
    factor = shortest(float(factors_F.max()))

    def find(theta: float, count: int | None = None) -> Json | None:
        found = llama3_scaling(theta, factor, factors_F[:count])
        return found and {"rope_type": "llama3", "factor": factor, **found}

    return find


def _torch_dtype(file: GGUFFile) -> str:
    """The type in which the weights are, or were before they were quantized as far as one can tell."""
    encodings = {tensor.type.name for tensor in file.tensors.values()} - {"F32"}
    return "float16" if encodings == {"F16"} else "float32" if not encodings else "bfloat16"


def _homes(file: GGUFFile, reading: Reading) -> dict[str, Home]:
    """Where the file has every tensor that the model's class stores."""
    parts: dict[str, list[Stretch]] = {}
    for record in (record for record in reading.records if not record.copy):
        tensor = file.tensors[record.name]
        start = 0
        factors = _factors_of(file, record.name, len(record.pieces))
        for piece, factor in zip(record.pieces, factors, strict=True):
            encoding = tensor.type.encoding
            stretch = Stretch(piece.rows, tensor.stored, encoding, start, record.width, record.step, factor)
            parts.setdefault(piece.name, []).append(stretch)
            start += len(piece.rows)
    homes = {name: tuple(home) for name, home in parts.items()}
    architecture = reading.facts.architecture
    for name in architecture.stored:
        entry = architecture.fused.get(name)
        if entry is not None and all(part.name in homes for part in entry.members):
            homes[name] = tuple(_placed(entry, [homes[part.name] for part in entry.members]))
    return {name: homes[name] for name in architecture.stored if name in homes}


def _placed(entry: FusedParameter, parts: list[Home]) -> Iterator[Stretch]:
    """The stretches of a whole, whose parts have these homes."""
    for run, rows in zip(entry.runs, entry.rows, strict=True):
        for stretch in parts[run.member]:
            begin, end = max(run.start, stretch.rows.start), min(run.stop, stretch.rows.stop)
            if begin < end:
                taken, start = rows[begin - run.start : end - run.start], begin - stretch.rows.start
                yield replace(stretch, rows=taken, start=stretch.start + start)
