"""Power cuts: whatever part of what was not flushed has reached the disk, the journal claims nothing false.

A conversion is recorded at its system calls. A state of the disk after a cut holds all that was written to a
file before its last flush began, and any 4 KiB pages of what was written later. Such states are drawn, and
what the journal says of each is compared with what the files hold (as in ALICE, Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import qconvert as library
from qconvert.convert.job import Job
from qconvert.formats.io.journal import parse
from qconvert.formats.io.planned_files import FilePlan, FileSink
from tests.support.crashes import groups_of
from tests.support.models import tiny

STATES = 10_000
PAGE = 4096
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000, "num_hidden_layers": 2}


@dataclass
class Trace:
    """Calls in their order: `writes` (number, file, offset, bytes), `flushes` (number, file, begun at)."""

    writes: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    flushes: list[tuple[int, int, int]] = field(default_factory=list)
    calls: int = 0

    def disk(self, cut: int, rng: random.Random) -> dict[int, bytearray]:
        """What files, by their inodes, may hold after a power cut at the call of this number."""
        flushed: dict[int, int] = {}
        for number, file, begun in self.flushes:
            if number <= cut:
                flushed[file] = max(begun, flushed.get(file, 0))
        found: dict[int, bytearray] = {}
        luck = rng.random()
        for number, file, offset, data in self.writes:
            if number > cut:
                break
            raw = found.setdefault(file, bytearray())
            raw.extend(bytes(max(0, offset + len(data) - len(raw))))
            if number < flushed.get(file, 0):
                raw[offset : offset + len(data)] = data
                continue
            start = offset
            while start < offset + len(data):
                stop = min((start // PAGE + 1) * PAGE, offset + len(data))
                if rng.random() < luck:
                    raw[start:stop] = data[start - offset : stop - offset]
                start = stop
        return found


@contextmanager
def recorded() -> Iterator[Trace]:
    """Records what is written and flushed in the block, by all threads."""
    trace, lock = Trace(), threading.Lock()
    pwrite = os.pwrite

    def write(fd: int, data: Any, offset: int) -> int:
        with lock:
            done = pwrite(fd, data, offset)
            trace.calls += 1
            trace.writes.append((trace.calls, os.fstat(fd).st_ino, offset, bytes(data[:done])))
            return done

    def flushing(real: Callable[[int], None]) -> Callable[[int], None]:
        def flush(fd: int) -> None:
            begun = trace.calls + 1
            real(fd)
            with lock:
                trace.calls += 1
                trace.flushes.append((trace.calls, os.fstat(fd).st_ino, begun))

        return flush

    with (
        patch.object(os, "pwrite", write),
        patch.object(os, "fsync", flushing(os.fsync)),
        patch.object(os, "fdatasync", flushing(os.fdatasync)),
    ):
        yield trace


def job_of(source: Path, kind: str) -> Job:
    request = library.Request("to-gguf", target=library.GGUFTarget("q8_0"))
    if kind == "folder":
        request = library.Request("quantize", library.Recipe(scheme=library.parse_scheme("int4-g32")))
    options = library.RunOptions(jobs=2, max_memory=400_000)
    return library.prepare(library.open_model(str(source)), request, options)


def false_claims(trace: Trace, files: dict[int, FilePlan], states: int) -> tuple[int, int]:
    """In how many states a journal says something false, and how many records there were in all."""
    rng, wrong, records = random.Random(7), 0, 0
    journal = next(file for _, file, _, data in trace.writes if b'["h",' in data[:20])
    homes = {name: (inode, plan) for inode, plan in files.items() for name in plan.specs}
    for _ in range(states):
        disk = trace.disk(rng.randrange(trace.calls + 1), rng)
        found = parse(bytes(disk.get(journal, b"")))
        claims = (
            [part for record in found.records if record[0] == "b" for part in record[-1]] if found else []
        )
        records += len(claims)
        wrong += not all(_holds(part, disk, *homes[part[0]]) for part in claims)
    return wrong, records


def _holds(part: list[Any], disk: dict[int, bytearray], inode: int, plan: FilePlan) -> bool:
    name, start, rows, width, crc, column = part
    spec = plan.specs[name]
    assert column == 0 and width == spec.width
    stride = spec.width * spec.dtype.nbytes
    begin = plan.offsets[name] + start * stride
    return zlib.crc32(memoryview(disk[inode])[begin : begin + rows * stride]) == crc


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_after_a_power_cut_the_journal_claims_nothing_false(kind: str, tmp_path: Path) -> None:
    source, name = tiny(tmp_path / "m", "qwen3", **SIZES), "m.gguf" if kind == "gguf" else "out"
    job = job_of(source, kind)
    plans = job.container.files(tmp_path / name)
    found = {}
    for honest in (True, False):
        out = tmp_path / str(honest) / name
        out.parent.mkdir()
        with groups_of(20_000), recorded() as trace:
            if honest:
                library.execute(job, out)
            else:  # records before their data: the order that must not be
                with patch.object(FileSink, "flush", lambda self: None):
                    library.execute(job, out)
        inside = out if kind == "folder" else out.parent
        files = {(inside / plan.name).stat().st_ino: plan for plan in plans}
        found[honest] = false_claims(trace, files, STATES if honest else 100)
    wrong, records = found[True]
    assert wrong == 0 and records > STATES
    assert found[False][0] > 10  # so that this test can see it
