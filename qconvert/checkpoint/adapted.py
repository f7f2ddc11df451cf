"""Merges an adapter into the model that it was trained on: an ordinary checkpoint, computed as it is read.

1. `hub.resolve` finds adapter and base, and lays their texts into one folder (`adapter_texts`);
2. `formats.huggingface.adapter` says which arrays change which modules, by names;
3. here these are matched with the base's tensors, and config.json follows a changed vocabulary or head;
4. `formats.layouts.merged` computes rows as they are read, in float32, rounded once to the base's dtype;
5. everything that reads a checkpoint reads this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.huggingface.adapter import Adapter, LowRank
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.formats.huggingface.shard_index import ShardedSpecs
from qconvert.formats.huggingface.sidecars import sidecars_of
from qconvert.formats.layouts.merged import Merged
from qconvert.models import Architecture

_LAYERS = ".layers."


def merge(base: Checkpoint, adapter: Adapter, folder: Path) -> Checkpoint:
    """The base with the adapter merged in; `folder` has the texts of both.

    Raises UnsupportedModel for a base that is no folder of safetensors, and where the adapter changes what
    the base does not have; CorruptCheckpoint where shapes differ.
    """
    if not isinstance(base.files, HFCheckpoint):
        fact = f"{base.path.name}: a GGUF file is not the base of an adapter"
        raise UnsupportedModel(fact, "name the folder with safetensors: BASE+ADAPTER")
    names = _Names(base, adapter)
    products = {names.of(name): product for name, product in adapter.low_rank.items()}
    whole = {names.of(name): array for name, array in adapter.whole.items()}
    bases = {name: _whole(name, adapter.spec(array)) for name, array in whole.items()}
    bases |= {name: names.base_of(name) for name in products if name not in bases}
    for name, product in products.items():
        _check_shapes(name, bases[name], product, adapter)
    ranks = {name: product.rank for name, product in products.items()}
    encodings = {dtype: Unquantized(dtype) for dtype in DType if dtype.is_float}
    changed = {
        name: ModelTensor(name, stored.shape, encodings[_dtype(names.base_of(name))], ranks.get(name, 0))
        for name, stored in bases.items()
    }
    config = _config(base, changed)
    files = _files(base.files, adapter, folder, config)
    layout = Merged(base.layout, bases, products, whole)
    tensors = {**base.tensors, **changed}
    return Checkpoint(files, tensors, layout, base.declared, base.guessed, adapter=adapter.label)


class _Names:
    """Finds the base's tensors under the names that an adapter has for them.

    Classes that read pictures, and those of other versions of transformers, begin the same names otherwise:
    then the part from the number of the layer on tells the tensor.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._tensors, self._adapter = base.tensors, adapter
        self._embed, self._head = (_name(base.architecture, role) for role in ("embed", "lm_head"))
        self._base, self._ends = base.path.name, _unique_ends(base.tensors)

    def of(self, name: str) -> str:
        """The base's name for a tensor of the adapter; UnsupportedModel where it has none."""
        if name in self._tensors:
            return name
        found = self._ends.get(_end(name) or "")
        if (
            found is None
            and self._head is not None
            and name.endswith(self._head.rpartition(".")[0] + ".weight")
        ):
            found = self._head  # of a tied base, which has none of its own
        if found is None:
            every = len(self._adapter.low_rank) + len(self._adapter.whole)
            fact = f"{shown(name)}: one of {every:,} tensors of the adapter; {self._base} has no such tensor"
            raise UnsupportedModel(fact, "name the model that it was trained on: BASE+ADAPTER")
        return found

    def base_of(self, name: str) -> ModelTensor:
        """The tensor that is changed: of a tied head, the embedding."""
        if name in self._tensors:
            return self._tensors[name]
        if self._embed is None or self._embed not in self._tensors:
            raise UnsupportedModel(f"{shown(name)}: the base has no such tensor", "name the adapter's base")
        return self._tensors[self._embed]


