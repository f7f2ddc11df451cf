"""Shows rows of IQ1, IQ2 and IQ3 as points of a lattice: every number that a cell of weights can be.

A cell is 8 (IQ1, IQ2) or 4 (IQ3) consecutive weights, whose codes are chosen at once: a weight is `(number +
shift) * step`, with the numbers those of a point, of either sign (IQ2, IQ3), and the shift 1/8 or -1/8 (IQ1,
else 0). The counterpart of `point_grid` for these types; `with_lattice_codes` stores a choice beside the same
scales. The products are those of the decoders, to the bit.

Axes: R rows, I columns, G groups with a step, C cells, E eights of columns, P points, L levels, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qconvert.core.encodings import Encoding, GgmlBlocks
from qconvert.core.values import GgmlRows
from qconvert.quant.ggml.lattice_fields import (
    LATTICES,
    LatticeCodes,
    lattice_steps,
    put_lattice,
    read_lattice,
)
from qconvert.quant.ggml.lattices import lattice_numbers, nearest_points

EIGHT = 8
"""Columns whose codes are chosen at once: a cell, or two of 4 whose signs are stored together."""
_EVEN = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
_SHIFT = 0.125


class Lattice(NamedTuple):
    """The points of a type as a tree: a node is a level of one element, its path the levels before.

    Nodes are in preorder: the first child of a node is the next one. `depths_N`, `levels_N` uint8: element
    and level; `after_N` int32: the node after all below this one; `points_N` int32: the index of the point
    that a leaf is. `digits` uint8 [P * elements], flat: the levels of points; `numbers_L` float32: levels as
    numbers, rising; `starts_K` int32: the nearest point to every combination of levels, the first lowest.

    `elements` of a cell; `signed`: numbers may be negative; `even`: of each 8 an even number is; `shift`: is
    added or subtracted; `free`: which of the two, each 8 elements choose.
    """

    depths_N: np.ndarray
    levels_N: np.ndarray
    after_N: np.ndarray
    points_N: np.ndarray
    digits: np.ndarray
    numbers_L: np.ndarray
    starts_K: np.ndarray
    elements: int
    signed: bool
    even: bool
    shift: np.float32
    free: bool


@dataclass(frozen=True, slots=True)
class LatticeGrid:
    """The numbers that rows can store with the scales they have.

    `steps_RG` float32 [R, G]; column k is in group k // `size`. `fixed_RE` uint8 [R, E]: where the lattice
    has shifts that are not free, 1 where that of 8 columns is negative.
    """

    lattice: Lattice
    steps_RG: np.ndarray
    size: int
    fixed_RE: np.ndarray


def has_lattice(encoding: Encoding) -> bool:
    """Whether rows of an encoding have a `LatticeGrid`."""
    return isinstance(encoding, GgmlBlocks) and encoding.type in LATTICES


def lattice_grid(value: GgmlRows) -> LatticeGrid:
    """Returns the points of encoded rows (see `has_lattice`)."""
    name = value.encoding.type
    steps_RG = lattice_steps(name, _blocks(value)).reshape(value.rows, -1)
    size = value.width // steps_RG.shape[1]
    return LatticeGrid(lattice_of(name), steps_RG, size, lattice_codes(value).signs_NE)


def lattice_codes(value: GgmlRows) -> LatticeCodes:
    """Returns the codes of encoded rows, uint16 [R, C] and uint8 [R, E]."""
    found = read_lattice(value.encoding.type, _blocks(value))
    return LatticeCodes(*(part.reshape(value.rows, -1) for part in found))


def with_lattice_codes(value: GgmlRows, codes: LatticeCodes) -> GgmlRows:
    """Returns the rows with the same scales and other codes."""
    bytes_RB = np.array(value.bytes_RB, order="C")
    blocks_NB = bytes_RB.reshape(-1, value.encoding.block_bytes)
    split = LatticeCodes(*(part.reshape(len(blocks_NB), -1) for part in codes))
    put_lattice(value.encoding.type, blocks_NB, split)
    return replace(value, bytes_RB=bytes_RB)


def _blocks(value: GgmlRows) -> np.ndarray:
    return np.ascontiguousarray(value.bytes_RB).reshape(-1, value.encoding.block_bytes)


@lru_cache
def lattice_of(type_name: str) -> Lattice:
    """Returns the lattice of an IQ1, IQ2 or IQ3 type; its numbers are those of the gguf package."""
    points_PE = lattice_numbers(type_name)
    numbers_L, digits = np.unique(points_PE, return_inverse=True)
    digits_PE = digits.reshape(points_PE.shape).astype(np.uint8)
    ternary = type_name.startswith("IQ1")
    return Lattice(
        *_tree(digits_PE),
        digits_PE.reshape(-1),
        numbers_L,
        nearest_points(type_name),
        points_PE.shape[1],
        not ternary,
        type_name in _EVEN,
        np.float32(_SHIFT if ternary else 0),
        type_name == "IQ1_M",
    )


def _tree(digits_PE: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The nodes of points: depths, levels, the nodes after what is below each, points."""
    elements = digits_PE.shape[1]
    nodes: list[tuple[int, int, int]] = []
    path: list[int] = []
    for point in np.lexsort(digits_PE.T[::-1]):
        digits = digits_PE[point].tolist()
        shared = next((e for e, (a, b) in enumerate(zip(path, digits, strict=False)) if a != b), len(path))
        leaf = elements - 1
        nodes += [(e, digits[e], int(point) if e == leaf else -1) for e in range(shared, elements)]
        path = digits
    depths, levels, points = (np.array(column) for column in zip(*nodes, strict=True))
    after, last = np.empty(len(nodes), np.int32), np.full(elements, len(nodes))
    for node in reversed(range(len(nodes))):
        after[node] = last[: depths[node] + 1].min()
        last[depths[node]] = node
    return depths.astype(np.uint8), levels.astype(np.uint8), after, points.astype(np.int32)
