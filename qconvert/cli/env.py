"""Runs `qconvert env`: the block to paste into a bug report."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from qconvert.cli.options import available_cores, examples, json_option, quiet_option
from qconvert.core.version import __version__

if TYPE_CHECKING:
    from qconvert.core.dtypes import Json

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "transformers",
    "compressed-tensors",
    "triton",
)


@click.command("env", epilog=examples("qconvert env"))
@json_option
@quiet_option("only the block")
def command(as_json: bool, quiet: bool) -> None:
    """Print versions, processor and backends: the block to paste into a bug report."""
    machine = {
        "qconvert": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _kernels(),
    }
    packages, cuda = {package: _version(package) for package in PACKAGES}, _cuda()
    if as_json:
        found = {**machine, "cores": available_cores(), "packages": packages, "cuda": cuda}
        click.echo(json.dumps({"schema": 1, "ok": True, **found}))
        return
    gpu = f"{cuda['device']}, CUDA {cuda['version']}" if cuda["available"] else f"no ({cuda['reason']})"
    installed = {name: found or "not installed" for name, found in packages.items()}
    lines = {**machine, "cores": str(available_cores()), **installed, "cuda": gpu}
    width = max(map(len, lines))
    for key, value in lines.items():
        click.echo(f"{key:<{width}}  {value}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> str:
    """What the CPU kernels are compiled for, and how they multiply; `QCONVERT_CPU` selects less."""
    from qconvert.quant.simd import processor

    return processor.in_words()


def _cuda() -> Json:
    """The GPU that torch sees, or why it sees none."""
    try:
        import torch
    except ImportError as error:
        return {"available": False, "reason": str(error)}
    if torch.version.cuda is None:
        return {"available": False, "reason": "this torch is a CPU build"}
    if not torch.cuda.is_available():
        return {"available": False, "reason": "torch finds no CUDA device"}
    return {"available": True, "device": torch.cuda.get_device_name(0), "version": torch.version.cuda}
