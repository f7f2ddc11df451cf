"""Reads rows of GGUF checkpoints on demand from any thread, split files as one.

A row of a quantized tensor is its blocks as stored; they are not decoded here. Every header is checked by
`formats.gguf.header` before the first row is read.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import TensorSpec
from qconvert.core.ggml_types import KV, GGUFTensor
from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.gguf.header import GGUFHeader, parse_header
from qconvert.formats.io.local_file import octets, open_regular, read_exactly

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GGUFFile:
    """An open GGUF checkpoint (a `core.protocols.Source`), all parts of a split one as one file.

    `tensors` has each tensor's type and shape, `specs` the arrays that store them; `kv` is the first part's
    metadata without the split keys, `paths` are the parts. `read` is thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._fds: list[int] = []
        weakref.finalize(self, _close_all, self._fds)
        self.paths: tuple[Path, ...] = (path,)
        self._where: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self.headers: tuple[GGUFHeader, ...] = (self._open(path, 0),)
            count = self.headers[0].number(SPLIT_COUNT) or 1
            if count > 1:
                self.close()
                self.tensors.clear()
                self._where.clear()
                self.paths = part_paths(path, count)
                self.headers = tuple(self._open(p, n) for n, p in enumerate(self.paths))
                self._check_parts()
        except BaseException:
            self.close()
            raise
        self.specs: Mapping[str, TensorSpec] = {name: t.stored for name, t in self.tensors.items()}
        first = self.headers[0]
        self.name = first.name
        self.kv = {key: entry for key, entry in first.kv.items() if not key.startswith("split.")}

    def _open(self, path: Path, number: int) -> GGUFHeader:
        fd = open_regular(path)
        self._fds.append(fd)
        header = parse_header(fd, shown(path.name))
        for name, tensor in header.tensors.items():
            if name in self.tensors:
                raise CorruptCheckpoint(f"{header.name}: {shown(name)} is in an earlier part too")
            self.tensors[name] = tensor
            self._where[name] = (number, header.offsets[name])
        return header

    def _check_parts(self) -> None:
        count = len(self.headers)
        for number, header in enumerate(self.headers):
            found = (header.number(SPLIT_NO), header.number(SPLIT_COUNT))
            if found != (number, count):
                raise CorruptCheckpoint(
                    f"{header.name}: {SPLIT_NO} is {found[0]} and {SPLIT_COUNT} {found[1]}, "
                    f"but its name is that of part {number + 1} of {count}"
                )
        total = self.headers[0].number(SPLIT_TENSORS)
        if total is not None and total != len(self.tensors):
            raise CorruptCheckpoint(
                f"{self.headers[0].name}: {SPLIT_TENSORS} is {total}, but the parts hold {len(self.tensors)}"
            )

    @property
    def has_weights(self) -> bool:
        return True

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a stored array, a new `[rows, width]` array in its carrier type.

        Quantized tensors come as uint8 [rows, row_bytes], their blocks as stored. Of `columns` [first, last)
        only these are returned.
        """
        spec = self.specs[name]
        if not 0 <= start <= stop <= spec.rows:
            raise ValueError(f"{name}: rows [{start}, {stop}) of {spec.rows}")
        part, offset = self._where[name]
        rows = np.empty((stop - start, spec.width), spec.dtype.carrier)
        offset += start * spec.width * spec.dtype.nbytes
        read_exactly(self._fds[part], octets(rows), offset, self.headers[part].name)
        return rows if columns is None else np.ascontiguousarray(rows[:, slice(*columns)])

    def source_offset(self, name: str) -> tuple[int, int]:
        """Returns the index of the part, and the offset in it, of an array's bytes."""
        return self._where[name]

    def close(self) -> None:
        _close_all(self._fds)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def part_paths(path: Path, count: int) -> tuple[Path, ...]:
    """Returns the `count` parts of the checkpoint that `path` is one of, in order.

    Raises CorruptCheckpoint when its name is not that of a part, or naming a part that is missing.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is not None and int(match["count"]) != count:
        raise CorruptCheckpoint(
            f"{shown(path.name)}: {SPLIT_COUNT} is {count:,}, but its name is that of one of "
            f"{int(match['count']):,} parts",
            "give it the name that it was written under",
        )
    if match is None:
        raise CorruptCheckpoint(
            f"{shown(path.name)}: {SPLIT_COUNT} is {count}, but the name is not that of a part",
            f"name the parts {shown(split_name(path.stem, 0, count))} and so on, or fetch all of them",
        )
    paths = tuple(path.with_name(split_name(match["stem"], number, count)) for number in range(count))
    for part in paths:
        if not part.exists():
            raise CorruptCheckpoint(
                f"{shown(part.name)}: missing; {shown(path.name)} is one of {count} parts",
                "fetch all parts into one folder",
            )
    return paths


def split_name(stem: str, number: int, count: int) -> str:
    """Returns llama.cpp's name of part `number` (from 0) of `count`."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def check_vocabulary(kv: Mapping[str, KV], tensors: Mapping[str, GGUFTensor], name: str) -> None:
    """Raises CorruptCheckpoint unless the number of tokens is that of embedding rows, where both exist."""
    tokens = kv.get("tokenizer.ggml.tokens")
    embedding = tensors.get("token_embd.weight")
    if tokens is None or embedding is None or not isinstance(tokens.value, tuple):
        return
    if len(tokens.value) != embedding.stored.rows:
        raise CorruptCheckpoint(
            f"{name}: tokenizer.ggml.tokens has {len(tokens.value):,} tokens, "
            f"token_embd.weight {embedding.stored.rows:,} rows",
            "use the tokenizer and the weights of one model",
        )
