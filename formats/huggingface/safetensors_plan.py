"""Plans safetensors files to be written, byte for byte as the reference implementation writes them.

A header is made when it is written, and only its length is kept: half a million arrays take 60 MB of it.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import accumulate, chain, islice, repeat, starmap
from json.encoder import encode_basestring, encode_basestring_ascii
from operator import itemgetter

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.errors import UnsupportedModel
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, METADATA_KEY, SINGLE_FILE
from qconvert.formats.io import limits
from qconvert.formats.io.array_table import ArrayTable, Kind, Parts
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
    arrays = ((spec.name, (("", (spec.dtype, spec.shape)),)) for spec in specs)
    return plan_arrays(arrays, shard_size, metadata, total_parameters)


def plan_arrays(
    tensors: Iterable[tuple[str, Parts]],
    shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
) -> tuple[FilePlan, ...]:
    """Does the same for tensors by name and what is said of their arrays, whose names begin with it.

    That takes less time and memory than the specs of the arrays. Raises UnsupportedModel for headers that no
    reader takes.
    """
    _check_metadata(metadata or {})
    forms = _Forms()
    laid_out, escaped = list[ArrayTable](), False
    for shard in _shards(tensors, forms, shard_size):
        table, unusual = _laid_out(shard, forms), _is_escaped(shard, forms)
        length = _header_bytes(table, metadata, escaped=unusual)
        _check_header(length, len(table))
        table.start = 8 + length + -length % 8
        laid_out.append(table)
        escaped = escaped or unusual
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
        nbytes = _index_bytes(tables, total_parameters, escaped=escaped)
        files.append(FilePlan(INDEX_FILE, index, ArrayTable(), nbytes))
    return tuple(files)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise UnsupportedModel for more metadata than are read, here or by the library; each file has all."""
    most = limits.SAFETENSORS_HEADER_BYTES
    nbytes = sum(map(len, chain(metadata, metadata.values())))
    if len(metadata) > limits.METADATA_KEYS or nbytes > most:
        raise UnsupportedModel(
            f"{SINGLE_FILE}: the header of every file would have {len(metadata):,} metadata in {nbytes:,} "
            f"bytes, and {limits.METADATA_KEYS:,} in {most:,} bytes are read",
            "write another layout: compressed-tensors says in config.json how weights are stored",
        )


def _check_header(nbytes: int, tensors: int) -> None:
    """Raise UnsupportedModel for a header that the library does not read."""
    if nbytes > limits.SAFETENSORS_HEADER_BYTES:
        raise UnsupportedModel(
            f"{SINGLE_FILE}: the header of a file of {tensors:,} tensors would have {nbytes:,} bytes, and "
            f"{limits.SAFETENSORS_HEADER_BYTES:,} are read",
            "--shard-size 5GB writes several files, of fewer tensors each",
        )


@dataclass(slots=True)
class _Shard:
    """Tensors that share a file: the beginnings of names, and the numbers of what is said of the arrays."""

    names: list[str] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("I"))
    arrays: int = 0
    filled: int = 0

    def add(self, name: str, number: int, arrays: int, nbytes: int) -> None:
        self.names.append(name)
        self.numbers.append(number)
        self.arrays += arrays
        self.filled += nbytes

    def add_parts(self, name: str, parts: list[tuple[str, Kind]], forms: _Forms) -> None:
        """Add some of the arrays of a tensor, or none."""
        if parts:
            number = forms.number(tuple(parts))
            self.add(name, number, len(parts), forms.sizes[number])


class _Forms:
    """What is said of the arrays of tensors, by numbers: there are few forms, and very many tensors."""

    def __init__(self) -> None:
        self.of: list[Parts] = []
        self.sizes: list[int] = []
        self._numbers: dict[Parts, int] = {}
        self._known: dict[int, int] = {}  # by the identity of those in `of`, which takes no hash of a shape

    def number(self, parts: Parts) -> int:
        known = self._known.get(id(parts))
        if known is not None:
            return known
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = self._known[id(parts)] = len(self.of)
            self.of.append(parts)
            self.sizes.append(sum(_nbytes(kind) for _, kind in parts))
        return number


def _nbytes(kind: Kind) -> int:
    return TensorSpec("", *kind).nbytes


