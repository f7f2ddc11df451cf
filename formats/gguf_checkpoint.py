"""A GGUF model file as a checkpoint: config and tokenizer from its keys, tensors by the model's names.

Answers which array holds which tensor of the model. The invariant: an opened file has every tensor that
its keys promise; what is missing is named as the file would name it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from qconvert.architecture import Architecture, Place
from qconvert.architecture.gguf.config import FindScaling, config_of, shortest
from qconvert.architecture.gguf.keys import head_size
from qconvert.architecture.gguf.models import gguf_model
from qconvert.architecture.gguf.names import ROPE_FREQS, gguf_name, gguf_place
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.formats.files import open_regular, read_exactly
from qconvert.formats.gguf_io import GGUFFile, check_vocabulary
from qconvert.formats.gguf_tokenizer import tokenizer_files
from qconvert.formats.gguf_vocab import GGUFTokenizer
from qconvert.formats.layouts.gguf import GGUFLayout, Home, llama3_scaling
from qconvert.gguf_types import KV, GGUFTensor
from qconvert.interfaces import Sidecars
from qconvert.tensors import DType, Json, Logical, TensorSpec

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
        """The tokenizer's files, made from the metadata."""
        return Sidecars((), (), tokenizer_files(self.file.kv))

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


def open_gguf(path: Path) -> tuple[GGUFModel, GGUFLayout, dict[str, Logical]]:
    """Open a GGUF model file; any part of a split one stands for all. Only headers are read.

    Raises CorruptCheckpoint or UnsupportedModel naming the key or tensor that is missing or wrong.
    """
    file = GGUFFile(path)
    try:
        config = config_of(file.name, file.kv, file.tensors, _find_scaling(file))
        check_vocabulary(file.kv, file.tensors, file.name)
        homes, tensors = _tensors(file, Architecture.of(config))
    except BaseException:
        file.close()
        raise
    config["torch_dtype"] = _torch_dtype(file)
    return GGUFModel(path, config, file), GGUFLayout(homes), tensors


def _find_scaling(file: GGUFFile) -> FindScaling | None:
    """What finds the parameters behind the file's `rope_freqs.weight`, None where it has none."""
    spec = file.specs.get(ROPE_FREQS)
    if spec is None:
        return None
    if spec.dtype is not DType.F32 or len(spec.shape) != 1:
        raise CorruptCheckpoint(f"{file.name}: {ROPE_FREQS} is {spec.dtype.label} {list(spec.shape)}")
    factors_F = file.read(ROPE_FREQS, 0, spec.rows).reshape(-1)
    factor = shortest(float(factors_F.max()))

    def find(theta: float) -> Json | None:
        found = llama3_scaling(theta, factor, factors_F)
        return found and {"rope_type": "llama3", "factor": factor, **found}

    return find


def _torch_dtype(file: GGUFFile) -> str:
    """The type in which the weights are, or were before they were quantized as far as one can tell."""
    forms = {tensor.type.name for tensor in file.tensors.values()} - {"F32"}
    return "float16" if forms == {"F16"} else "float32" if not forms else "bfloat16"


def _tensors(file: GGUFFile, architecture: Architecture) -> tuple[dict[str, Home], dict[str, Logical]]:
    """Every tensor of the model by its own name, and where the file has it."""
    homes: dict[str, Home] = {}
    tensors: dict[str, Logical] = {}
    interleaved = gguf_model(architecture.config).interleaved
    by_key = _places(architecture)
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:
            continue
        spot = gguf_place(name)
        found = by_key.get((spot.role, spot.layer, spot.part), []) if spot else []
        if not spot or not found:
            raise UnsupportedModel(
                f"{file.name}: {name}: not a tensor of {architecture.family.name}",
                "tell qconvert's makers which model this is; llama.cpp may read it",
            )
        if spot.role == "attn.qkv" and interleaved:
            raise UnsupportedModel(f"{file.name}: {name}: fused and interleaved", "split it in llama.cpp")
        head_dim = head_size(architecture.config) if spot.role in interleaved else None
        for place, home, shape in _shared(tensor, found, head_dim):
            homes[place.name] = home
            tensors[place.name] = Logical(place.name, shape, tensor.type.form)
    _check_complete(file, architecture, tensors)
    return homes, tensors


def _places(architecture: Architecture) -> dict[tuple[str, int | None, str], list[Place]]:
    """The places of a GGUF tensor by what it is: one, or all experts of a layer."""
    found: dict[tuple[str, int | None, str], list[Place]] = {}
    for place in architecture.places.values():
        found.setdefault((place.group, place.layer, place.part), []).append(place)
    for entry in architecture.fused.values():
        if not entry.fusion.per_expert:
            found.setdefault((entry.whole.role, entry.whole.layer, entry.whole.part), [entry.whole])
    return found


def _shared(
    tensor: GGUFTensor, places: list[Place], head_dim: int | None
) -> Iterator[tuple[Place, Home, tuple[int, ...]]]:
    """The places that a tensor's rows fill one after another, each with where and in which shape."""
    array = tensor.stored
    if len(places) == 1:
        vector = len(tensor.shape) == 1 and places[0].shape == (1, *tensor.shape)
        if vector:  # llama.cpp's converter drops a dimension of 1
            array = TensorSpec(array.name, array.dtype, (1, *array.shape))
        yield places[0], Home(array, 0, head_dim), (1, *tensor.shape) if vector else tensor.shape
        return
    rows = array.rows // len(places)
    for number, place in enumerate(places):
        yield place, Home(array, number * rows, head_dim), (rows, tensor.width)


def _check_complete(file: GGUFFile, architecture: Architecture, tensors: Mapping[str, Logical]) -> None:
    covered = set(tensors)
    for name in tensors:
        if name in architecture.fused:
            covered.update(part.name for part in architecture.fused[name].parts)
    for place in architecture.places.values():
        if place.name not in covered and not (place.role == "lm_head" and architecture.tied):
            name = gguf_name(place.group, place.layer, place.part)
            raise CorruptCheckpoint(
                f"{file.name}: {name} is missing", "fetch the file again: it is incomplete"
            )
