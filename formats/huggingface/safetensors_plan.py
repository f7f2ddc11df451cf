"""Plans safetensors files to be written, byte for byte as the reference implementation writes them.

A header is made when it is written, and only its length is kept: half a million arrays take 60 MB of it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import chain, islice, repeat, starmap
from json.encoder import encode_basestring, encode_basestring_ascii

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, METADATA_KEY, SINGLE_FILE
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.io.planned_files import FilePlan

# The order of `Dtype` in the reference implementation, by rising alignment; files are laid out in reverse.
_ALIGNMENT_ORDER = (
    DType.BOOL, DType.U8, DType.I8, DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.I16, DType.U16,
    DType.F16, DType.BF16, DType.I32, DType.U32, DType.F32, DType.F64, DType.I64, DType.U64,
)  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_ALIGNMENT_ORDER)}
# Entries of a header or an index that are made together.
_ENTRIES = 1_000


def plan_files(
    specs: Iterable[TensorSpec],
    shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
) -> tuple[FilePlan, ...]:
    """Plans files for tensors of these specs: one, or shards and the index that lists them.

    Shards are filled in the order of `specs` up to `shard_size` bytes of tensors (None: no limit), a larger
    tensor gets one of its own, as in huggingface_hub's `split_state_dict_into_shards_factory`; none gets more
    tensors than are read here. `metadata` goes into the header of each file, `total_parameters` only into the
    index.
    """
    shards = _shards(specs, shard_size)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    shards.reverse()  # so that each is let go of when its file is laid out
    tables = {name: _laid_out(shards.pop(), metadata) for name in names}
    files = [
        FilePlan(name, partial(_head_parts, table, metadata), table, table.start + table.nbytes)
        for name, table in tables.items()
    ]
    if len(files) > 1:
        index = partial(_index_parts, tables, total_parameters)
        size = sum(map(len, index(in_order=False)))
        files.append(FilePlan(INDEX_FILE, index, ArrayTable(), size))
    return tuple(files)


@dataclass(slots=True)
class _Shard:
    """Tensors that share a file: their names, and the numbers of their kinds."""

    kinds: ArrayTable
    names: list[str] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("I"))
    filled: int = 0

    def add(self, name: str, number: int, nbytes: int) -> None:
        self.names.append(name)
        self.numbers.append(number)
        self.filled += nbytes


def _shards(specs: Iterable[TensorSpec], shard_size: int | None) -> list[_Shard]:
    kinds, sizes = ArrayTable(), list[int]()
    shards: list[_Shard] = []
    current = _Shard(kinds)
    for spec in specs:
        number = kinds.kind(spec.dtype, spec.shape)
        if number == len(sizes):
            sizes.append(spec.nbytes)
        nbytes = sizes[number]
        if shard_size is not None and nbytes > shard_size:
            shards.append(_Shard(kinds))
            shards[-1].add(spec.name, number, nbytes)
            continue
        if shard_size is not None and (
            current.filled + nbytes > shard_size or len(current.names) == limits.SAFETENSORS_TENSORS
        ):
            shards.append(current)
            current = _Shard(kinds)
        current.add(spec.name, number, nbytes)
    return [*shards, current] if current.names or not shards else shards


def _laid_out(shard: _Shard, metadata: Mapping[str, str] | None) -> ArrayTable:
    """The tensors of one file in the order of the reference implementation's `prepare`."""
    table = ArrayTable()
    kinds = shard.kinds.kinds
    numbers = {number: table.kind(*kinds[number]) for number in dict.fromkeys(shard.numbers)}
    sizes = {number: TensorSpec("", *kinds[number]).nbytes for number in numbers}
    ranks = array("B", (_RANK[kinds[number][0]] for number in shard.numbers))
    end = 0
    for rank in sorted(set(ranks), reverse=True):
        named = zip(shard.names, shard.numbers, ranks, strict=True)
        for tensor, number in sorted((name, number) for name, number, own in named if own == rank):
            table.add(tensor, numbers[number], end)
            end += sizes[number]
    length = sum(map(len, _header_parts(table, metadata)))
    table.start = 8 + length + -length % 8
    return table


def _head_parts(table: ArrayTable, metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    """The length of the header, and the header, filled with spaces; some entries at a time."""
    length = table.start - 8
    yield length.to_bytes(8, "little")
    for part in _header_parts(table, metadata):
        yield part
        length -= len(part)
    yield b" " * length


def _header_parts(table: ArrayTable, metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    kinds = []
    for dtype, shape in table.kinds:
        said = json.dumps({"dtype": dtype.code, "shape": shape}, separators=(",", ":"))
        kinds.append((f':{said[:-1]},"data_offsets":[', TensorSpec("", dtype, shape).nbytes))
    about = {METADATA_KEY: dict(metadata)} if metadata else {}
    first = json.dumps(about, ensure_ascii=False, separators=(",", ":"))[1:-1]

    def entry(tensor: str, number: int, begin: int) -> str:
        said, nbytes = kinds[number]
        return f"{encode_basestring(tensor)}{said}{begin},{begin + nbytes}]}}"

    return _joined("{", chain([first] if first else [], starmap(entry, table.rows())), "}")


def _index_parts(
    tables: Mapping[str, ArrayTable], total_parameters: int | None, *, in_order: bool = True
) -> Iterator[bytes]:
    """The index as by transformers' `save_pretrained` (`indent=2, sort_keys=True`), some lines at a time.

    Lines of the same lengths come sooner if they need not be `in_order`.
    """
    totals = {"total_size": sum(table.nbytes for table in tables.values())}
    if total_parameters is not None:
        totals["total_parameters"] = total_parameters
    said = json.dumps({"metadata": totals, "weight_map": {}}, indent=2, sort_keys=True)
    homes = [zip(sorted(table), repeat(json.dumps(name)), strict=False) for name, table in tables.items()]
    located = merge(*homes) if in_order else chain.from_iterable(homes)
    lines = (f"\n    {encode_basestring_ascii(tensor)}: {home}" for tensor, home in located)
    return _joined(said.removesuffix("}\n}"), lines, "\n  }\n}\n")


def _joined(before: str, entries: Iterator[str], after: str) -> Iterator[bytes]:
    """Entries with commas between them, in UTF-8, some at a time."""
    while some := ",".join(islice(entries, _ENTRIES)):
        yield f"{before}{some}".encode()
        before = ","
    yield (before.removesuffix(",") + after).encode()