def _shards(tensors: Iterable[tuple[str, Parts]], forms: _Forms, shard_size: int | None) -> Iterator[_Shard]:
    """Yields shards as they are filled, so that no more than two have lists of their own."""
    current, count, most = _Shard(), 0, limits.SAFETENSORS_TENSORS
    for name, parts in tensors:
        number = forms.number(parts)
        nbytes = forms.sizes[number]
        if shard_size is None or (
            current.filled + nbytes <= shard_size and current.arrays + len(parts) <= most
        ):
            current.add(name, number, len(parts), nbytes)
            continue
        own: list[tuple[str, Kind]] = []  # of its arrays, those that go into the same file
        filled = current.filled
        for part in parts:
            size = _nbytes(part[1])
            if size > shard_size:
                alone = _Shard()
                alone.add_parts(name, [part], forms)
                count += 1
                yield alone
                continue
            if filled + size > shard_size or current.arrays + len(own) == most:
                current.add_parts(name, own, forms)
                count += 1
                yield current
                current, own, filled = _Shard(), [], 0
            own.append(part)
            filled += size
        current.add_parts(name, own, forms)
    if current.names or not count:
        yield current


def _laid_out(shard: _Shard, forms: _Forms) -> ArrayTable:
    """The tensors of one file in the order of the reference implementation's `prepare`.

    That is by falling alignment, then by name. Tensors are sorted once: where no name of one begins that of
    another, arrays of one alignment are in the same order.
    """
    table, end = ArrayTable(), 0
    used = {number: sorted(forms.of[number], key=itemgetter(0)) for number in dict.fromkeys(shard.numbers)}
    tensors = sorted(zip(shard.names, shard.numbers, strict=True), key=itemgetter(0))
    names = [name for name, _ in tensors]
    apart = not any(map(str.startswith, names[1:], names))
    for rank in sorted({_RANK[dtype] for parts in used.values() for _, (dtype, _) in parts}, reverse=True):
        alike = {
            number: [(suffix, table.kind(kind, suffix)) for suffix, kind in parts if _RANK[kind[0]] == rank]
            for number, parts in used.items()
        }
        some = [(name, alike[number]) for name, number in tensors if alike[number]]
        if not apart:
            rows = [(name, [part]) for name, parts in some for part in parts]
            some = sorted(rows, key=lambda row: row[0] + row[1][0][0])
        kinds = [kind for _, parts in some for _, kind in parts]
        sizes = [_nbytes(kind) for kind in table.kinds]
        *begins, end = accumulate(map(sizes.__getitem__, kinds), initial=end)
        table.extend([name for name, parts in some for _ in parts], kinds, begins)
    return table


def _is_escaped(shard: _Shard, forms: _Forms) -> bool:
    """Whether JSON escapes characters of a name."""
    ends = (end for number in set(shard.numbers) for end, _ in forms.of[number])
    text = "".join(chain(shard.names, ends))
    return not (text.isascii() and text.isprintable()) or '"' in text or "\\" in text


def _head_parts(table: ArrayTable, metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    """The length of the header, and the header, filled with spaces; some entries at a time."""
    length = table.start - 8
    yield length.to_bytes(8, "little")
    for part in _header_parts(table, metadata):
        yield part
        length -= len(part)
    yield b" " * length


def _header_bytes(table: ArrayTable, metadata: Mapping[str, str] | None, *, escaped: bool) -> int:
    """The length of the header; it is made only where JSON escapes names."""
    if not len(table) or escaped:
        return sum(map(len, _header_parts(table, metadata)))
    said = [len(each) for each, _ in _said_of_kinds(table)]
    nbytes = table.nbytes
    begins = len(table)  # digits; one more for each that is not below a power of ten, and they rise
    begins += sum(len(table) - bisect_left(table.begins, 10**power) for power in range(1, len(str(nbytes))))
    ends = begins - len(str(table.begins[0])) + len(str(nbytes))
    # A name is in quotes; there are a comma between the positions, brackets after them, and a comma.
    entries = (
        table.characters + sum(map(said.__getitem__, table.kind_numbers)) + begins + ends + 6 * len(table)
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


def _index_bytes(tables: Mapping[str, ArrayTable], total_parameters: int | None, *, escaped: bool) -> int:
    """The length of the index; it is made only where JSON escapes names."""
    if escaped:
        return sum(map(len, _index_parts(tables, total_parameters, in_order=False)))
    said = json.dumps(_index_fields(tables, total_parameters), indent=2, sort_keys=True)
    # Before a name are the end of a line, four spaces and a quote; after it a quote, a colon and a space.
    lines = sum(
        table.characters + len(table) * (6 + 3 + len(json.dumps(name)) + 1) for name, table in tables.items()
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
