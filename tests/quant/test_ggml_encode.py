"""Encoders against bytes that ggml-quants.c wrote: recorded hashes, llama.cpp itself, a real model's file."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from qconvert.core.dtypes import DType
from qconvert.core.ggml_types import WEIGHED, WRITTEN, GGMLType
from qconvert.core.values import DenseRows
from qconvert.quant.ggml import (
    ENCODED,
    decode_rows,
    encode_rows,
    iq4,
    kquants_symmetric,
    overflowed,
)
from qconvert.quant.ggml.lattices import lattice
from tests.support.ggml_blocks import WIDTH, bf16, f32, importances, kinds, misplaced
from tests.support.llama_blocks import FILE_TYPES, SLOW_TABLES, assert_blocks_of_llama_cpp, file_of_kinds
from tests.support.llama_low_bits import BLOCKS, digest

# SHA-256 (first 16 digits) of what ggml-quants.c at llama.cpp commit 0c1e57098, compiled by gcc 12 with -O3
# for x86-64, makes of `kinds()` one after the other, without and with `importances()`. (Of IQ3_S without the
# blocks of `misplaced`.)
RECORDED = {
    "IQ1_M": ("23babeb473e5ebf5", "7757cdd2fe24111a"),
    "IQ1_S": (None, BLOCKS["IQ1_S"]),
    "IQ2_S": ("730d394c49ccbeab", BLOCKS["IQ2_S"]),
    "IQ2_XS": (None, BLOCKS["IQ2_XS"]),
    "IQ2_XXS": (None, BLOCKS["IQ2_XXS"]),
    "IQ3_S": ("f70774ac0c96da5d", "70c1ef2ef8546522"),
    "IQ3_XXS": ("35219c437f1906bb", "4044886465490e06"),
    "IQ4_NL": ("0f5cad64912eb372", "f56314fea24c2f5c"),
    "IQ4_XS": ("edf712b66f90e6ed", "c21ccf1204f20e63"),
    "MXFP4": ("f2af7b14291b41ea", "f2af7b14291b41ea"),
    "NVFP4": ("753e7c8765ff97a1", "753e7c8765ff97a1"),
    "Q1_0": ("95bd09cd87d16a22", "95bd09cd87d16a22"),
    "Q2_0": ("75384de027416b04", "75384de027416b04"),
    "Q2_K": ("c340e93cef40333e", "e741ddf48f282d4b"),
    "Q3_K": ("8b813428a4177d4f", "95af324f2a3c3836"),
    "Q4_0": ("cb338bf6316a3abb", "23f18808be7103be"),
    "Q4_1": ("cda258c60967608f", "09efc02ce80cd31e"),
    "Q4_K": ("004fb8b0c264a6b1", "835616a238280857"),
    "Q5_0": ("400ee4e9d50ba56c", "05153f6347c9e662"),
    "Q5_1": ("51769fd4712a2966", "d1c96561a7858404"),
    "Q5_K": ("78b9eb60305aee2c", "3bf18add65fc302f"),
    "Q6_K": ("83457812d62c9de8", "1445c29d763e5a89"),
    "Q8_0": ("85a29caff8d29ff3", "85a29caff8d29ff3"),
    "TQ1_0": ("b49fee6d00ad245b", "b49fee6d00ad245b"),
    "TQ2_0": ("f23ff2eaf44a1ee7", "f23ff2eaf44a1ee7"),
}


def test_every_encoder_has_a_record() -> None:
    assert set(RECORDED) == ENCODED == WRITTEN


def digest_of(name: str, importance_I: np.ndarray | None) -> str | None:
    if importance_I is None and name in WEIGHED:
        return None
    pieces = []
    for x in kinds().values():
        bytes_RB = encode_rows(f32(x), name, importance_I=importance_I)
        blocks_NB = bytes_RB.reshape(-1, GGMLType[name].block_bytes)
        pieces.append(blocks_NB[~misplaced(x)] if name == "IQ3_S" else blocks_NB)
    return digest(piece.tobytes() for piece in pieces)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_bytes(name: str) -> None:
    assert (digest_of(name, None), digest_of(name, importances())) == RECORDED[name]


# In May 2026, when the wheel's llama.cpp was written, IQ1_M was summed in another order, and Q1_0, Q2_0 and
# NVFP4 were no files. Blocks of those whose tables take it seconds are in RECORDED.
REFUSED = WEIGHED | {"IQ2_S", "IQ3_XXS"}  # without an importance matrix
COMPARED = sorted(FILE_TYPES.keys() - SLOW_TABLES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of_kinds(tmp_path_factory.mktemp("gguf") / "source.gguf")


@pytest.mark.parametrize(
    ("name", "weighted"), [(n, w) for n in COMPARED for w in (False, True) if w or n not in REFUSED]
)
def test_llama_quantize_writes_the_same_bytes(name: str, weighted: bool, source: Path) -> None:
    assert_blocks_of_llama_cpp(name, source, weighted=weighted)


def stored_weights(folder: Path) -> dict[str, np.ndarray]:
    """The bf16 weights of a one-file Qwen3 checkpoint under their GGUF names."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = {}
    for name, entry in json.loads(raw[8:start]).items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        if name == "model.embed_tokens.weight":
            gguf_name = "token_embd.weight"
        elif layer and layer[2] in names:
            gguf_name = f"blk.{layer[1]}.{names[layer[2]]}.weight"
        else:
            continue
        first, last = (start + offset for offset in entry["data_offsets"])
        # Writable, as a checkpoint is read: kernels would be compiled once more for arrays that are not.
        weights[gguf_name] = np.frombuffer(bytearray(raw[first:last]), np.uint16).reshape(entry["shape"])
    return weights


