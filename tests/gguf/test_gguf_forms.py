"""Codes carried into GGML blocks: the gguf package decodes them to the numbers of the old grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, ModelTensor
from qconvert.core.values import AffineIntRows, AffineMinRows
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.plan.gguf.encodings import keeping
from qconvert.quant.dequantize import numbers
from qconvert.quant.ggml.from_codes import block_codes
from qconvert.quant.packed_codes import codes_of
from tests.support.commands import made, qconvert
from tests.support.gguf_models import (
    llama_cpp_logits,
    log_probabilities,
    qwen2_tokenizer,
    transformers_logits,
)
from tests.support.models import tiny

quants = pytest.importorskip("gguf.quants")
gguf = pytest.importorskip("gguf")

WIDTH = 256


def grid(bits: int, group: int | None, *, symmetric: bool, seed: int = 0) -> AffineIntRows:
    """Random rows of codes over scales that half precision holds."""
    random = np.random.default_rng(seed)
    encoding = AffineInt(bits, group, symmetric, DType.F32)
    codes = random.integers(0, 1 << bits, (3, WIDTH), np.uint8)
    shape = (3, encoding.groups(WIDTH))
    scales = random.normal(0, 0.02, shape).astype(np.float16).astype(np.float32)
    zeros = None if symmetric else random.integers(0, 1 << bits, shape, np.uint8)
    return AffineIntRows(codes, scales, zeros, encoding)


def decoded(rows: np.ndarray, type_name: str) -> np.ndarray:
    found: np.ndarray = quants.dequantize(rows, getattr(gguf.GGMLQuantizationType, type_name))
    return found


@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 32, 64, 128]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_codes_that_fit_are_exact(bits: int, group: int | None, symmetric: bool, seed: int) -> None:
    value = grid(bits, group, symmetric=symmetric, seed=seed)
    kept = keeping(ModelTensor("w", (3, WIDTH), value.encoding))
    assert ("Q4_0" in kept) == (symmetric and bits <= 4)
    for type_name in set(kept) - {"Q4_1"}:
        rows, steps, overflow = block_codes(value, type_name)
        assert (steps, overflow) == (0, 0)
        assert np.array_equal(decoded(rows, type_name), numbers(value, DType.F32).rows_RI)


def test_rounding_of_scales_and_mins_is_measured() -> None:
    value = grid(4, 64, symmetric=False)
    assert keeping(ModelTensor("w", (3, WIDTH), value.encoding)) == ("Q4_1", "Q8_0")
    rows, steps, _ = block_codes(value, "Q4_1")
    moved = np.abs(decoded(rows, "Q4_1") - numbers(value, DType.F32).rows_RI).reshape(3, 4, 64)
    largest = (moved.max(axis=2) / np.abs(value.scales_RG)).max()
    assert 0 < steps < 0.006 and abs(steps - largest) < 1e-4
    odd = AffineIntRows(codes_of(value), value.scales_RG * np.float32(1.0001), value.zeros_RG, value.encoding)
    rows, steps, _ = block_codes(odd, "Q8_0")
    moved = np.abs(decoded(rows, "Q8_0") - numbers(odd, DType.F32).rows_RI).reshape(3, 4, 64)
    assert 0 < steps < 0.01 and abs(steps - (moved.max(axis=2) / np.abs(odd.scales_RG)).max()) < 1e-4


def test_mins_of_a_finer_grid() -> None:
    random = np.random.default_rng(0)
    scales, mins = random.random((2, 3, 4), np.float32).astype(np.float16)
    codes = random.integers(0, 16, (3, WIDTH), np.uint8)
    value = AffineMinRows(codes, scales, mins, AffineMin(4, 64, DType.F16))
    assert keeping(ModelTensor("w", (3, WIDTH), value.encoding)) == ("Q4_1",)
    rows, steps, _ = block_codes(value, "Q4_1")
    wide = np.repeat(scales, 64, 1).astype(np.float32) * codes + np.repeat(mins, 64, 1).astype(np.float32)
    assert steps == 0 and np.allclose(decoded(rows, "Q4_1"), wide, rtol=1e-6)


def test_scales_that_half_precision_cannot_hold_are_counted() -> None:
    value = grid(4, 64, symmetric=True)
    value.scales_RG[1, 2] = 1e6
    assert block_codes(value, "Q4_0")[2] == 1


@pytest.mark.parametrize(
    ("encoding", "width"),
    [
        (AffineInt(4, 16, True, DType.F16), 256),
        (AffineInt(4, None, True, DType.F16), 80),
        (AffineInt(4, 32, True, DType.F16, act_order=True), 256),
        (AffineInt(8, 32, False, DType.F16), 256),
        (AffineMin(8, 32, DType.F16), 256),
    ],
)
def test_grids_without_a_counterpart(encoding: AffineInt | AffineMin, width: int) -> None:
    assert keeping(ModelTensor("w", (3, width), encoding)) == ()


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of int4 groups of 128 whose tokenizer llama.cpp knows."""
    folder = tmp_path_factory.mktemp("int4")
    source = tiny(folder / "m", "llama", tied=False)
    qwen2_tokenizer().save(str(source / "tokenizer.json"))
    return made("quantize", source, "--bits", 4, "-o", folder / "int4")


