"""The bit stream of codes: against compressed-tensors' own packer, and there and back for any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, is_packed, width_of_codes
from qconvert.quant.packed_codes import codes_of, from_words, words_of
from qconvert.quant.simd.packing import pack_rows, pack_stream, unpack_rows, unpack_stream
from qconvert.quant.simd.transpose import transposed

BITS = range(2, 9)


@st.composite
def codes_of_bits(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    bits = draw(st.sampled_from(BITS))
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 100)))
    return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1))), bits


@given(codes_of_bits())
def test_unpacking_undoes_packing(drawn: tuple[np.ndarray, int]) -> None:
    codes_RI, bits = drawn
    rows, width = codes_RI.shape
    words_RW = pack_stream(codes_RI, bits)
    assert words_RW.shape == (rows, -(-width * bits // 32))
    assert words_RW.dtype == np.int32
    np.testing.assert_array_equal(unpack_stream(words_RW, bits, width), codes_RI)
    words_WG = pack_rows(codes_RI, bits)
    assert words_WG.shape == (-(-rows * bits // 32), width)
    np.testing.assert_array_equal(unpack_rows(words_WG, bits, rows), codes_RI)


@given(codes_of_bits())
def test_the_stream_is_little_endian_without_gaps(drawn: tuple[np.ndarray, int]) -> None:
    codes_RI, bits = drawn
    for codes, words in zip(codes_RI.tolist(), pack_stream(codes_RI, bits), strict=True):
        stream = sum(code << bits * i for i, code in enumerate(codes))
        assert int.from_bytes(words.tobytes(), "little") == stream


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(3, 31), (33, 40), (64, 128)])
def test_bytes_of_compressed_tensors(bits: int, shape: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = np.random.default_rng(bits).integers(0, 2**bits, shape).astype(np.uint8)
    signed = torch.from_numpy((codes.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8))

    def theirs(axis: int) -> Any:
        return helpers.pack_to_int32(signed, bits, packed_dim=axis)

    np.testing.assert_array_equal(pack_stream(codes, bits), theirs(1).numpy())
    np.testing.assert_array_equal(pack_rows(codes, bits), theirs(0).numpy())
    unpacked = helpers.unpack_from_int32(torch.from_numpy(pack_stream(codes, bits)), bits, shape)
    assert torch.equal(unpacked, signed)


def test_cut_columns_and_no_rows() -> None:
    codes_RI = np.random.default_rng(0).integers(0, 16, (6, 96)).astype(np.uint8)
    np.testing.assert_array_equal(pack_stream(codes_RI[::2, 32:64], 4), pack_stream(codes_RI, 4)[::2, 4:8])
    assert pack_stream(codes_RI[:0], 5).shape == (0, 15)
    assert unpack_stream(np.zeros((0, 15), np.int32), 5, 96).shape == (0, 96)


@given(codes_of_bits())
def test_packed_codes_are_the_same_codes(drawn: tuple[np.ndarray, int]) -> None:
    codes_RI, bits = drawn
    words_RW, width = pack_stream(codes_RI, bits), codes_RI.shape[1]
    codes_RX = from_words(words_RW, bits, width)
    assert is_packed(codes_RX) == (width * bits % 32 == 0)
    assert width_of_codes(codes_RX, bits) == width
    scales_RG = np.ones((len(codes_RI), 1), np.float32)
    for stored in (codes_RX, codes_RI):
        value = AffineIntRows(stored, scales_RG, None, AffineInt(bits, None, True, DType.F32))
        assert np.array_equal(codes_of(value), codes_RI)
        assert np.array_equal(words_of(value), words_RW)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (17, 3), (16, 64), (33, 130), (5, 0)])
@pytest.mark.parametrize("carrier", ["u1", "<f2", "<i4", "<f8"])
def test_transposed(shape: tuple[int, int], carrier: str) -> None:
    array = np.arange(shape[0] * shape[1]).astype(carrier).reshape(shape)
    turned = transposed(array)
    assert turned.flags.c_contiguous and turned.dtype == array.dtype
    assert np.array_equal(turned, array.T)