def test_a_real_model_in_every_recorded_file(assets: Path) -> None:
    """Layers 0 and 7 and the embedding, of every file that llama-quantize made, also with an imatrix."""
    from gguf import GGUFReader

    folder = assets / "fixtures" / "gguf"
    sums = {t.name: np.ravel(t.data) for t in GGUFReader(folder / "imatrix.gguf").tensors}
    weights = stored_weights(assets / "models" / "tiny-qwen3")
    compared: set[tuple[str, bool]] = set()
    for file in json.loads((folder / "golden.json").read_text())["files"].values():
        for name, tensor in file["tensors"].items():
            if tensor["type"] not in ENCODED or not name.startswith(("blk.0.", "blk.7.")):
                continue
            importance_I = None
            if "--imatrix" in file["command"]:
                importance_I = sums[f"{name}.in_sum2"] / sums[f"{name}.counts"]
            block = DenseRows(weights[name], DType.BF16)
            bytes_RB = encode_rows(block, tensor["type"], importance_I=importance_I)
            assert hashlib.sha256(bytes_RB.tobytes()).hexdigest() == tensor["sha256"], (file["command"], name)
            compared.add((tensor["type"], importance_I is not None))
    assert {name for name, _ in compared} == ENCODED - {"IQ1_S", "NVFP4"}
    lattices = {"IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    weighted = {name for name, weighted in compared if weighted}
    assert weighted >= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *lattices}


