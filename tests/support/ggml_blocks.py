"""Numbers to encode, the same everywhere: made from SHAKE-256 by exact float32 arithmetic."""

from __future__ import annotations

import hashlib

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows

WIDTH = 512


def noise(seed: str, count: int) -> np.ndarray:
    """Roughly normal float32 numbers: sums of four bytes, of deviation about 1."""
    drawn = np.frombuffer(hashlib.shake_256(seed.encode()).digest(4 * count), np.uint8)
    return (drawn.reshape(-1, 4).sum(axis=1, dtype=np.int64) - 510).astype(np.float32) / np.float32(148)


def kinds(rows: int = 24) -> dict[str, np.ndarray]:
    """float32 [rows, 512] of every kind that an encoder may treat differently."""
    count = rows * WIDTH
    plain = noise("plain", count) * np.float32(0.02)
    octave = (np.abs(noise("octave", count)) * 4).astype(np.int32)
    holes = np.where(noise("holes", count) > 0.3, plain, np.float32(0))
    blocks = np.repeat(noise("blocks", count // 32), 32)
    signs = np.where(noise("signs", count) > 0, np.float32(0), np.float32(-0.0))
    zeros = np.where(np.repeat(noise("which", count // 128), 128) > 0, plain, signs)
    near_constant = -np.abs(blocks) * (1 + noise("near", count) * np.float32(1e-6))
    made = {
        "normal": plain,
        "heavy tails": np.ldexp(plain, octave),
        "holes": holes,
        "zeros of both signs": zeros,
        "constant blocks": blocks,
        "almost constant": near_constant,
        "ternary": np.sign(noise("ternary", count)) * (np.abs(plain) > 0.015) * np.float32(0.7),
        "tiny": np.ldexp(noise("tiny", count), np.repeat(-20 - 14 * octave[::32], 32)),
        "large": np.ldexp(noise("large", count), np.repeat(octave[::32] - 4, 32)),
        "positive": np.abs(plain),
    }
    return {name: x.astype(np.float32).reshape(rows, WIDTH) for name, x in made.items()}


def importances() -> np.ndarray:
    """Mean squared activations float32 [512]: eight octaves, some of them 0."""
    drawn = noise("importance", WIDTH)
    squares = np.ldexp(drawn * drawn, (drawn * 4).astype(np.int32)).astype(np.float32)
    squares[::37] = 0
    return squares


def bf16(x: np.ndarray) -> DenseRows:
    """Numbers cut to bfloat16."""
    return DenseRows((np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16), DType.BF16)


def f32(x: np.ndarray) -> DenseRows:
    return DenseRows(x, DType.F32)


def misplaced(x: np.ndarray) -> np.ndarray:
    """bool [blocks of 256]: 32 elements are zero and others are not, which llama.cpp misplaces in IQ3_S."""
    zero_NG = (x.reshape(-1, 8, 32) == 0).all(axis=2)
    found: np.ndarray = zero_NG.any(axis=1) & ~zero_NG.all(axis=1)
    return found
