"""Measures the decoder on one NVIDIA GPU: `python evals/speed.py gpu`; `evals/results/run_gpu.sh` calls it.

Every figure goes to `gpu-DEVICE.jsonl` as it comes, so that a run that is stopped keeps what it has; a
later run of some sections replaces those. At the end the file is printed as tables, `gpu-DEVICE.md`.
The tests of the kernels run first, and nothing is timed when one fails; matmuls and those of peers are
compared with float64 in every shape, and are not timed when the error is too large.
Kernels are timed by `triton.testing.do_bench_cudagraph`, weights in rotation through three times the L2
cache. `--dry-run` goes through all sections on a CPU at tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from evals.bench import GB, MICRO, TERA, Bench, load, markdown
from evals.interpreted import hasten


def checks(bench: Bench) -> None:
    """Run the tests that are marked `gpu`; on a CPU, in triton's interpreter."""
    root = Path(__file__).resolve().parents[1]
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/runtime/test_cuda_on_device.py"]
    ran = subprocess.run(tests, cwd=root, capture_output=True, text=True, check=False)
    outcome = ran.stdout.strip().rpartition("\n")[2]
    good = ran.returncode == 0 and "passed" in outcome
    bench.add(checks="passed" if good else "FAILED", tests=outcome)
    if not good:
        raise click.ClickException(
            f"kernels are wrong on this device, nothing is timed:\n{ran.stdout[-4000:]}"
        )


def ceilings(bench: Bench) -> None:
    """The device and the versions; copying, multiplying in bfloat16, and launching in a graph."""
    import torch

    from evals.random_models import Maker

    names = ("torch", "triton", "transformers", "bitsandbytes", "qconvert")
    device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "dry run"
    bench.add(device=device, python=platform.python_version(), **{name: _version(name) for name in names})
    side, count = (64, 1 << 14) if bench.dry else (8192, 1 << 30)
    source = torch.empty(count, device=bench.device).uniform_()  # zeros are faster
    target, x_1 = torch.empty_like(source), torch.zeros(1, device=bench.device)
    a, b = (Maker(bench.device).normal(side, side) for _ in range(2))
    bench.ceilings = {
        "copy": 2 * source.nbytes / bench.seconds([lambda: target.copy_(source)]),
        "matmul": 2 * side**3 / bench.seconds([lambda: torch.mm(a, b)]),
        "launch": bench.seconds([lambda: x_1.add_(1)] * 256),
    }
    copy, matmul, launch = bench.ceilings.values()
    bench.add(copy_GBs=copy / GB, matmul_TFLOPs=matmul / TERA, launch_us=launch / MICRO)


SECTIONS = ("checks", "decode", "kernels", "crossings", "reading", "peers")


@click.command("gpu")
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), help="Some of them.")
@click.option("--minutes", type=click.FloatRange(0.1), default=9.0, show_default=True, help="At most.")
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), default=Path("evals/results"), show_default=True
)
@click.option("--dry-run", "dry", is_flag=True, help="Tiny sizes on a CPU, in triton's interpreter.")
def gpu(sections: tuple[str, ...], minutes: float, out: Path, dry: bool) -> None:
    """Check and time the decoder on an NVIDIA GPU, beside its peers."""
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not (dry or torch.cuda.is_available()):
        raise click.ClickException(
            f"torch {torch.__version__} finds no CUDA device; --dry-run goes through the motions on a CPU"
        )
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    out.mkdir(parents=True, exist_ok=True)
    name = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower())
    path, chosen = out / f"gpu-{name}.jsonl", sections or SECTIONS
    kept = [
        json.dumps(record) + "\n" for record in load(path) if record["section"] not in (*chosen, "ceilings")
    ]
    path.write_text("".join(kept), encoding="utf-8")
    from evals import gpu_sections  # after the choice of an interpreter

    if dry:
        hasten()

    bench = Bench(device, time.monotonic() + 60 * minutes, path, dry)
    try:
        for bench.section in ("ceilings", *chosen):
            measure = {"ceilings": ceilings, "checks": checks}.get(bench.section)
            (measure or getattr(gpu_sections, bench.section))(bench)
    finally:
        page = markdown(load(path))
        path.with_suffix(".md").write_text(page, encoding="utf-8")
        click.echo(page)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
