"""Plans safetensors files to be written, byte for byte as the reference implementation writes them.

A header is made when it is written, and only its length is kept: half a million arrays take 60 MB of it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import chain, islice, repeat, starmap
from json.encoder import encode_basestring, encode_basestring_ascii
from operator import itemgetter

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, METADATA_KEY, SINGLE_FILE
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable, Kind
from qconvert.formats.io.planned_files import FilePlan

# The order of `Dtype` in the reference implementation, by rising alignment; files are laid out in reverse.
_ALIGNMENT_ORDER = (
    DType.BOOL, DType.U8, DType.I8, DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.I16, DType.U16,
    DType.F16, DType.BF16, DType.I32, DType.U32, DType.F32, DType.F64, DType.I64, DType.U64,
)  # fmt: skip
_RANK = {dtype: rank for rank, dtype in enumerate(_ALIGNMENT_ORDER)}
# Entries of a header or an index that are made together.
_ENTRIES = 1_000
# What is spelled otherwise in JSON than it is.
_ESCAPED = re.compile(r"[^ !#-\[\]-~]")


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
    kinds = ((spec.name, "", (spec.dtype, spec.shape)) for spec in specs)
    return plan_arrays(kinds, shard_size, metadata, total_parameters)


def plan_arrays(
    arrays: Iterable[tuple[str, str, Kind]],
    shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
) -> tuple[FilePlan, ...]:
    """Does the same for arrays by the beginning of their name, its end, and their kind.

    That takes less memory than their specs; arrays of one tensor have a beginning in common.
    """
    kinds = _Kinds()
    laid_out = [_laid_out(shard, kinds, metadata) for shard in _shards(arrays, kinds, shard_size)]
    names = [SINGLE_FILE]
    if len(laid_out) > 1:
        names = [f"model-{i:05}-of-{len(laid_out):05}.safetensors" for i in range(1, len(laid_out) + 1)]
    tables = dict(zip(names, laid_out, strict=True))
    files = [
        FilePlan(name, partial(_head_parts, table, metadata), table, table.start + table.nbytes)
        for name, table in tables.items()
    ]
    if len(files) > 1:
        index = partial(_index_parts, tables, total_parameters)
        files.append(FilePlan(INDEX_FILE, index, ArrayTable(), _index_bytes(tables, total_parameters)))
    return tuple(files)


@dataclass(slots=True)
class _Shard:
    """Tensors that share a file: the beginnings of their names, and the numbers of their kinds."""

    names: list[str] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("I"))
    filled: int = 0

    def add(self, name: str, number: int, nbytes: int) -> None:
        self.names.append(name)
        self.numbers.append(number)
        self.filled += nbytes


class _Kinds:
    """What is known of kinds of arrays by their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Kind], int] = {}
        self.of: list[tuple[str, Kind]] = []
        self.sizes: list[int] = []

    def number(self, suffix: str, kind: Kind) -> int:
        number = self._numbers.get((suffix, kind))
        if number is None:
            number = self._numbers[suffix, kind] = len(self.of)
            self.of.append((suffix, kind))
            self.sizes.append(TensorSpec("", *kind).nbytes)
        return number


def _shards(
    arrays: Iterable[tuple[str, str, Kind]], kinds: _Kinds, shard_size: int | None
) -> Iterator[_Shard]:
    """Yields shards as they are filled, so that no more than two have lists of their own."""
    current, count = _Shard(), 0
    for name, suffix, kind in arrays:
        number = kinds.number(suffix, kind)
        nbytes = kinds.sizes[number]
        if shard_size is not None and nbytes > shard_size:
            own = _Shard()
            own.add(name, number, nbytes)
            yield own
            count += 1
            continue
        if shard_size is not None and (
            current.filled + nbytes > shard_size or len(current.names) == limits.SAFETENSORS_TENSORS
        ):
            yield current
            current, count = _Shard(), count + 1
        current.add(name, number, nbytes)
    if current.names or not count:
        yield current


