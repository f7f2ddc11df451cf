"""Merges an adapter into the model that it was trained on: an ordinary checkpoint, computed as it is read.

1. `hub.resolve` finds adapter and base, and lays their texts into one folder (`adapter_texts`);
2. `formats.huggingface.adapter` says which arrays change which modules, by names;
3. here these are matched with the base's tensors, and config.json follows a changed vocabulary or head;
4. `formats.layouts.merged` computes rows as they are read, in float32, rounded once to the base's dtype;
5. everything that reads a checkpoint reads this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from qconvert.checkpoint.adapted_experts import products_of_experts
from qconvert.checkpoint.adapter_names import Names
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.huggingface.adapter import ELSEWHERE, OTHER_BASE, Adapter, LowRank, NewRows
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.formats.huggingface.shard_index import ShardedSpecs
from qconvert.formats.huggingface.sidecars import sidecars_of
from qconvert.formats.layouts.merged import Merged

_ROWS_COMPARED = 1 << 12


def merge(base: Checkpoint, adapter: Adapter, folder: Path) -> Checkpoint:
    """The base with the adapter merged in; `folder` has the texts of both.

    Raises UnsupportedModel for a base that is no folder of safetensors, and where the adapter changes what
    the base does not have; CorruptCheckpoint where shapes differ.
    """
    if not isinstance(base.files, HFCheckpoint):
        fact = f"{base.path.name}: a GGUF file is not the base of an adapter"
        raise UnsupportedModel(fact, "name the folder with safetensors: BASE+ADAPTER")
    names = Names(base, adapter)
    products = {names.of(name): product for name, product in adapter.low_rank.items()}
    products |= products_of_experts(base, adapter)
    whole = {names.of(name): array for name, array in adapter.whole.items()}
    rows = {names.of(name): new for name, new in adapter.rows.items()}
    _drop_equal_head(names, adapter, products, whole, rows)
    bases = {name: _whole(name, adapter.spec(array)) for name, array in whole.items()}
    bases |= {name: names.base_of(name) for name in (*products, *rows) if name not in bases}
    for name, product in products.items():
        _check_shapes(name, bases[name], product, adapter)
    for name, new in rows.items():
        _check_rows(name, bases[name], new, adapter, products)
    bases |= _own_head(names, adapter, bases, products, whole)
    ranks = {name: product.rank for name, product in products.items()}
    encodings = {dtype: Unquantized(dtype) for dtype in DType if dtype.is_float}
    changed = {
        name: ModelTensor(name, stored.shape, encodings[_dtype(names.base_of(name))], ranks.get(name, 0))
        for name, stored in bases.items()
    }
    config = _config(base, changed)
    files = _files(base.files, adapter, folder, config)
    layout = Merged(base.layout, bases, products, whole, rows)
    tensors = {**base.tensors, **changed}
    label = adapter.label + (f"; its base is quantized: {base.quantization}" if base.quantization else "")
    return Checkpoint(files, tensors, layout, base.declared, base.guessed, adapter=label)


def _whole(name: str, spec: TensorSpec) -> ModelTensor:
    """A tensor that the adapter holds itself."""
    if not spec.dtype.is_float:
        raise UnsupportedModel(f"{shown(spec.name)}: {spec.dtype.label}, not a float", "save it as float32")
    return ModelTensor(name, spec.shape, Unquantized(spec.dtype))


def _dtype(tensor: ModelTensor) -> DType:
    """The type of a changed tensor: the one that the base's numbers are stored, or computed, in."""
    encoding = tensor.encoding
    dtype = encoding.dtype if isinstance(encoding, Unquantized) else encoding.decoded
    if not dtype.is_float:
        raise CorruptCheckpoint(f"{shown(tensor.name)}: holds {dtype.label}, to which nothing can be added")
    return dtype


def _check_shapes(name: str, base: ModelTensor, product: LowRank, adapter: Adapter) -> None:
    left, right = adapter.spec(product.left).shape, adapter.spec(product.right).shape
    if product.experts > 1:  # were compared with their parameter
        return
    made = (left[-1], right[0]) if product.transposed else (left[0], right[-1])
    if len(base.shape) != 2 or made != base.shape:
        raise CorruptCheckpoint(
            f"{shown(name)}: the adapter changes a matrix of {list(made)}, the base's is {list(base.shape)}",
            OTHER_BASE,
        )
    if product.magnitude is not None and adapter.spec(product.magnitude).count != base.rows:
        count = adapter.spec(product.magnitude).count
        if product.transposed and count == base.width:
            raise UnsupportedModel(
                f"{shown(name)}: DoRA of an embedding, with {count:,} lengths of columns, is not known here",
                ELSEWHERE,
            )
        raise CorruptCheckpoint(f"{shown(product.magnitude)}: {count:,} lengths of {base.rows:,} rows")


def _check_rows(
    name: str, base: ModelTensor, new: NewRows, adapter: Adapter, products: Mapping[str, LowRank]
) -> None:
    if name in products:
        fact = f"{shown(name)}: the adapter has new rows of it, and adds a product, too"
        raise UnsupportedModel(fact, ELSEWHERE)
    width, last = adapter.spec(new.array).shape[1], max(new.indices, default=0)
    if len(base.shape) != 2 or width != base.width or last >= base.rows:
        fact = f"{shown(name)}: the adapter has row {last:,} of {width:,} numbers"
        raise CorruptCheckpoint(f"{fact}, the base's shape is {list(base.shape)}", OTHER_BASE)


def _drop_equal_head(
    names: Names,
    adapter: Adapter,
    products: Mapping[str, LowRank],
    whole: dict[str, str],
    rows: dict[str, NewRows],
) -> None:
    """Leaves out a tied model's head that an adapter holds as a copy of the embedding: it stays tied."""
    embed, head = names.embed, names.head
    if embed is None or head is None or not names.tied or {embed, head} & products.keys():
        return
    arrays = {name: rows[name].array for name in rows}
    pairs = [(held.get(embed), held.get(head)) for held in (whole, arrays)]
    same_places = embed not in rows or head not in rows or rows[embed].indices == rows[head].indices
    if same_places and any(a for a, _ in pairs) and all(_equal(adapter, a, b) for a, b in pairs):
        whole.pop(head, None)
        rows.pop(head, None)


def _equal(adapter: Adapter, one: str | None, other: str | None) -> bool:
    """Whether two arrays of an adapter hold the same bytes, or both are not there."""
    if one is None or other is None:
        return one is other
    first, second = adapter.spec(one), adapter.spec(other)
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    read, starts = adapter.file.read, range(0, first.rows, _ROWS_COMPARED)
    spans = ((start, min(start + _ROWS_COMPARED, first.rows)) for start in starts)
    return all(read(one, *span).tobytes() == read(other, *span).tobytes() for span in spans)


def _own_head(
    names: Names,
    adapter: Adapter,
    bases: Mapping[str, ModelTensor],
    products: Mapping[str, LowRank],
    whole: dict[str, str],
) -> dict[str, ModelTensor]:
    """The head of a tied model of which PEFT trained the embedding alone: what the embedding was before."""
    embed, head = names.embed, names.head
    if embed is None or head is None or not names.tied or adapter.tied or head in bases:
        return {}
    if embed in products and embed in whole:  # of a resized vocabulary, the adapter has it
        whole[head] = whole[embed]
        return {head: _whole(head, adapter.spec(whole[head]))}
    before = names.base_of(head)
    trained = embed in products or embed in whole
    return {head: before} if trained and bases[embed].shape == before.shape else {}


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
