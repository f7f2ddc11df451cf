"""Measures the speed of qconvert: `python evals/speed.py COMMAND` (`--help` lists them)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `evals` is a folder of scripts, not installed

from evals.speed_convert import convert, repack
from evals.speed_decoder import decode, prefill
from evals.speed_gguf import gguf
from evals.speed_gpu import gpu
from evals.speed_ranks import ranks
from evals.speed_tensors import tensors
from evals.speed_together import together
from evals.time_left import time_left


@click.group()
def main() -> None:
    """Measure the speed of qconvert on this machine, beside peers where they are installed."""


for command in (convert, repack, gguf, decode, prefill, gpu, tensors, together, ranks, time_left):
    main.add_command(command)

if __name__ == "__main__":
    main()
