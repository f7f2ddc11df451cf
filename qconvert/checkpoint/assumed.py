"""Opens a model whose weights are not here: names and shapes that its config.json, and an index, promise.

What is planned for it has the sizes of the real thing to the byte; there is nothing to read. The arrays of a
quantized model are those that its layout would store (`formats.layouts.base.Promise`); a model in a layout
that only headers tell is left as its config alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

from qconvert.checkpoint.assumed_tower import tower_shapes, untold_tower
from qconvert.checkpoint.open import Checkpoint, checkpoint_in, checkpoint_of
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import Layout
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.gguf.header import is_gguf
from qconvert.formats.huggingface.folder import CONFIG_FILE, HFCheckpoint, open_config
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE
from qconvert.formats.huggingface.shard_index import ShardIndex, read_index
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.base import MatrixKind, Promise
from qconvert.formats.layouts.config_checks import settings_of
from qconvert.formats.layouts.stored_arrays import arrays_of
from qconvert.models import Architecture, Parameter
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
        return replace(_quantized(files, index, declared), assumed=source)
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

    Where some are there (or links to them), the others are missing, which is an error when they are opened.
    """
    folder = _folder(path)
    if not folder.is_dir():
        return path.suffix == ".json" and path.is_file()
    entries = list(folder.iterdir())
    there = any(entry.suffix == ".safetensors" for entry in entries)
    others = any(entry.suffix in _OTHER_WEIGHTS for entry in entries) and not (folder / INDEX_FILE).is_file()
    adapter = folder / "adapter_config.json"
    return (folder / CONFIG_FILE).is_file() and not (there or adapter.exists() or others)


def _promised(architecture: Architecture, index: ShardIndex | None) -> tuple[ArrayTable, list[str]]:
    """The arrays of a plain model, and what is to be said of them."""
    names = architecture.stored if index is None else index.weight_map
    architecture = architecture.spelled_like(names)
    shapes = _shapes(architecture, architecture.stored if index is None else names)
    shapes |= tower_shapes(architecture, None if index is None else names)
    dtype, notes = _dtype(architecture, shapes, index)
    notes += untold_tower(architecture, architecture.config) if index is None else []
    specs = ArrayTable()  # of arrays that lie nowhere
    specs.extend(shapes, [specs.kind((dtype, shape)) for shape in shapes.values()], repeat(0, len(shapes)))
    others = [name for name in names if name not in shapes] if index is not None else []
    if index is not None and others:
        notes.append(_rest_note(others, _bytes_of_rest(specs.nbytes, index)))
    return specs, notes


def _shapes(architecture: Architecture, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found = ((name, architecture.parameter(name)) for name in names)
    stored = architecture.stored_shapes
    return {name: stored.get(name, place.shape) for name, place in found if place is not None}


def _named_dtype(architecture: Architecture) -> object:
    settings = architecture.settings
    return settings.get("dtype") or settings.get("torch_dtype")


def _dtype(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], index: ShardIndex | None
) -> tuple[DType, list[str]]:
    """What a number is stored in: as the index's total has it, else as config.json says."""
    named = _named_dtype(architecture)
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
            f"{said}{INDEX_FILE} counts {other.nbytes} bytes for each number: assumed to be {other.label}"
        ]
    return dtype, [
        f"{INDEX_FILE} counts {index.total_size:,} bytes, its tensors in {dtype.label} have "
        f"{numbers * dtype.nbytes:,}"
    ]


def _rest_note(others: Sequence[str], taken: str) -> str:
    return (
        f"{INDEX_FILE}: {len(others):,} of its tensors are not of the language model "
        f"({shown(others[0])}, ...){taken}, and are not counted here"
    )


def _bytes_of_rest(nbytes: int, index: ShardIndex) -> str:
    if not isinstance(index.total_size, int):
        return ""
    rest = index.total_size - nbytes
    return f", take {rest:,} bytes" if rest > 0 else ""


def _quantized(files: HFCheckpoint, index: ShardIndex | None, declared: Declaration | None) -> Checkpoint:
    """A quantized model by what its config says of it; without tensors where that does not tell them."""
    untold = []
    try:
        promise = registry.promise(files.config)
        if promise is not None:
            architecture = declared.architecture(files.config) if declared else Architecture.of(files.config)
            architecture = _spelled(architecture, index, settings_of(files.config))
            tensors = _coded(architecture, index, promise)
            arrays = arrays_of(promise.layout, tensors.values())
            specs = {
                begin + end: TensorSpec(begin + end, dtype, shape)
                for begin, parts in arrays
                for end, (dtype, shape) in parts
            }
            specs |= {spec.name: spec for spec in _scales_of_inputs(files.config, tensors)}
            notes = [promise.note] if promise.note else []
            notes += untold_tower(architecture, files.config) if index is None else _differences(specs, index)
            held = replace(files, specs=specs, warnings=(*files.warnings, *notes))
            return checkpoint_in(held, promise.layout, tensors, declared)
    except UnsupportedModel as error:
        untold.append(error.fact)
    if index is not None and isinstance(index.total_size, int):
        untold.append(f"{INDEX_FILE} counts {index.total_size:,} bytes of weights")
    bare = replace(files, warnings=(*files.warnings, *untold))
    return Checkpoint(bare, {}, registry.writer(registry.DEFAULT), declared)


