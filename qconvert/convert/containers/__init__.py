"""Defines what a container is: the files of an output, and how they are verified and published.

One module for each: a folder of safetensors, a GGUF file. A conversion knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qconvert.core.dtypes import Json
from qconvert.core.protocols import Layout
from qconvert.formats.io.planned_files import FilePlan, FileSink
from qconvert.formats.io.read_back import Hashes, HeaderCheck, Progress

if TYPE_CHECKING:
    import numpy as np

    from qconvert.convert.outcome import Outcome, WrittenRows
    from qconvert.convert.resume import RunJournal
    from qconvert.plan.state import Compiled


class OpenOutput(Protocol):
    """An output that is being written; it gets its name when its context ends without an error."""

    @property
    def path(self) -> Path: ...

    @property
    def sink(self) -> FileSink: ...

    def verify(
        self,
        written: Mapping[str, Sequence[WrittenRows]],
        jobs: int,
        progress: Progress,
        files: Sequence[FilePlan] | None = None,
    ) -> Hashes:
        """Re-read all files, or some, from the disk; CheckFailed names the first thing that differs.

        `progress` is told how many bytes of how many were read.
        """
        ...

    def finish(self, outcome: Outcome, hashes: Hashes) -> Json:
        """Write what goes beside the weights, and return the record of the output (`Container.complete`)."""
        ...

    def texts(self) -> Mapping[str, bytes | Path]:
        """`Container.texts`, once it is finished."""
        ...


class Container(Protocol):
    """The files of one output."""

    @property
    def layout(self) -> Layout: ...

    @property
    def constants(self) -> Mapping[str, np.ndarray]:
        """Tensors that come from no source, float32, by name."""
        ...

    def partial(self, out: Path) -> Mapping[Path, int]:
        """The weight files while they are written, and their sizes."""
        ...

    def unfinished(self, out: Path) -> tuple[Path, ...]:
        """The files, or the folder, in which all of the output lies while it is written, and its journal."""
        ...

    @property
    def bytes_needed(self) -> int:
        """Bytes of disk that the output takes, but for a few pages of text."""
        ...

    def of(self, compiled: Compiled) -> Container:
        """This container for another plan of the same output."""
        ...

    def default_out(self, suffix: str) -> Path:
        """The path of the output where none was given."""
        ...

    def files(self, out: Path) -> tuple[FilePlan, ...]:
        """The weight files of the output, to the byte."""
        ...

    def check_target(self, out: Path) -> None:
        """Raise unless the output may be written there."""
        ...

    @property
    def check_header(self) -> HeaderCheck | None:
        """What compares the header of a file that was written with its plan; None: as safetensors."""
        ...

    def complete(self, folder: Path, out: Path, outcome: Outcome, hashes: Hashes) -> Json:
        """Write what goes beside the weights of `out` into `folder`, and return the record of the output."""
        ...

    def texts(self, folder: Path, path: Path) -> Mapping[str, bytes | Path]:
        """What belongs to the output beside its weights, by name, once `folder` has all of it.

        `path` is its own, as `OpenOutput` has it.
        """
        ...

    def create(self, out: Path, journal: RunJournal) -> AbstractContextManager[OpenOutput]:
        """Open the output and its journal; an error inside leaves nothing under its name."""
        ...
