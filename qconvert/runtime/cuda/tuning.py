"""Chooses how a product is spread over a GPU: rows of the weight per program, warps, stages, splits.

Nothing in this table has been timed. Every number is predicted: from machine code compiled for an
H100 or H200 (sm_90; registers, shared memory, instructions), and from their 132 multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.runtime.cuda.tiles import TILE

FEW_ROWS = 16
"""The most rows of x that a product with any weight takes: what is built for is 64 columns of the right
operand, and a row takes as many as a tile has groups, at most 4."""
WIDEST = 64
"""The most columns of the right operand (rows of x times groups of a tile) that a kernel is built for.
The scale after the product costs as many operations as it has columns: near 64 it stops paying, and
dequantizing the weight for a plain product is as good."""
MULTIPROCESSORS = 132
FILLING = 3
"""Steps' time that a program takes to begin and to end: until the first of its tiles in flight is there."""
MOST_SPLITS = 8
"""Every split is another float32 result that the next kernel reads, on few multiprocessors."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is compiled, and what follows from it.

    Rows of the weight and columns of the right operand per program, warps, tiles in flight; the programs
    a multiprocessor holds at once, by its 65536 registers and 227 KB of shared memory.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    resident: int


# Beside each: instructions per weight, registers and shared memory as triton 3.7.1 compiles it for sm_90
# with symmetric groups of 128. The narrowest are 16 wide because 8 does not leave the weight in registers
# on triton 3.6 and 3.7. Rows per program: 128 share the reading of x and the loop's own instructions; two
# products of a byte would take 204 registers for them, so an int8 program has 64.
CONFIGS: dict[tuple[str, int], Config] = {
    ("int4-mma", 16): Config(128, 16, warps=4, stages=4, resident=3),  # 2.05, 167, 42 KB
    ("int4-mma", 32): Config(128, 32, warps=4, stages=4, resident=2),  # 2.34, 167, 58 KB
    ("int4-mma", 64): Config(128, 64, warps=8, stages=3, resident=1),  # 3.73, 122, 67 KB
    ("int8-mma", 16): Config(64, 16, warps=4, stages=4, resident=4),  # 3.11, 128, 41 KB
    ("int8-mma", 32): Config(64, 32, warps=4, stages=4, resident=3),  # 3.23, 127, 58 KB
    ("int8-mma", 64): Config(64, 64, warps=4, stages=3, resident=2),  # 3.73, 183, 66 KB
    ("dense", 16): Config(128, 16, warps=4, stages=4, resident=3),  # 1.5, 48, 74 KB
    ("dense", 32): Config(128, 32, warps=4, stages=4, resident=2),  # 1.6, 72, 82 KB
    ("dense", 64): Config(128, 64, warps=4, stages=4, resident=2),  # 1.8, 126, 98 KB
}


SPLITS: dict[tuple[str, int, int], int] = {}
"""Splits as measured on a device, by kind and shape [N, K]: none yet. What is not here is predicted."""


def config(kind: str, columns: int) -> Config:
    """The configuration for a kind of weight and a number of columns, at most WIDEST."""
    return next(CONFIGS[kind, width] for width in (16, 32, 64) if columns <= width)


def splits(kind: str, shape: tuple[int, int]) -> int:
    """In how many parts the columns of a weight [N, K] are multiplied, so that a GPU is filled.

    As measured; otherwise the least number that comes within a tenth of the shortest time, if as many
    programs run at once as there is room for and a tile always takes one step. It depends on kind and
    shape alone, for one row of x: a result never depends on what else runs.
    """
    measured = SPLITS.get((kind, *shape))
    if measured is not None:
        return measured
    narrow = CONFIGS[kind, 16]
    programs, tiles = -(-shape[0] // narrow.rows), -(-shape[1] // TILE)

    def steps(parts: int) -> int:
        rounds = -(-programs * parts // (MULTIPROCESSORS * narrow.resident))
        return rounds * (-(-tiles // parts) + FILLING)

    numbers = range(1, min(MOST_SPLITS, tiles) + 1)
    return next(parts for parts in numbers if steps(parts) <= 1.1 * min(map(steps, numbers)))
