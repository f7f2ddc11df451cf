"""Defines a conversion: what it reads, its plan, its container, and how much it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.calibration import Calibration
from qconvert.checkpoint.hub import ResolvedModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.outcome import Outcome
from qconvert.core.dtypes import Json
from qconvert.formats.io.read_back import Hashes
from qconvert.plan.state import Compiled

if TYPE_CHECKING:
    from qconvert.convert.containers import Container


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an output is made: `shard_size` changes its bytes, too little `process_memory` may, no other does.

    `jobs` threads work on rows of at most what the process has left of `max_memory` bytes, but on 64 MiB if
    that is less; with a `process_memory` in bytes, all of the process keeps within it (None: it takes what it
    needs, if the machine has it); `shard_size` is the largest weight file in bytes (None: one
    file); `verify` re-reads what was written before it gets its name; `restart` throws away what an earlier
    run left unfinished, with which a run otherwise goes on. Where an output goes elsewhere, `drop` gives up
    the disk space of each file once it is there, and `keep` False leaves nothing under the output's own name;
    of the memory that was asked for, sending takes `sending` bytes.
    """

    jobs: int = 1
    max_memory: int = 1_000_000_000
    shard_size: int | None = None
    verify: bool = True
    overwrite: bool = False
    hash_sources: bool = False
    restart: bool = False
    process_memory: int | None = None
    drop: bool = False
    keep: bool = True
    sending: int = 0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An opened model: where it was found, and the checkpoint."""

    location: ResolvedModel
    checkpoint: Checkpoint

    def __repr__(self) -> str:
        return f"OpenedModel {self.location.name}: {self.checkpoint!r}"


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that is ready to run; with a `calibration`, codes are chosen together."""

    source: OpenedModel
    compiled: Compiled
    container: Container
    options: RunOptions
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        compiled = self.compiled
        return f"Job {compiled.request.command} {self.source.location.name}: {compiled.plan!r}"


@dataclass(frozen=True, slots=True)
class Result:
    """A finished output: where it is, its record (the manifest of a folder), what the run found out.

    `sent` says where it was sent, and how much; empty where it stays.
    `seconds` are those of the run by stage (`convert.stages`); outputs that were written together share them.
    """

    path: Path
    record: Json
    outcome: Outcome
    hashes: Hashes
    sent: Json = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        found = self.record["certificates"]
        counts = found.get("counts", found)  # of a GGUF file they are all there is
        return f"Result {self.path}: {', '.join(f'{count:,} {kind}' for kind, count in counts.items())}"
