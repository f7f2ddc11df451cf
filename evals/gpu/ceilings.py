"""What the machine is, and what it reaches: copying, multiplying in bfloat16, launching."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from evals.gpu.clock import time_calls
from evals.gpu.job import Job
from evals.gpu.rows import Ceiling, Fact, Row
from qconvert import __version__

PACKAGES = ("torch", "triton", "transformers", "bitsandbytes", "numpy")
_LAUNCHES = 256


def measure(job: Job) -> Iterator[Row]:
    """Device and versions, then the three ceilings."""
    yield from _facts(job)
    yield _copy(job)
    yield _matmul(job)
    yield _launch(job)


def _facts(job: Job) -> Iterator[Fact]:
    if job.device.type == "cuda":
        found = torch.cuda.get_device_properties(job.device)
        yield Fact("device", found.name)
        yield Fact("capability", f"{found.major}.{found.minor}")
        yield Fact("multiprocessors", str(found.multi_processor_count))
        yield Fact("memory", f"{found.total_memory / 2**30:.0f} GiB")
        yield Fact("L2", f"{l2_bytes(job.device) / 2**20:.0f} MiB")
        yield Fact("cuda", str(torch.version.cuda))
    else:
        yield Fact("device", "no GPU: a dry run, whose figures mean nothing")
    yield Fact("python", platform.python_version())
    yield Fact("qconvert", __version__)
    for package in PACKAGES:
        yield Fact(package, installed(package) or "not installed")


def installed(package: str) -> str | None:
    """The version of a package, None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def l2_bytes(device: torch.device) -> int:
    """Size of the cache that all multiprocessors share; nothing off CUDA, where nothing is timed."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _copy(job: Job) -> Ceiling:
    """Bytes read and written per second by device-to-device copies of random data."""
    count = (1 << 14) if job.dry else (1 << 30)  # 4 GiB of float32
    source = torch.empty(count, device=job.device).uniform_()
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)] * 2, job.device)
    return Ceiling("copy", 2 * source.nbytes / timing.seconds, "bytes/s")


def _matmul(job: Job) -> Ceiling:
    """Operations per second of a square bfloat16 product. Of random data: zeros are faster."""
    side = 64 if job.dry else 8192
    a, b = (job.maker.normal(side, side) for _ in range(2))
    out = torch.empty_like(a)
    timing = time_calls([lambda: torch.mm(a, b, out=out)] * 2, job.device)
    return Ceiling("matmul", 2 * side**3 / timing.seconds, "FLOP/s")


def _launch(job: Job) -> Ceiling:
    """Seconds from one kernel of a graph to the next that waits for it: of adding 1 to one number."""
    x = torch.zeros(1, device=job.device)
    timing = time_calls([lambda: x.add_(1)] * _LAUNCHES, job.device)
    return Ceiling("launch", timing.seconds, "s")