@pytest.mark.parametrize("name", ["IQ1_M", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_neighbours_of_a_lattice(name: str) -> None:
    """They are all points at the smallest distances (1 to 3 of them), by distance, then by index."""
    found = lattice(name)
    cell, levels, distances = {"IQ3_XXS": (4, 8, 2), "IQ3_S": (4, 8, 3)}.get(name, (8, 3, 1))
    distances = 3 if name == "IQ1_M" else distances
    digits_PC = np.arange(levels**cell)[:, None] // levels ** np.arange(cell) % levels
    points_GC = digits_PC[np.argsort(np.where(found.index_P < 0, 1 << 20, found.index_P))]
    points_GC = points_GC[: np.count_nonzero(found.index_P >= 0)]
    for p in np.random.default_rng(0).choice(np.flatnonzero(found.index_P < 0), 50):
        squares_G = ((points_GC - digits_PC[p]) ** 2).sum(axis=1)
        near_G = squares_G <= np.unique(squares_G)[distances - 1]
        order = np.lexsort((np.flatnonzero(near_G), squares_G[near_G]))
        odds_NCL = found.odds.reshape(-1, cell, 16)[found.runs_P1[p] : found.runs_P1[p + 1]]
        listed = odds_NCL.transpose(0, 2, 1).reshape(-1, cell)[: len(order)]
        np.testing.assert_array_equal(listed, 2 * points_GC[near_G][order] + 1)
    assert np.diff(found.runs_P1)[found.index_P >= 0].max() == 0


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "TQ1_0", "IQ3_S"])
def test_the_carrier_makes_no_difference(name: str) -> None:
    halves = kinds()["heavy tails"].astype(np.float16)
    wide = encode_rows(f32(halves.astype(np.float32)), name)
    np.testing.assert_array_equal(encode_rows(DenseRows(halves, DType.F16), name), wide)
    np.testing.assert_array_equal(encode_rows(DenseRows(halves.astype(np.float64), DType.F64), name), wide)
    block = bf16(kinds()["normal"])
    numbers = (block.rows_RI.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(encode_rows(block, name), encode_rows(f32(numbers), name))


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_rows_are_independent(name: str) -> None:
    """Cut anywhere and encoded by several threads, rows give the same bytes: also 1, and 17, at a time."""
    x = kinds(35)["normal"]
    cuts = [slice(0, 0), slice(0, 1), slice(1, 18), slice(18, 35)]
    for importance_I in (importances(), *([] if name in WEIGHED else [None])):
        encode = partial(encode_rows, type_name=name, importance_I=importance_I)
        with ThreadPoolExecutor(3) as pool:
            pieces = pool.map(lambda cut, encode=encode: encode(f32(x[cut])), cuts)
            np.testing.assert_array_equal(np.concatenate(list(pieces)), encode(f32(x)))


def test_what_does_not_fit_is_refused() -> None:
    block = f32(kinds()["normal"])
    with pytest.raises(ValueError, match="96 elements are not divisible by the block of 256"):
        encode_rows(f32(block.rows_RI[:, :96]), "Q4_K")
    with pytest.raises(ValueError, match="importance of shape"):
        encode_rows(block, "Q4_K", importance_I=importances()[:256])
    for name in WEIGHED:
        with pytest.raises(ValueError, match=f"{name} needs the importance"):
            encode_rows(block, name)


@pytest.mark.parametrize("kernel", [kquants_symmetric.encode_q6_k, iq4.encode_iq4_nl])
def test_nothing_is_fused(kernel: Any) -> None:
    """A fused multiply-add rounds once where C rounds twice. (Code from the cache shows no assembly.)"""
    fresh = njit(nogil=True, error_model="numpy")(kernel.py_func)
    fresh(np.zeros(256, np.float32), np.zeros(256, np.uint8))
    (assembly,) = fresh.inspect_asm().values()
    assert "mulps" in assembly or "fmul" in assembly
    assert not re.search(r"\bv?fn?m(add|sub|la|ls)", assembly)


@pytest.mark.parametrize(
    ("name", "weighted"), [(n, w) for n in sorted(ENCODED) for w in (False, True) if w or n not in WEIGHED]
)
def test_scales_beyond_half_precision_are_counted(name: str, weighted: bool) -> None:
    """Every block whose decoded numbers are not finite is found, and no block of a smaller one."""
    block = GGMLType[name].block
    rows = np.random.default_rng(0).standard_normal((40, WIDTH), np.float32)
    rows *= np.exp2(np.arange(40, dtype=np.float32) - 4)[:, None]  # the largest number goes up to 1e11
    for row_I in rows[:, None]:
        peak = float(np.abs(row_I).max())
        bytes_RB = encode_rows(f32(row_I), name, importance_I=importances() if weighted else None)
        with np.errstate(invalid="ignore"):
            numbers = decode_rows(bytes_RB, name, WIDTH).reshape(-1, block)
        broken = np.count_nonzero(~np.isfinite(numbers).all(axis=1))
        found = overflowed(f32(row_I), bytes_RB, name, peak)
        assert broken <= found <= 2 * broken
        assert found == overflowed(f32(row_I), bytes_RB, name, np.inf)
    assert bool(found) == (name not in ("MXFP4", "NVFP4"))


def test_blocks_of_weights_that_are_not_finite_overflow_nothing() -> None:
    rows = np.full((1, 96), 1e7, np.float32)
    rows[0, 0], rows[0, 64:] = np.nan, 1
    assert overflowed(f32(rows), encode_rows(f32(rows), "Q8_0"), "Q8_0", np.inf) == 1