def _coded(architecture: Architecture, index: ShardIndex | None, promise: Promise) -> dict[str, ModelTensor]:
    """The tensors of a quantized model: an index tells which of them are left plain after all."""
    there = None if index is None else index.weight_map
    plain = Unquantized(_DTYPES.get(str(_named_dtype(architecture)), DType.BF16))
    encodings: dict[Quantized, Quantized] = {}  # each once: of very many tensors, there are few
    found = {}
    for parameter in _apart(architecture, promise.layout, there):
        name = parameter.name
        encoding = _encoding(parameter, plain, promise)
        coded = None
        if encoding is not None:
            coded = ModelTensor(name, parameter.shape, encodings.setdefault(encoding, encoding))
        if coded is not None and (there is None or _is_there(coded, promise.layout, there)):
            found[name] = coded
        elif there is None or name in there:
            found[name] = ModelTensor(name, architecture.stored_shapes.get(name, parameter.shape), plain)
        else:
            raise CorruptCheckpoint(
                f"{name}: missing in {INDEX_FILE}, but config.json promises it",
                "correct config.json, or fetch both again from one source",
            )
    found |= {
        name: ModelTensor(name, shape, plain) for name, shape in tower_shapes(architecture, there).items()
    }
    return {name: found[name] for name in sorted(found)}


def _spelled(architecture: Architecture, index: ShardIndex | None, settings: Json) -> Architecture:
    """The architecture with the names that an index has, or else the settings, where they name modules."""
    if index is not None:
        return architecture.spelled_like(index.weight_map)
    said, family = json.dumps(settings), architecture.family
    layers = next((s.module for s in family.slots if s.per_layer), "").split("{layer}")[0]

    def named(spelling: Mapping[str, str]) -> int:
        start = layers
        for ours, theirs in spelling.items():
            start = start.replace(ours, theirs, 1)
        return said.count(f'"{start}')

    return replace(architecture, spelling=max(({}, *family.spellings), key=named))


def _apart(
    architecture: Architecture, layout: Layout, there: Mapping[str, str] | None
) -> Iterator[Parameter]:
    """What the model's class stores, but experts apart where the layout, or an index, has them so."""
    modules = {name.rpartition(".")[0] for name in there or ()}
    for name, parameter in architecture.stored.items():
        entry = architecture.fused.get(name)
        if entry is None or not entry.fusion.per_expert:
            yield parameter
        elif there is None:
            yield from entry.members if layout.traits.experts == "apart" else (parameter,)
        else:
            first = entry.members[0].name.removesuffix(".weight")
            yield from entry.members if first in modules else (parameter,)


def _encoding(parameter: Parameter, plain: Unquantized, promise: Promise) -> Quantized | None:
    kinds: dict[str, MatrixKind] = {"linear": "linear", "embedding": "embedding", "router": "router"}
    kind = kinds.get(parameter.kind) if parameter.param == "weight" else None
    if kind is None or len(parameter.shape) < 2:
        return None
    tensor = ModelTensor(parameter.name, parameter.shape, plain)
    return promise.encoding(tensor, "head" if parameter.role == "lm_head" else kind)


def _is_there(tensor: ModelTensor, layout: Layout, names: Mapping[str, str]) -> bool:
    return all(spec.name in names for spec in layout.stored_arrays(tensor))


def _scales_of_inputs(config: Json, tensors: Mapping[str, ModelTensor]) -> Iterator[TensorSpec]:
    """The stored numbers, one each, that the inputs of linears are scaled with."""
    quantized = (tensor for tensor in tensors.values() if not isinstance(tensor.encoding, Unquantized))
    for tensor, scheme in registry.activations_of(config, quantized):
        for kind in scheme.stored:
            yield TensorSpec(f"{tensor.name.removesuffix('.weight')}.{kind}", DType.F32, (1,))


def _differences(specs: Mapping[str, TensorSpec], index: ShardIndex) -> list[str]:
    """What an index counts that the config does not tell, in tensors and in bytes."""
    others = [name for name in index.weight_map if name not in specs]
    counted = sum(spec.nbytes for spec in specs.values())
    total = index.total_size if isinstance(index.total_size, int) else counted
    if others:
        return [_rest_note(others, _bytes_of_rest(counted, index))]
    return (
        [f"{INDEX_FILE} counts {total:,} bytes, config.json describes {counted:,}"]
        if total != counted
        else []
    )


def refuse_quantized(checkpoint: Checkpoint, name: str) -> None:
    """Raise UnsupportedModel where no weights are here, and the config does not tell their encodings."""
    if checkpoint.assumed and not checkpoint.tensors:
        method = registry.claimed_method(checkpoint.config)
        raise UnsupportedModel(
            f"{name}: config.json says {method}, and the sizes of its weights are only in their headers",
            "give the whole model folder, or its name on the Hub",
        )
