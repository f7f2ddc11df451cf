"""How a product is spread over a GPU: rows of the weight per program, warps, stages, splits.

Nothing in this table has been timed. Every number is predicted: from machine code compiled for an
H100 or H200 (sm_90; registers, shared memory, instructions), and from their 132 multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.decoder.cuda.packing import TILE

FEW_ROWS = 16
"""The most rows of x that a product with any weight takes: what is built for is 64 columns of the right
operand, and a row takes as many as a tile has groups, at most 4."""
WIDEST = 64
"""The most columns of the right operand (rows of x times groups of a tile) that a kernel is built for.
The scale after the product costs as many operations as it has columns: near 64 it stops paying, and
dequantizing the weight for a plain product is as good."""
MULTIPROCESSORS = 132
RESIDENT = 3
"""Programs of four warps that a multiprocessor holds at once: 65536 registers / (128 * 168)."""
LEAST_TILES = 4
"""Tiles that a split is worth starting a program for: as many as are in flight at once."""
MOST_SPLITS = 8
"""Every split is another float32 result that the next kernel reads."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is compiled: rows of the weight and columns of x per program, warps, stages in flight."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 4


# Instructions per weight and registers as compiled by triton 3.9 for sm_90, symmetric groups of 128.
CONFIGS: dict[tuple[str, int], Config] = {
    ("int4-mma", 16): Config(128, 16),
    ("int4-mma", 32): Config(128, 32),
    ("int4-mma", 64): Config(64, 64),
    ("int8-mma", 16): Config(64, 16),
    ("int8-mma", 32): Config(64, 32),
    ("int8-mma", 64): Config(64, 64, stages=3),
    ("dense", 16): Config(128, 16),
    ("dense", 32): Config(128, 32),
    ("dense", 64): Config(128, 64),
}


def config(kind: str, columns: int) -> Config:
    """The configuration for a kind of weight and a number of columns, at most WIDEST."""
    return next(CONFIGS[kind, width] for width in (16, 32, 64) if columns <= width)


def splits(shape: tuple[int, int]) -> int:
    """In how many parts the columns of a weight [N, K] are multiplied, so that a GPU is filled.

    Programs that fill it, over the tiles of N; at least LEAST_TILES tiles to a part. It depends on the
    shape alone: a result never depends on what else runs.
    """
    tall, wide = (-(-side // TILE) for side in shape)
    wanted = -(-MULTIPROCESSORS * RESIDENT // tall)
    return max(1, min(MOST_SPLITS, wanted, wide // LEAST_TILES))
