"""Keeps rows of numbers on disk, in a file without a name: written in any order, read in runs.

Read and written at positions, not mapped: mapped pages would count as memory. Legend: O rows of the file,
R some of them, I columns.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from qconvert.errors import QConvertError
from qconvert.formats.io.local_file import explained, octets, read_exactly, write_exactly

_NAME = "scratch rows"


@dataclass(frozen=True, slots=True)
class RowFile:
    """Rows float32 [O, I] of a file, from byte `at` on; `made_O` says which were written."""

    file: IO[bytes]
    made_O: np.ndarray
    width: int
    at: int = 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), float32 [R, I], what was not written being anything."""
        # Torch's memory begins at whole cache lines: sums of products depend on that.
        rows_RI: np.ndarray = torch.empty(stop - start, self.width).numpy()
        read_exactly(self.file.fileno(), octets(rows_RI), self.at + start * self.width * 4, _NAME)
        return rows_RI

    def write(self, numbers_R: np.ndarray, rows_RI: np.ndarray) -> None:
        """Store rows under their numbers, int64 [R]; QConvertError if the disk fails."""
        ends = np.flatnonzero(np.diff(numbers_R) != 1) + 1
        for run in np.split(np.arange(len(numbers_R)), ends):
            first = int(numbers_R[run[0]])
            rows = np.ascontiguousarray(rows_RI[run[0] : run[-1] + 1], np.float32)
            write_exactly(self.file.fileno(), octets(rows), self.at + first * self.width * 4, _NAME)
            self.made_O[first : first + len(rows)] = True

    def close(self) -> None:
        """Give the disk its space back."""
        self.file.close()


def row_file(folder: Path, rows: int, width: int) -> RowFile:
    """A file of that many rows in `folder`; QConvertError where it cannot be made."""
    return RowFile(unnamed_file(folder), np.zeros(rows, bool), width)


def unnamed_file(folder: Path) -> IO[bytes]:
    """An empty file in `folder`, gone once it is closed or forgotten; QConvertError for none."""
    with explained(f"{folder}: no scratch file can be made in it", QConvertError):
        return tempfile.TemporaryFile(buffering=0, prefix=".scratch-", dir=folder)
