"""Writes GGUF files: headers final before the first byte of data, rows in any order, atomically.

`plan_files` is pure: it computes every byte of every header and the offset of each row, so the size is known
before anything is converted and any number of threads may write at once. The bytes are those that
gguf.GGUFWriter writes for the same content.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from qconvert.core.ggml_types import ARRAY_NUMBER, KV, ArrayOf, GGUFTensor, KVType
from qconvert.errors import TAKEN, BadRecipe, OutputExists, QConvertError, refused, shown
from qconvert.formats.gguf.header import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME_BYTES
from qconvert.formats.gguf.publication import announce, conclude, partial_file, settle
from qconvert.formats.gguf.reader import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, split_name
from qconvert.formats.io.array_table import ArrayTable
from qconvert.formats.io.local_file import amount, claim, empty, name_new, sync
from qconvert.formats.io.planned_files import FilePlan, FileSink

VERSION = 3
ALIGNMENT = DEFAULT_ALIGNMENT
_SAFETENSORS = "keep this model in safetensors, which hold it"


def plan_files(
    name: str,
    kv: Sequence[KV],
    tensors: Sequence[GGUFTensor],
    *,
    max_part_bytes: int | None = None,
    metadata_first: bool = False,
) -> tuple[FilePlan, ...]:
    """Plans the file `name` (ending in .gguf), or its parts, with this metadata and these tensors, in order.

    A new part begins where a tensor would exceed `max_part_bytes` of data in the current one, as in
    gguf.GGUFWriter; parts are named like llama.cpp's. With `metadata_first` the first of several parts holds
    no tensor. Raises BadRecipe for a name, shape or key that the format cannot hold.
    """
    _check_names([entry.key for entry in kv], "metadata key")
    if any(entry.key == "general.alignment" and entry.value != ALIGNMENT for entry in kv):
        raise BadRecipe(
            f"general.alignment: tensors are laid out at multiples of {ALIGNMENT} here", "leave the key out"
        )
    _check_names([tensor.name for tensor in tensors], "tensor")
    for tensor in tensors:
        _check_tensor(tensor)
    groups = _parts_of(tensors, max_part_bytes)
    if metadata_first and len(groups) > 1:
        groups.insert(0, [])
    count = len(groups)
    stem = name.removesuffix(".gguf")
    parts = []
    for number, group in enumerate(groups):
        part_name = name if count == 1 else split_name(stem, number, count)
        entries = list(kv) if number == 0 else []
        if count > 1:
            entries += [KV.u16(SPLIT_NO, number), KV.u16(SPLIT_COUNT, count)]
            entries.append(KV.i32(SPLIT_TENSORS, len(tensors)))
        parts.append(_plan_part(part_name, entries, group))
    return tuple(parts)


def _parts_of(tensors: Sequence[GGUFTensor], limit: int | None) -> list[list[GGUFTensor]]:
    groups: list[list[GGUFTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if limit is not None and groups[-1] and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    return groups


def _check_names(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadRecipe(f"{shown(name)}: this {what} would be written twice", "name it once")
        seen.add(name)


def _check_tensor(tensor: GGUFTensor) -> None:
    length = len(tensor.name.encode())
    if length > MAX_NAME_BYTES:
        raise BadRecipe(
            f"{shown(tensor.name)}: a tensor name of {length} bytes; GGUF holds {MAX_NAME_BYTES}",
            _SAFETENSORS,
        )
    if len(tensor.shape) > MAX_DIMS or any(dim < 1 for dim in tensor.shape):
        raise BadRecipe(
            f"{tensor.name}: shape {list(tensor.shape)}; GGUF holds 1 to {MAX_DIMS} dimensions", _SAFETENSORS
        )
    if tensor.width % tensor.type.block:
        raise BadRecipe(
            f"{tensor.name}: rows of {tensor.width} are not a multiple of {tensor.type.label}'s "
            f"{tensor.type.block}",
            "choose a type with smaller blocks for it",
        )


def _plan_part(name: str, kv: Sequence[KV], tensors: Sequence[GGUFTensor]) -> FilePlan:
    pieces = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(kv)), *map(pack_kv, kv)]
    table, end = ArrayTable(), 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        pieces += [_pack_text(tensor.name), dims, struct.pack("<IQ", tensor.type.number, end)]
        table.add(tensor.name, table.kind((tensor.stored.dtype, tensor.stored.shape)), end)
        end = _padded(end + tensor.nbytes)
    head = b"".join(pieces)
    head = head.ljust(_padded(len(head)), b"\0")
    table.start = len(head)
    return FilePlan(name, lambda: (head,), table, len(head) + end)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pack_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def pack_kv(entry: KV) -> bytes:
    """Packs one metadata entry. Raises BadRecipe when the value does not fit."""
    try:
        return _pack_text(entry.key) + _pack_value(entry)
    except (struct.error, OverflowError) as error:
        raise BadRecipe(
            f"{entry.key}: {shown(entry.value)} does not fit its type ({error})", "correct it in config.json"
        ) from error


def _pack_value(entry: KV) -> bytes:
    if isinstance(entry.type, KVType) and not isinstance(entry.value, tuple):
        is_text = entry.type is KVType.TEXT
        kind, value = entry.type, entry.value
        packed = _pack_text(str(value)) if is_text else struct.pack(f"<{kind.format}", value)
        return struct.pack("<I", kind.number) + packed
    assert isinstance(entry.type, ArrayOf) and isinstance(entry.value, tuple)
    item = entry.type.item
    head = struct.pack("<IIQ", ARRAY_NUMBER, item.number, len(entry.value))
    if item is KVType.TEXT:
        return b"".join(chain([head], (_pack_text(str(value)) for value in entry.value)))
    return head + struct.pack(f"<{len(entry.value)}{item.format}", *entry.value)


def check_target(path: Path, *, overwrite: bool = False, sources: Iterable[Path] = ()) -> None:
    """Raises unless a file may be written under this name.

    OutputExists when the name is taken, by a file only without `overwrite`; BadRecipe when it is that of a
    source.
    """
    if any(path.resolve() == source.resolve() for source in sources):
        raise BadRecipe(f"{path}: is the source", "choose another output")
    if path.is_dir():
        raise OutputExists(f"{path}: is a folder", "choose another output")
    if path.exists() and not overwrite:
        raise OutputExists(
            f"{path}: already exists ({amount(path.stat().st_size)})",
            TAKEN,
        )


class GGUFSink(FileSink):
    """GGUF files being written next to their final names: a `Sink` whose rows are bytes of blocks.

    Files carry the suffix `.partial` until `publish` renames them, the first part last, so that a checkpoint
    under its final name is complete; between `commit` and `publish` they can be verified. A second run with
    the same output raises QConvertError while the first is alive. Raises OutputExists when a final name is
    taken, unless `overwrite`; parts of a different split have other names, and stay. `goes_on` says whether
    to go on with the partial files that an earlier run left (it may raise, which leaves them as they are);
    otherwise they are emptied. `resumed` says which it was; `sparse` as in `FileSink`.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[FilePlan],
        *,
        overwrite: bool = False,
        goes_on: Callable[[], bool] = lambda: False,
        sparse: bool = False,
    ) -> None:
        self._overwrite = overwrite
        self.resumed = False
        self.final = tuple(folder / file.name for file in files)
        self.partial = tuple(map(partial_file, self.final))
        settle(self.final)
        for path in self.final:
            check_target(path, overwrite=overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        self._locks: dict[Path, int] = {}
        kept = [path for path in self.partial if path.exists()]
        try:
            for path in self.partial:
                self._locks[path] = claim(path)
            self.resumed = goes_on()
            kept = kept if self.resumed else []
            for path, lock in () if self.resumed else self._locks.items():
                empty(lock, path)
            partial = [replace(file, name=path.name) for file, path in zip(files, self.partial, strict=True)]
            super().__init__(folder, partial, claimed=True, resumed=self.resumed, sparse=sparse)
        except BaseException:
            self._release(keep=kept)
            raise

    def publish(self) -> None:
        """Renames the committed files to their final names.

        OutputExists if another process took one meanwhile, unless `overwrite`; QConvertError if the system
        refuses one; either takes back what it has named. Of several parts the old first one is removed before
        any is replaced: a kill in between leaves no mixture of two models. A run after a kill goes on.
        """
        announce(self.final)
        if self._overwrite and len(self.final) > 1 and self.final[0].exists():
            self.final[0].unlink()
            sync(self.final[0].parent)
        named: list[Path] = []
        try:
            for partial, final in reversed(tuple(zip(self.partial, self.final, strict=True))):
                partial.replace(final) if self._overwrite else name_new(partial, final)
                named.append(final)
            sync(self.final[0].parent)
        except (OSError, QConvertError) as error:
            for final in named:
                final.rename(partial_file(final))
            conclude(self.final)
            if isinstance(error, QConvertError):
                raise
            unnamed = self.final[-1 - len(named)]
            if isinstance(error, FileExistsError):
                check_target(unnamed)
            raise refused(f"{unnamed}: cannot be named", error) from error
        conclude(self.final)
        self._release()

    def abort(self) -> None:
        """Removes the partial files, if they still exist."""
        super().abort()
        self._release()

    def leave(self) -> None:
        """Closes the partial files, and leaves them to a later run."""
        self.suspend()
        self._release(keep=self.partial)

    def _release(self, keep: Collection[Path] = ()) -> None:
        """Releases the locks on the names and removes what is left under them, but what is to be kept."""
        for path, lock in self._locks.items():
            if path not in keep and path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                with suppress(OSError):  # of a disk that fails
                    path.unlink()
            os.close(lock)
        self._locks.clear()
