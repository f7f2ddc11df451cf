"""Decoders against gguf's, which are written by llama.cpp's own authors, and against the encoders."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from qconvert.core.ggml_types import WEIGHED, GGMLType
from qconvert.quant.ggml import ENCODED, decode_rows, encode_rows
from tests.support.ggml_blocks import WIDTH, bf16, kinds, noise

OURS_ALONE = {"Q1_0", "Q2_0"}
BLOCK_TYPES = {kind.name for kind in GGMLType if kind.is_quantized} - {"Q8_1", "Q8_K"}


def random_blocks(kind: GGMLType, count: int) -> np.ndarray:
    """Bytes of every value, rows of 512 elements."""
    drawn = np.random.default_rng(kind.number).integers(
        0, 256, (count, WIDTH // kind.block * kind.block_bytes)
    )
    return drawn.astype(np.uint8)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("name", sorted(BLOCK_TYPES - OURS_ALONE))
def test_any_bytes_decode_to_the_same_bits(name: str) -> None:
    kind = GGMLType[name]
    rows_RB = random_blocks(kind, 200)
    ours = decode_rows(rows_RB, name, WIDTH)
    theirs = dequantize(rows_RB, GGMLQuantizationType(kind.number))
    assert ours.dtype == np.float32
    assert ours.shape == (200, WIDTH)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))
    assert np.isnan(ours[~numbers]).all()


def test_signs_and_pairs() -> None:
    """Q1_0 holds signs, lowest bit first; Q2_0 codes -1 to 2, lowest bits first. (gguf decodes neither.)"""
    half = np.float16(0.5).tobytes()
    signs = np.frombuffer(half + bytes([0b00000101]) + bytes(15), np.uint8)[None]
    numbers = decode_rows(signs, "Q1_0", 128)[0]
    np.testing.assert_array_equal(numbers[:4], [0.5, -0.5, 0.5, -0.5])
    assert (numbers[3:] == -0.5).all()
    pairs = np.frombuffer(half + bytes([0b11100100]) + bytes([0b01010101] * 15), np.uint8)[None]
    numbers = decode_rows(pairs, "Q2_0", 64)[0]
    np.testing.assert_array_equal(numbers[:4], [-0.5, 0, 0.5, 1])
    assert not numbers[4:].any()


# Relative root mean square error on normal numbers that an encoder may have at most.
ERRORS = {
    "IQ1_M": 0.6,
    "IQ1_S": 0.49,
    "IQ2_S": 0.27,
    "IQ2_XS": 0.31,
    "IQ2_XXS": 0.36,
    "IQ3_S": 0.17,
    "IQ3_XXS": 0.22,
    "NVFP4": 0.11,
    "Q1_0": 0.6,
    "Q2_0": 0.72,
    "Q8_0": 0.006,
    "Q6_K": 0.02,
    "Q5_K": 0.04,
    "Q5_1": 0.04,
    "Q5_0": 0.045,
    "Q4_K": 0.075,
    "IQ4_NL": 0.08,
    "IQ4_XS": 0.08,
    "Q4_1": 0.08,
    "Q4_0": 0.09,
    "MXFP4": 0.12,
    "Q3_K": 0.16,
    "Q2_K": 0.31,
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_encoding_loses_as_little_as_the_bits_allow(name: str) -> None:
    x = noise("normal", 64 * WIDTH).reshape(64, WIDTH) * np.float32(0.02)
    block = bf16(x)
    numbers = (block.rows_RI.astype(np.uint32) << 16).view(np.float32)
    weights_I = np.ones(WIDTH, np.float32) if name in WEIGHED else None
    back = decode_rows(encode_rows(block, name, importance_I=weights_I), name, WIDTH)
    error = np.sqrt(np.mean((back - numbers) ** 2) / np.mean(numbers**2))
    assert 0.5 * ERRORS[name] < error < ERRORS[name]


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_survive(name: str) -> None:
    x = kinds()["ternary"]
    back = decode_rows(encode_rows(bf16(x), name), name, WIDTH)
    np.testing.assert_array_equal(np.sign(back), np.sign(x))


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_zeros_stay_zeros_where_the_type_has_one(name: str) -> None:
    zeros = np.zeros((3, WIDTH), np.float32)
    blocks = encode_rows(bf16(zeros), name, importance_I=np.ones(WIDTH, np.float32))
    assert not decode_rows(blocks, name, WIDTH).any()
