"""What llama.cpp's own quantizer makes of every kind of numbers, block by block beside ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qconvert.core.ggml_types import GGMLType
from qconvert.quant.ggml import decode_rows, encode_rows
from tests.support.ggml_blocks import WIDTH, f32, importances, kinds, misplaced
from tests.support.llama_quantize import quantize_as_llama_cpp

# The files whose base type, with `pure`, is a block type.
FILE_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 29,
    "IQ4_XS": 30,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
}
# llama.cpp makes their tables once in every process, IQ1_S's in 8 s, those of all four in 15 s: what it
# writes is recorded in llama_low_bits.py.
SLOW_TABLES = frozenset({"IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS"})


def file_of_kinds(path: Path) -> Path:
    """Writes a float32 GGUF that llama-quantize accepts: every kind of numbers is a layer."""
    gguf = pytest.importorskip("gguf", reason="writes the file that llama.cpp quantizes")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(len(kinds()))
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for layer, x in enumerate(kinds().values()):
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks_of_llama_cpp(name: str, source: Path, *, weighted: bool) -> dict[str, np.ndarray]:
    """Returns the bytes of rows that llama-quantize makes of a `file_of_kinds`, by the kind of numbers."""
    from gguf import GGUFReader

    names = {f"blk.{layer}.ffn_up.weight": kind for layer, kind in enumerate(kinds())}
    imatrix = dict.fromkeys(names, importances()) if weighted else None
    out = source.with_name(f"{name}.gguf")
    quantize_as_llama_cpp(source, out, FILE_TYPES[name], pure=True, imatrix=imatrix)
    tensors = {names[tensor.name]: tensor for tensor in GGUFReader(out).tensors}
    assert {tensor.tensor_type for tensor in tensors.values()} == {GGMLType[name].number}
    return {kind: tensors[kind].data for kind in kinds()}


def assert_blocks_of_llama_cpp(name: str, source: Path, *, weighted: bool) -> None:
    """Our blocks of this type are those that llama-quantize makes of a `file_of_kinds`."""
    theirs = blocks_of_llama_cpp(name, source, weighted=weighted)
    for kind, x in kinds().items():
        written = theirs[kind]
        ours = encode_rows(f32(x), name, importance_I=importances() if weighted else None)
        same_N = (ours == written).reshape(-1, GGMLType[name].block_bytes).all(axis=1)
        differing_N = misplaced(x) if name == "IQ3_S" else np.zeros(len(same_N), bool)
        assert same_N[~differing_N].all(), kind
        if differing_N.sum() > 10:  # see iq3.py: what follows the zeros is decoded as other elements
            x_NI = x.reshape(-1, 256)[differing_N]
            ours_NI, theirs_NI = (
                decode_rows(rows, name, WIDTH).reshape(-1, 256)[differing_N] for rows in (ours, written)
            )
            assert np.abs(ours_NI - x_NI).sum() < 0.3 * np.abs(theirs_NI - x_NI).sum(), kind
