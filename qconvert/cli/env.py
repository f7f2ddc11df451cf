"""Runs `qconvert env`: the block to paste into a bug report."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from qconvert.cli.options import available_cores, examples, json_option, quiet_option
from qconvert.core.version import __version__

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
@quiet_option("the block alone")
def command(as_json: bool, quiet: bool) -> None:
    """Print versions, processor and backends: the block to paste into a bug report."""
    found = {
        "qconvert": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(available_cores()),
        **{package: _version(package) for package in PACKAGES},
        "cuda": _cuda(),
    }
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": True, **found}))
        return
    width = max(map(len, found))
    for key, value in found.items():
        click.echo(f"{key:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    """The GPU that torch sees, or why it sees none."""
    try:
        import torch
    except ImportError as error:
        return f"no ({error})"
    if torch.version.cuda is None:
        return "no (this torch is a CPU build)"
    if not torch.cuda.is_available():
        return "no (torch finds no CUDA device)"
    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
