"""Keeps activations of a text on disk: one slot per layer, read and written by windows.

The file is read and written at positions, not mapped: mapped pages would count as memory, and a full disk
would kill the process. It has no name, so a killed run leaves nothing behind.
Legend: S slots, W windows of the text, B of them at once, T tokens of a window, D hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qconvert.calibrate.row_file import unnamed_file
from qconvert.formats.io.local_file import octets, read_exactly, reserve, write_exactly

_NAME = "activations"


@dataclass(frozen=True, slots=True)
class ActivationFile:
    """Activations [S, W, T, D], stored as `dtype` (float32 or bfloat16) under the descriptor `fd`."""

    fd: int
    windows: int
    tokens: int
    width: int
    dtype: torch.dtype

    def read(self, slot: int, first: int, count: int) -> Tensor:
        """Windows [first, first + count) of a slot, float32 [B, T, D]."""
        return self.read_part(slot, first, 0, count * self.tokens).view(count, self.tokens, self.width)

    def read_part(self, slot: int, first: int, start: int, stop: int) -> Tensor:
        """Tokens [start, stop), counted from the first of a window, float32 [1, T, D]."""
        x_TD = torch.empty(stop - start, self.width, dtype=self.dtype)
        read_exactly(self.fd, _octets(x_TD), self._offset(slot, first, start), _NAME)
        return x_TD.float()[None]

    def write(self, slot: int, first: int, x_BTD: Tensor, start: int = 0) -> None:
        """Store windows from `first` on, there from token `start` on; QConvertError if the disk fails."""
        stored = x_BTD.detach().to("cpu", self.dtype).contiguous()
        write_exactly(self.fd, _octets(stored), self._offset(slot, first, start), _NAME)

    def slot(self, number: int) -> ActivationSlot:
        """A slot as a row of tokens."""
        return ActivationSlot(self, number)

    def _offset(self, slot: int, window: int, token: int) -> int:
        return ((slot * self.windows + window) * self.tokens + token) * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ActivationSlot:
    """A slot of a file, its tokens one after the other (`runtime.layer_passes.HiddenStates`)."""

    file: ActivationFile
    number: int

    def read(self, first: int, count: int) -> Tensor:
        """Those of `count` tokens from the `first` on, float32 [N, D]."""
        return self.file.read_part(self.number, 0, first, first + count)[0]

    def write(self, first: int, x_ND: Tensor) -> None:
        """Store those of the tokens from the `first` on."""
        self.file.write(self.number, 0, x_ND, first)


@contextmanager
def activation_file(
    folder: Path, slots: int, windows: int, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> Iterator[ActivationFile]:
    """An empty file in `folder`, which must exist, its disk space allocated at once.

    Raises QConvertError where the disk has not that much room.
    """
    with unnamed_file(folder) as file:
        reserve(file.fileno(), folder / _NAME, slots * windows * tokens * width * dtype.itemsize)
        yield ActivationFile(file.fileno(), windows, tokens, width, dtype)


def scratch_folder(out: Path) -> Path:
    """Where activations lie while `out` is made: beside it, or where TMPDIR points if that is set."""
    chosen = os.environ.get("TMPDIR")
    if chosen and Path(chosen).is_dir():
        return Path(chosen)
    return next(parent for parent in out.absolute().parents if parent.is_dir())


def _octets(x: Tensor) -> memoryview:
    return octets(x.view(torch.uint8).numpy())
