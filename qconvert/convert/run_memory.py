"""Limits the memory of a conversion: it is refused where it needs more than the limit.

What is asked for is the resident size of the process: what it has once the plan is made, kernels that are
loaded, blocks of rows, and what is kept of every array until the output is finished.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from qconvert.calibrate.memory_limit import MemoryLimit, resident
from qconvert.convert.job import Job
from qconvert.convert.runner import BLOCK_BYTES, block_bytes, block_cost
from qconvert.formats.io.read_back import WINDOW
from qconvert.ops import Cast, CheckFinite

# What blocks of rows may take however little is left, without --max-memory.
_LEAST_BYTES = 4 * BLOCK_BYTES
# Measured: 131 MB where they come from the cache, 150 to 205 MB where they are compiled.
_KERNELS = 184_000_000
# Of every array: where it is, checksums of its rows, its hash, and its lines in header and manifest.
# Measured on 36,945 tensors: 1,300 (copied) to 1,800 (FP8).
_ARRAY_BYTES = 1_800
# Of every byte of a GGUF's header: the gguf library makes objects of a vocabulary to compare it. Measured on
# 151,936 tokens: 6.6.
_HEADER_BYTES = 7


def block_bytes_of(job: Job, memory: int | None = None) -> int:
    """The working memory of one block of a job, in bytes; or of one that had this memory."""
    memory = memory or _saved(job) or job.options.max_memory
    return block_bytes(job.source.checkpoint.layout, job.container.layout, memory)


def rows_bytes(job: Job, taken: int = 0) -> int:
    """The bytes that blocks of rows may take together, where the process has `taken` some before.

    One block is always admitted; without --max-memory, a few.
    """
    most = job.options.max_memory
    least = min(most, _LEAST_BYTES)
    if _is_held(job):
        least, taken = _least_rows(job, most), taken + _kept(job)
    return _saved(job) or max(most - taken, least)


def threads(job: Job, rows: int) -> int:
    """How many threads work on so many bytes of rows.

    Each keeps some of what it has freed, so of a memory that was asked for, no more than have work at once.
    """
    if not _is_held(job):
        return job.options.jobs
    return max(1, min(job.options.jobs, rows // max(1, _largest_block(job, block_bytes_of(job)))))


def require_memory(jobs: Sequence[Job]) -> None:
    """Raise BadRecipe where jobs of one source, run together, need more memory than was asked for.

    It is meant to be asked before kernels are loaded.
    """
    first = jobs[0]
    if not _is_held(first):
        return
    ops = (op for job in jobs for unit, _ in job.compiled.plan.kinds for op in unit.ops)
    compiles = "numba" not in sys.modules and any(not isinstance(op, (CheckFinite, Cast)) for op in ops)
    kernels = _KERNELS if compiles else 0
    rows = max(_least_rows(job, sys.maxsize) for job in jobs)
    read_back = first.options.jobs * WINDOW if first.options.verify else 0
    limit = MemoryLimit(first.options.max_memory, resident() + kernels)
    doing = "this conversion, with what sends it," if first.options.sending else "this conversion"
    limit.check(sum(map(_kept, jobs)) + max(rows, read_back), doing)


def _is_held(job: Job) -> bool:
    """Whether a memory was asked for that is held here; where codes are chosen together, `fit` holds it."""
    together = job.calibration is not None and job.calibration.traits.together
    return job.options.process_memory is not None and not together


def _saved(job: Job) -> int | None:
    """What blocks of rows take where a text is read, if it leaves them less than there is."""
    return job.calibration.savings.rows_bytes if job.calibration is not None else None


def _least_rows(job: Job, memory: int) -> int:
    """The least that a job's blocks may take in a memory: one of them, and what is fetched meanwhile."""
    block = _largest_block(job, block_bytes_of(job, memory))
    return block if job.source.location.network is None else max(2 * block, min(memory, _LEAST_BYTES))


def _largest_block(job: Job, limit: int) -> int:
    """The working memory of the largest block of a job, where `cut` makes them of so many bytes."""
    plan, layout = job.compiled.plan, job.container.layout
    units = [unit for unit, _ in plan.kinds] if layout.named_by else plan.units
    return max((block_cost(unit, layout, limit) for unit in units), default=0)


def _kept(job: Job) -> int:
    """What is kept of all arrays until the output is finished, and what sending it takes."""
    files = job.container.files(Path("output"))
    header = max(file.size - file.specs.nbytes for file in files) if job.compiled.is_gguf else 0
    arrays = sum(len(file.specs) for file in files) * _ARRAY_BYTES
    return arrays + header * _HEADER_BYTES + job.options.sending