def test_a_quantized_checkpoint_keeps_its_codes(int4: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    found = qconvert("to-gguf", int4, "--type", "q4_0", "-o", out, "--json").json
    assert len(found["kept"]) == 14 and set(found["kept"].values()) == {"exact"}
    source, written = open_checkpoint(int4), open_checkpoint(out)
    name = "model.layers.1.self_attn.q_proj.weight"  # interleaved on the way, and back
    ours, theirs = (c.reader.read(c.tensors[name], 0, 256) for c in (written, source))
    assert np.array_equal(numbers(ours, DType.F32).rows_RI, numbers(theirs, DType.F32).rows_RI)


def test_another_type_loses_twice_and_says_so(int4: Path, tmp_path: Path) -> None:
    flags = ["--type", "q4_k_m", "-o", tmp_path / "m.gguf"]
    ran = qconvert("to-gguf", int4, *flags)
    assert ran.code == 1 and "already quantized (int4-g128); as q5_0 it loses twice" in ran.err
    assert "q4_0 would keep its codes" in ran.err
    assert qconvert("to-gguf", int4, *flags, "--allow-requantize", "-q").code == 0


def test_a_gguf_of_the_same_types_is_copied(int4: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    qconvert("to-gguf", int4, "--type", "q4_0", "-o", paths[0])
    ran = qconvert("to-gguf", paths[0], "--type", "q4_0", "-o", paths[1], "-q")
    assert ran.code == 0, ran.err
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "loses twice" in qconvert("to-gguf", paths[0], "--type", "q8_0", "-o", paths[2]).err
    assert qconvert("to-gguf", paths[0], "--type", "f32", "-o", paths[2], "-q").code == 0
    with GGUFFile(paths[0]) as a, GGUFFile(paths[2]) as b:
        assert {n: t.shape for n, t in a.tensors.items()} == {n: t.shape for n, t in b.tensors.items()}
    assert qconvert("diff", paths[0], paths[2], "--exit-code").code == 0
    ran = qconvert(
        "to-gguf", paths[0], "--type", "f16", "--pre-tokenizer", "qwen2", "-o", tmp_path / "d.gguf"
    )
    assert ran.code == 1 and "the tokenizer of a GGUF file stays as it is" in ran.err


def test_convert_to_gguf_keeps_codes_and_copies_the_rest(int4: Path, tmp_path: Path) -> None:
    """llama.cpp computes from the file what transformers computes from the same numbers."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    ran = qconvert("convert", int4, "--to", "gguf", "-o", tmp_path / "m.gguf")
    assert ran.code == 0 and ", exact, verified" in ran.err, ran.err
    with GGUFFile(tmp_path / "m.gguf") as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert set(types.values()) == {"Q4_0", "BF16", "F32"} and types["token_embd.weight"] == "BF16"
    plain = made("dequantize", int4, "--dtype", "f32", "-o", tmp_path / "plain")
    ids = [5, 17, 250, 3, 99, 120]
    ours, theirs = llama_cpp_logits(tmp_path / "m.gguf", ids, 320), transformers_logits(plain, ids)
    # llama.cpp rounds activations to 8 bits before it multiplies them with Q4_0.
    assert np.abs(log_probabilities(ours) - log_probabilities(theirs)).max() < 0.15


@pytest.mark.parametrize(("layout", "scheme"), [("compressed-tensors", "mxfp4"), ("mlx", "mxfp4")])
def test_mxfp4_is_the_same_grid_everywhere(tmp_path: Path, layout: str, scheme: str) -> None:
    source = tiny(tmp_path / "m", "llama", tied=False)
    qwen2_tokenizer().save(str(source / "tokenizer.json"))
    folder = made("convert", source, "--to", layout, "--scheme", scheme, "-o", tmp_path / "mx")
    out = tmp_path / "m.gguf"
    found = qconvert("convert", folder, "--to", "gguf", "-o", out, "--json").json
    assert found["certificates"] == {"exact": 21} and found["file_type"] == "MXFP4_MOE"
    assert set(found["kept"].values()) == {"exact"} and len(found["kept"]) == 14
    name = "model.layers.1.mlp.down_proj.weight"
    ours = open_checkpoint(folder)
    expected = numbers(ours.reader.read(ours.tensors[name], 0, 256), DType.F32).rows_RI
    with GGUFFile(out) as file:
        rows = file.read("blk.1.ffn_down.weight", 0, 256)
    np.testing.assert_array_equal(decoded(rows, "MXFP4"), expected)


def test_what_gguf_has_no_blocks_for_is_refused(tmp_path: Path) -> None:
    source = tiny(tmp_path / "m", "llama", tied=False)
    qwen2_tokenizer().save(str(source / "tokenizer.json"))
    folder = made("convert", source, "--to", "bitsandbytes", "-o", tmp_path / "nf4")
    asked = ("convert", folder, "--to", "gguf", "-o", tmp_path / "m.gguf")
    ran = qconvert(*asked)
    assert ran.code == 1 and "nf4-g64 is not a type of GGUF (14 of 16 weights are so)" in ran.err
    assert "`to-gguf --type TYPE --allow-requantize` computes the numbers" in ran.err
    ran = qconvert(*asked, "--allow-requantize")
    assert ran.code == 0 and "7 exact + 14 requantized" in ran.err, ran.err
    ran = qconvert(*asked, "--dtype", "f16", "--overwrite")
    assert ran.code == 2 and "--dtype: is not for --to gguf" in ran.err


def test_a_type_of_to_gguf_is_a_scheme(int4: Path, tmp_path: Path) -> None:
    flags = ("--allow-requantize", "-q", "-o")
    assert (
        qconvert("convert", int4, "--to", "gguf", "--scheme", "q5_k_m", *flags, tmp_path / "a.gguf").code == 0
    )
    assert qconvert("to-gguf", int4, "--type", "q5_k_m", *flags, tmp_path / "b.gguf").code == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
