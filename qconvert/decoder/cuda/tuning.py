"""How a product is spread over a GPU: rows of the weight per program, warps, stages, splits.

Nothing in this table has been timed. Every number is predicted: from machine code compiled for an
H100 or H200 (sm_90; registers, shared memory, instructions), and from their 132 multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.decoder.cuda.packing import TILE

FEW_ROWS, WIDE_ROWS = 16, 64
"""The most rows of x that the narrow kernel takes (the least width of a Hopper tensor core instruction
that leaves weights in registers on every triton since 3.6), and the most that any kernel takes."""
MULTIPROCESSORS = 132
RESIDENT = 3
"""Programs of four warps that a multiprocessor holds at once: 65536 registers / (128 * 168)."""
LEAST_STEPS = 4
"""Tiles that a split is worth starting a program for: as many as are in flight at once."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is compiled: rows of x per program, warps, stages of asynchronous copies."""

    rows: int
    warps: int
    stages: int


def config(kind: str, rows: int) -> Config:
    """The configuration for a kind of weight and a number of rows of x, at most WIDE_ROWS."""
    width = next(w for w in (16, 32, 64) if rows <= w)
    stages = {"int4-mma": 4, "int8-mma": 4, "dense": 3}[kind]
    return Config(width, 4, stages)


def splits(shape: tuple[int, int]) -> int:
    """In how many parts the columns of a weight [N, K] are multiplied, so that a GPU is filled.

    Programs that fill it, over the tiles of N; at least LEAST_STEPS tiles to a part; at most 8, as
    every part is another float32 result that the next kernel reads. It depends on the shape alone:
    a result never depends on what else runs.
    """
    out, width = (-(-side // TILE) for side in shape)
    wanted = -(-MULTIPROCESSORS * RESIDENT // out)
    return max(1, min(8, wanted, width // LEAST_STEPS))
