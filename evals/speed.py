"""Measures the speed of qconvert: `python evals/speed.py convert|repack|gguf|decode|prefill|gpu`."""

from __future__ import annotations

import click

from qconvert.evals.speed_convert import convert, repack
from qconvert.evals.speed_decoder import decode, prefill
from qconvert.evals.speed_gguf import gguf
from qconvert.evals.speed_gpu import gpu


@click.group()
def main() -> None:
    """Measure the speed of qconvert on this machine, beside peers where they are installed."""


for command in (convert, repack, gguf, decode, prefill, gpu):
    main.add_command(command)

if __name__ == "__main__":
    main()
