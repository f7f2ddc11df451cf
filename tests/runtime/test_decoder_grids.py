"""Grids of every layout in the CPU's kernels: worth what the layout says, at about the size it stores."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from qconvert.core.ggml_types import GGMLType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.quant.codebook import wide
from qconvert.quant.ggml import encode_rows
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu import row_decoding
from qconvert.runtime.cpu.byte_dots import byte_routine
from qconvert.runtime.cpu.dots import ROUTINES
from qconvert.runtime.cpu.packed_weights import PackedGrid, pack_grid
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.device_layout import Layout, place_rows, place_weight
from qconvert.runtime.generate import decodes_weights
from qconvert.runtime.linear import Linear
from qconvert.runtime.load import load_decoder
from tests.runtime.test_decoder_cpu import BF16, FIXED_POINT, inputs, relative_error
from tests.runtime.test_decoder_linear import CPU, random_value
from tests.support.decoder_models import StateDict, tiny

ROWS = 37
# Where the half-precision numbers of a block are.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "TQ1_0": [52], "TQ2_0": [64], "Q1_0": [0], "Q2_0": [0], "MXFP4": [], "NVFP4": [],
}  # fmt: skip
# Bits per weight in memory: codes of 5 bits take 6 there, those of fewer than 4 bits take 4.
GGUF_BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 6.5, "Q5_1": 7, "Q8_0": 8.5, "Q2_K": 5.25, "Q3_K": 4.625,
    "Q4_K": 4.75, "Q5_K": 6.75, "Q6_K": 6.625, "IQ4_NL": 4.5, "IQ4_XS": 4.375, "TQ1_0": 4.0625,
    "TQ2_0": 4.0625, "Q1_0": 4.125, "Q2_0": 4.25, "MXFP4": 4.5, "NVFP4": 5,
}  # fmt: skip
CODEBOOKS = [
    Codebook("nf4", 64, DType.F32, DType.BF16),
    Codebook("nf4", 4096, DType.F32, DType.BF16),
    Codebook("fp4", 64, DType.F32, DType.F16),
    Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided"),
    Codebook("int8", None, DType.F32, DType.F16),
    Codebook("e4m3", None, DType.BF16, DType.BF16),
    Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None),
    Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128),
    Codebook("e4m3", 32, DType.F8_E8M0, DType.BF16),
    Codebook("e5m2", None, DType.F32, DType.BF16),
]
MINS = [
    AffineMin(bits, group, dtype)
    for bits, group in ((2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 64))
    for dtype in (DType.F32, DType.F16, DType.BF16)
]


def carried(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype.carrier)


def blocks(name: str, rows: int, width: int) -> GgmlRows:
    """Random blocks with half-precision numbers of weights."""
    kind, rng = GGMLType[name], np.random.default_rng(7)
    count = rows * width // kind.block
    made = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        made[:, at : at + 2] = rng.uniform(0.01, 0.1, (count, 1)).astype("<f2").view(np.uint8)
    if name == "MXFP4":
        made[:, 0] = rng.integers(115, 126, count)
    if name == "NVFP4":
        made[:, :4] = rng.integers(0, 0x60, (count, 4))
        made[0, :2] = 0x7F, 0xFF
    return GgmlRows(made.reshape(rows, -1), kind.encoding)  # type: ignore[arg-type]


def coded(encoding: Codebook, rows: int, width: int) -> CodebookRows:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 1 << encoding.bits, (rows, width), dtype=np.uint8)
    if encoding.table in ("e4m3", "e5m2"):
        codes[(codes & 0x7F) > 0x77] = 0x11  # neither NaN nor infinity
    shape = (rows, encoding.groups(width))
    if encoding.scale_dtype is DType.F8_E8M0:
        scales = rng.integers(110, 126, shape, dtype=np.uint8)
    elif encoding.scale_dtype is DType.F8_E4M3:
        scales = rng.integers(1, 0x7E, shape, dtype=np.uint8)
    else:
        scales = carried(rng.uniform(0.01, 0.1, shape), encoding.scale_dtype)
    return CodebookRows(codes, scales, encoding, 1234.5 if encoding.second == "divided" else None)


def with_mins(encoding: AffineMin, rows: int, width: int) -> AffineMinRows:
    rng, shape = np.random.default_rng(encoding.bits), (rows, encoding.groups(width))
    codes = rng.integers(0, 1 << encoding.bits, (rows, width), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, shape)
    mins = -scales * rng.uniform(0, 1 << encoding.bits, shape)
    return AffineMinRows(
        codes, carried(scales, encoding.scale_dtype), carried(mins, encoding.scale_dtype), encoding
    )


def packed(value: Value, dtype: torch.dtype = torch.float32) -> PackedGrid:
    weight = pack_grid(value, dtype)
    assert weight is not None
    return weight


CASES = [
    *((name, partial(blocks, name), kind.block) for name in HALVES for kind in (GGMLType[name],)),
    *(
        (encoding.label, partial(coded, encoding), 128 if encoding.group_size else 32)
        for encoding in CODEBOOKS
    ),
    *(
        (f"{encoding.label}-{encoding.scale_dtype.label}", partial(with_mins, encoding), encoding.group_size)
        for encoding in MINS
    ),
]


def values() -> list[Value]:
    """Every case at every width that holds whole groups and fills its blocks of 128, or does not."""
    made: list[Value] = []
    for _, make, least in CASES:
        widths = [width for width in (32, 96, 160, 256, 896, 1024) if width % least == 0]
        made += [make(ROWS, width) for width in widths if width % 64 == 0 or least == 32]
    return made


def unrounded(value: Value) -> np.ndarray:
    """What a value stands for, float64, but `code * scale + min` without MLX's roundings of weights: its
    products (`qdot` in mlx/backend/metal/kernels/quantized.h) are `scale * sum of code * x + min * sum of x`.
    """
    if not isinstance(value, AffineMinRows):
        return place_rows(value, CPU, torch.float32).rows(slice(None)).double().numpy()
    scales, mins = (
        wide(a, value.encoding.scale_dtype).astype(np.float64) for a in (value.scales_RG, value.mins_RG)
    )
    size = value.encoding.group_size
    return codes_of(value) * np.repeat(scales, size, axis=1) + np.repeat(mins, size, axis=1)


def label(value: Value) -> str:
    return f"{value.encoding.label}-{value.encoding.decoded.label}-{value.arrays[0].shape[1]}"  # type: ignore[union-attr]


@pytest.mark.parametrize("value", values(), ids=label)
def test_rows_are_the_reference_s_and_products_theirs(value: Value) -> None:
    weight, width = packed(value), place_rows(value, CPU, torch.float32).shape[1]
    for dtype in (torch.float32, BF16):
        exact, made = place_rows(value, CPU, dtype), packed(value, dtype)
        for index in (slice(None), slice(3, 8), torch.tensor([36, 0, 0])):
            assert torch.equal(made.rows(index), exact.rows(index))
    assert torch.equal(weight.part(slice(5, 20)).rows(slice(None)), weight.rows(slice(5, 20)))
    x_NI, bias_O = inputs(3, width), torch.arange(float(ROWS))
    want_NO = x_NI.double() @ torch.from_numpy(unrounded(value)).T + bias_O
    assert relative_error(multiply_few(x_NI, weight, bias_O), want_NO) < FIXED_POINT
    part_NO = multiply_few(x_NI, weight.part(slice(5, 20)), bias_O[5:20])
    assert torch.equal(part_NO, multiply_few(x_NI, weight, bias_O)[:, 5:20])


@pytest.mark.parametrize(("dtype", "rounding"), [(DType.BF16, 2.0**-8), (DType.F16, 2.0**-11)])
def test_mlx_s_products_are_within_a_rounding_of_its_decoded_numbers(dtype: DType, rounding: float) -> None:
    value = with_mins(AffineMin(4, 64, dtype), ROWS, 1024)
    x_NI = inputs(2, 1024)
    want_NO = x_NI.double() @ place_rows(value, CPU, torch.float32).rows(slice(None)).double().T
    assert relative_error(multiply_few(x_NI, packed(value)), want_NO) < rounding


def test_mlx_s_own_products_agree() -> None:
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(0)
    w_OI, x_NI = (
        rng.standard_normal((64, 512)).astype(np.float32),
        rng.standard_normal((1, 512)).astype(np.float32),
    )
    words, scales, biases = mx.quantize(mx.array(w_OI), group_size=64, bits=4)
    theirs = mx.quantized_matmul(mx.array(x_NI), words, scales, biases, group_size=64, bits=4)
    codes = (np.array(words)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(64, 512)
    encoding = AffineMin(4, 64, DType.F32)
    value = AffineMinRows(codes.astype(np.uint8), np.array(scales), np.array(biases), encoding)
    ours = multiply_few(torch.from_numpy(x_NI), packed(value))
    assert relative_error(ours, torch.from_numpy(np.array(theirs))) < FIXED_POINT


@pytest.mark.parametrize("name", list(GGUF_BITS))
def test_memory_is_near_what_is_stored(name: str) -> None:
    value = blocks(name, 64, 1024)
    weight = place_weight(value, CPU, torch.float32, Layout.AUTO)
    assert weight.nbytes * 8 / (64 * 1024) == GGUF_BITS[name]
    kind = GGMLType[name]
    if kind.bits_per_weight >= 4 and not name.startswith("Q5"):
        assert weight.nbytes <= 1.12 * value.bytes_RB.nbytes


@pytest.mark.parametrize(
    "value",
    [
        coded(CODEBOOKS[0], 8, 1024),
        coded(CODEBOOKS[4], 8, 1024),
        coded(CODEBOOKS[6], 8, 1024),
        with_mins(AffineMin(4, 64, DType.BF16), 8, 1024),
    ],
    ids=label,
)
def test_memory_of_tables_and_mins(value: Value) -> None:
    """Codes and scales as stored, but for the scales of NVFP4, which take two bytes for one."""
    bits = value.encoding.bits  # type: ignore[union-attr]
    stored = value.arrays[0].size * bits / 8 + sum(array.nbytes for array in value.arrays[1:])
    wider = value.arrays[1].nbytes if label(value).startswith("e2m1") else 0
    assert packed(value).nbytes == stored + wider


def test_packing_holds_a_bounded_part_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from qconvert.runtime.cpu import packed_weights

    value, seen = blocks("Q4_K", 64, 1024), []
    whole = packed(value)
    monkeypatch.setattr(packed_weights, "_PACKED_CODES", 5 * 1024)
    nibbles = packed_weights._pack_int4
    monkeypatch.setattr(packed_weights, "_pack_int4", lambda codes: seen.append(len(codes)) or nibbles(codes))  # type: ignore[func-returns-value]
    in_parts = packed(value)
    assert max(seen) == 5 and sum(seen) == 64
    assert torch.equal(in_parts.codes_OB, whole.codes_OB)
    assert torch.equal(in_parts.rows(slice(None)), whole.rows(slice(None)))


def test_no_two_kernels_share_a_name_by_which_stored_code_is_linked() -> None:
    bytes_ = (
        "int4_bytes_f16_32_zero",
        "int4_bytes_f16_32_mins",
        "int4_bytes_i8_32_mins",
        "int8_bytes_f16_32_middle",
    )
    routines = ROUTINES | {name: byte_routine(name) for name in bytes_}
    assert len(routines) == 15 + 4 and all(made.__qualname__ == name for name, made in routines.items())
    decoders = [made for name, made in vars(row_decoding).items() if name.startswith("_decode_")]
    assert len({made.__qualname__ for made in decoders}) == len(decoders) == 5


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("group", "width"), [(48, 96), (48, 288), (80, 320), (112, 448)])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_groups_begin_and_end_anywhere(bits: int, group: int, width: int, dtype: torch.dtype) -> None:
    for symmetric in (True, False):
        value = random_value(AffineInt(bits, group, symmetric, DType.F32), 5, width)
        exact = place_rows(value, CPU, dtype).rows(slice(None))
        assert torch.equal(packed(value, dtype).rows(slice(None)), exact)


def test_what_is_no_grid_or_does_not_fit_stays_as_it_was_read() -> None:
    nan = coded(CODEBOOKS[6], 8, 128)
    codes_of(nan)[3, 5] = 0x7F
    far = with_mins(AffineMin(8, 64, DType.F16), 8, 128)
    far.scales_RG[2, 1] = 1000
    lattice = GgmlRows(np.zeros((8, 66), np.uint8), GGMLType.IQ2_XXS.encoding)  # type: ignore[arg-type]
    plain = random_value(AffineInt(4, 32, False, DType.F32), 8, 128)
    encoding = AffineInt(4, 32, False, DType.F32, act_order=True)
    ordered = AffineIntRows(
        codes_of(plain), plain.scales_RG, plain.zeros_RG, encoding, np.arange(128, dtype=np.int32) // 32
    )
    odd = coded(Codebook("int8", None, DType.F32, DType.F16), 8, 40)
    for value in (nan, far, lattice, ordered, odd):
        assert pack_grid(value, torch.float32) is None
        assert place_weight(value, CPU, torch.float32, Layout.AUTO).kind == "encoded"


class Mixed(StateDict):
    """Q4_K weights, but Q6_K for values and what is projected down, as llama.cpp's mixtures have them."""

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        value = super().get(role, layer, kind)
        if not isinstance(value, DenseRows) or value.rows_RI.shape[1] == 1:
            return value
        name = "Q6_K" if role in ("attn.v", "mlp.down", "lm_head") else "Q4_K"
        return GgmlRows(encode_rows(value, name), GGMLType[name].encoding)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_reads_projections_of_different_forms(threads: int, use_threads: None) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    model = tiny("qwen3", **sizes)
    config, weights = DecoderConfig.from_hf(model.config.to_dict()), Mixed(model.state_dict())
    fast = load_decoder(config, weights, layout=Layout.AUTO)
    plain = load_decoder(config, weights, layout=Layout.REFERENCE)
    assert fast.step is not None and plain.step is None
    assert [len(fast.layers[0].attention.qkv), len(fast.layers[0].mlp.gate_up)] == [3, 2]  # type: ignore[union-attr]
    assert not decodes_weights(fast) and decodes_weights(plain)
    caches = fast.cache(1, 12), plain.cache(1, 12)
    torch.set_num_threads(threads)
    for token in range(12):
        ids = torch.tensor([7 * token])
        got, want = fast.decode(ids, caches[0]), plain.decode(ids, caches[1])
        assert relative_error(got, want) < 3 * FIXED_POINT


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("encoding", CODEBOOKS, ids=lambda encoding: encoding.label)
def test_linears_take_any_number_of_rows(encoding: Codebook, rows: int) -> None:
    value = coded(encoding, 70, 256)
    x_NI, bias_O = inputs(rows, 256), torch.arange(70.0)
    want = x_NI.double() @ torch.from_numpy(unrounded(value)).T + bias_O.double()
    linear = Linear(place_weight(value, CPU, torch.float32, Layout.AUTO), bias_O)
    assert relative_error(linear(x_NI), want) < FIXED_POINT