def _laid_out(shard: _Shard, kinds: _Kinds, metadata: Mapping[str, str] | None) -> ArrayTable:
    """The tensors of one file in the order of the reference implementation's `prepare`."""
    table = ArrayTable()
    own = dict.fromkeys(shard.numbers)
    numbers = {number: table.kind(kinds.of[number][1], kinds.of[number][0]) for number in own}
    ranks = {number: _RANK[kinds.of[number][1][0]] for number in own}
    end = 0
    for rank in sorted(set(ranks.values()), reverse=True):
        named = [
            (name + kinds.of[number][0], name, number)
            for name, number in zip(shard.names, shard.numbers, strict=True)
            if ranks[number] == rank
        ]
        named.sort(key=itemgetter(0))
        for _, name, number in named:
            table.add(name, numbers[number], end)
            end += kinds.sizes[number]
    length = _header_bytes(table, metadata)
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


def _header_bytes(table: ArrayTable, metadata: Mapping[str, str] | None) -> int:
    """The length of the header, without making it where names are spelled there as they are."""
    if not len(table) or _ESCAPED.search(table.text):
        return sum(map(len, _header_parts(table, metadata)))
    said = [len(each) for each, _ in _said_of_kinds(table)]
    begins = sum(map(len, map(str, table.begins)))
    ends = begins - len(str(table.begins[0])) + len(str(table.nbytes))
    # A name is in quotes; there are a comma between the positions, brackets after them, and a comma.
    entries = (
        len(table.text) + sum(map(said.__getitem__, table.kind_numbers)) + begins + ends + 6 * len(table)
    )
    around = sum(map(len, _header_parts(ArrayTable(), metadata)))
    return around + entries - (0 if metadata else 1)  # no comma before the first


def _said_of_kinds(table: ArrayTable) -> list[tuple[str, int]]:
    """What a header says of every kind, up to the positions, and the bytes of an array of it."""
    kinds = []
    for dtype, shape in table.kinds:
        said = json.dumps({"dtype": dtype.code, "shape": shape}, separators=(",", ":"))
        kinds.append((f':{said[:-1]},"data_offsets":[', TensorSpec("", dtype, shape).nbytes))
    return kinds


def _header_parts(table: ArrayTable, metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    kinds = _said_of_kinds(table)
    about = {METADATA_KEY: dict(metadata)} if metadata else {}
    first = json.dumps(about, ensure_ascii=False, separators=(",", ":"))[1:-1]

    def entry(tensor: str, number: int, begin: int) -> str:
        said, nbytes = kinds[number]
        return f"{encode_basestring(tensor)}{said}{begin},{begin + nbytes}]}}"

    return _joined("{", chain([first] if first else [], starmap(entry, table.rows())), "}")


def _index_bytes(tables: Mapping[str, ArrayTable], total_parameters: int | None) -> int:
    """The length of the index, without making it where names are spelled there as they are."""
    if any(_ESCAPED.search(table.text) for table in tables.values()):
        return sum(map(len, _index_parts(tables, total_parameters, in_order=False)))
    said = json.dumps(_index_fields(tables, total_parameters), indent=2, sort_keys=True)
    # Before a name are the end of a line, four spaces and a quote; after it a quote, a colon and a space.
    lines = sum(
        len(table.text) + len(table) * (6 + 3 + len(json.dumps(name)) + 1) for name, table in tables.items()
    )
    return len(said.removesuffix("}\n}")) + lines - 1 + len("\n  }\n}\n")


def _index_fields(tables: Mapping[str, ArrayTable], total_parameters: int | None) -> Json:
    """The index without the tensors."""
    totals = {"total_size": sum(table.nbytes for table in tables.values())}
    if total_parameters is not None:
        totals["total_parameters"] = total_parameters
    return {"metadata": totals, "weight_map": {}}


def _index_parts(
    tables: Mapping[str, ArrayTable], total_parameters: int | None, *, in_order: bool = True
) -> Iterator[bytes]:
    """The index as by transformers' `save_pretrained` (`indent=2, sort_keys=True`), some lines at a time.

    Lines of the same lengths come sooner if they need not be `in_order`.
    """
    said = json.dumps(_index_fields(tables, total_parameters), indent=2, sort_keys=True)
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