def _whole(name: str, spec: TensorSpec) -> ModelTensor:
    """A tensor that the adapter holds itself."""
    if not spec.dtype.is_float:
        raise UnsupportedModel(f"{shown(spec.name)}: {spec.dtype.label}, not a float", "save it as float32")
    return ModelTensor(name, spec.shape, Unquantized(spec.dtype))


def _name(architecture: Architecture, role: str) -> str | None:
    found = architecture.table(role)
    return None if found is None else found.name


def _end(name: str) -> str | None:
    """What follows the last stack of layers in a name, with its number."""
    before, found, after = name.rpartition(_LAYERS)
    return after if found and "visual" not in before and "vision" not in before else None


def _unique_ends(names: Iterable[str]) -> Mapping[str, str]:
    """Names of tensors by their ends, those that only one has."""
    found: dict[str, str] = {}
    twice: set[str] = set()
    for name in names:
        end = _end(name)
        if end is not None and found.setdefault(end, name) != name:
            twice.add(end)
    return {end: name for end, name in found.items() if end not in twice}


def _dtype(tensor: ModelTensor) -> DType:
    """The type of a changed tensor: the one that the base's numbers are stored, or computed, in."""
    encoding = tensor.encoding
    dtype = encoding.dtype if isinstance(encoding, Unquantized) else encoding.decoded
    if not dtype.is_float:
        raise CorruptCheckpoint(f"{shown(tensor.name)}: holds {dtype.label}, to which nothing can be added")
    return dtype


def _check_shapes(name: str, base: ModelTensor, product: LowRank, adapter: Adapter) -> None:
    left, right = adapter.spec(product.left).shape, adapter.spec(product.right).shape
    made = (left[-1], right[0]) if product.transposed else (left[0], right[-1])
    if len(base.shape) != 2 or made != base.shape:
        raise CorruptCheckpoint(
            f"{shown(name)}: the adapter changes a matrix of {list(made)}, the base's is {list(base.shape)}",
            "name the model that it was trained on: BASE+ADAPTER",
        )
    if product.magnitude is not None and adapter.spec(product.magnitude).count != base.rows:
        count = adapter.spec(product.magnitude).count
        raise CorruptCheckpoint(f"{shown(product.magnitude)}: {count:,} lengths of {base.rows:,} rows")


def _config(base: Checkpoint, changed: Mapping[str, ModelTensor]) -> Json:
    """The base's config.json, with the rows of another embedding, and a head of its own."""
    architecture, config = base.architecture, base.config
    embed, head = (architecture.table(role) for role in ("embed", "lm_head"))
    if embed is not None and embed.name in changed and changed[embed.name].rows != embed.shape[0]:
        config = _with(config, "vocab_size", changed[embed.name].rows)
    if head is not None and architecture.tied and head.name in changed and head.name not in base.tensors:
        config = _with(config, architecture.family.tied_by, False)
    return config


def _with(config: Json, key: str, value: object) -> Json:
    """A config with a value on top, and in its `text_config` where that has the key."""
    text = config.get("text_config")
    if isinstance(text, dict) and key in text:
        nested = {**config, "text_config": {**text, key: value}}
        return {**nested, key: value} if key in config else nested
    return {**config, key: value}


def _files(base: HFCheckpoint, adapter: Adapter, folder: Path, config: Json) -> HFCheckpoint:
    """The files of both as one source of arrays."""
    shards = (*base.shards, adapter.file)
    if both := base.homes.keys() & adapter.file.header.specs.keys():
        raise CorruptCheckpoint(
            f"{shown(min(both))}: the adapter has an array of this name, as the base does"
        )
    homes = {**base.homes, **dict.fromkeys(adapter.file.header.specs, len(base.shards))}
    return replace(
        base,
        path=folder,
        config=config,
        specs=ShardedSpecs(tuple(shard.header for shard in shards), homes),
        sidecars=sidecars_of(folder, {"config.json", "README.md"}),
        shards=shards,
        homes=homes,
    )
