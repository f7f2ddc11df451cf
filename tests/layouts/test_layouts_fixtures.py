"""Checkpoints written by the field's own tools, decoded to the bytes that those tools decode them to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.errors import QConvertError
from qconvert.models.parameter_table import table_of_outputs
from qconvert.quant.dequantize import numbers
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.commands import made, qconvert
from tests.support.models import stored

DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}
FOLDERS = {
    "awq-w4-asym-g128": "awq (int4-asym-g128)",
    "bnb-nf4": "bitsandbytes (nf4-g64)",
    "ct-w4a16-sym-g128": "compressed-tensors (int4-g128)",
    "cut-awq-w4-sym-g128": "awq (int4-g128)",
    "cut-bnb-fp4": "bitsandbytes (fp4-g64)",
    "cut-bnb-int8": "bitsandbytes (int8-channel)",
    "cut-bnb-nf4-dq": "bitsandbytes (nf4-g64-nested)",
    "cut-ct-fp8-block": "compressed-tensors (e4m3-g128x128)",
    "cut-ct-gptq-w4a16-sym-g128": "compressed-tensors (int4-g128)",
    "cut-ct-mf-mxfp4": "compressed-tensors (e2m1-g32)",
    "cut-ct-mf-nvfp4": "compressed-tensors (e2m1-g16-divided)",
    "cut-ct-mixed-w4g128-w8ch": "compressed-tensors (int4-g128, int8-channel)",
    "cut-ct-w3a16-g32": "compressed-tensors (int3-g32)",
    "cut-ct-w4a16-asym-g128": "compressed-tensors (int4-asym-g128)",
    "cut-ct-w4a16-sym-g32": "compressed-tensors (int4-g32)",
    "cut-ct-w8a16-channel": "compressed-tensors (int8-channel)",
    "cut-ct-w8a8-int8": "compressed-tensors (int8-channel)",
    "cut-fp8-block-hand": "fp8 (e4m3-g128x128)",
    "cut-gptq-w2-sym-g32": "gptq (int2-g32)",
    "cut-gptq-w3-sym-g128": "gptq (int3-g128)",
    "cut-gptq-w4-asym-g128": "gptq (int4-asym-g128)",
    "cut-gptq-w8-sym-g128": "gptq (int8-g128)",
    "cut-gptqm-w4-asym-g128-v1": "gptq (int4-asym-g128)",
    "cut-gptqm-w4-asym-g128-v2": "gptq_v2 (int4-asym-g128)",
    "cut-gptqm-w4-sym-g128": "gptq (int4-g128)",
    "cut-gptqm-w4-sym-g128-descact": "gptq (int4-g128-actorder)",
    "cut-mlx-mixed-4-6": "mlx (min4-g64, min6-g64)",
    "cut-mlx-mxfp4": "mlx (e2m1-g32)",
    "cut-mlx-q3-g64": "mlx (min3-g64)",
    "cut-mlx-q6-g32": "mlx (min6-g32)",
    "cut-mlx-q8-g64": "mlx (min8-g64)",
    "cut-torchao-int8": "torchao (int8-channel)",
    "gptoss-mxfp4": "mxfp4 (e2m1-g32)",
    "gptq-w4-sym-g128": "gptq (int4-g128)",
    "mlx-q4-g64": "mlx (min4-g64)",
}
# AutoRound's kernel multiplies in float16; its output was recorded as float32. (Codes of up to 4 bits
# times these scales are float16 numbers anyway.)
COMPUTED_IN = {"cut-gptq-w8-sym-g128": DType.F16}
# One folder of every layout goes through the command as well, from file to file.
COMMANDS = {
    "cut-awq-w4-sym-g128": "f32",
    "cut-bnb-nf4-dq": "bf16",
    "cut-ct-mf-nvfp4": "bf16",
    "cut-fp8-block-hand": "bf16",
    "cut-gptqm-w4-sym-g128-descact": "f16",
    "cut-mlx-q3-g64": "bf16",
    "cut-torchao-int8": "bf16",
}


@pytest.fixture(scope="module")
def quantized(assets: Path) -> Path:
    return assets / "fixtures" / "quantized"


def golden(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / "golden.json").read_text())["dequantized"]
    return entries


def decoded(checkpoint: Checkpoint, name: str, dtype: DType) -> bytes:
    """A tensor's numbers, read in blocks that end within every kind of word and block."""
    tensor = checkpoint.tensors[name]
    blocks = [(row, min(row + 75, tensor.rows)) for row in range(0, tensor.rows, 75)]
    rows = [numbers(checkpoint.reader.read(tensor, *block), dtype).rows_RI for block in blocks]
    whole = np.concatenate(rows).reshape(tensor.shape)
    turns = len(tensor.shape) == 3 and name in checkpoint.architecture.stored_shapes
    return (whole.swapaxes(1, 2) if turns else whole).tobytes()


def stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """The shape in which the class computes with a stack of experts."""
    return checkpoint.architecture.stored_shapes.get(name, checkpoint.tensors[name].shape)


@pytest.mark.parametrize("name", FOLDERS)
def test_numbers_are_those_of_the_tool_that_wrote_them(quantized: Path, name: str) -> None:
    checkpoint = open_checkpoint(quantized / name)
    assert checkpoint.quantization == FOLDERS[name]
    for tensor, entry in golden(quantized / name).items():
        shape = checkpoint.tensors[tensor].shape
        assert shape == tuple(entry["shape"]) or stored_shape(checkpoint, tensor) == tuple(entry["shape"])
        dtype = DTYPES[entry["dtype"]]
        data = decoded(checkpoint, tensor, COMPUTED_IN.get(name, dtype))
        if name in COMPUTED_IN:
            data = np.frombuffer(data, np.float16).astype(np.float32).tobytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], tensor


def test_no_folder_is_left_out(quantized: Path) -> None:
    assert set(FOLDERS) == {path.parent.name for path in quantized.glob("*/golden.json")}


@pytest.mark.parametrize("name", COMMANDS)
def test_dequantize_writes_those_numbers(quantized: Path, tmp_path: Path, name: str) -> None:
    out = made("dequantize", quantized / name, "--dtype", COMMANDS[name], "-o", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert not {"quantization_config", "quantization"} & set(config)
    arrays = stored(out)
    for tensor, entry in golden(quantized / name).items():
        dtype, shape, data = arrays[tensor]
        assert (dtype.lower(), shape) == (COMMANDS[name], tuple(entry["shape"]))
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], tensor
    assert not any("scale" in array or "qweight" in array for array in arrays)


def items(assets: Path) -> dict[str, Any]:
    folder = assets / "fixtures" / "bad"
    found = json.loads((folder / "MANIFEST.json").read_text())["items"]
    return {name: item | {"folder": folder / name} for name, item in found.items() if name.startswith("q-")}


def test_claims_that_the_tensors_contradict_are_refused_by_name(assets: Path, tmp_path: Path) -> None:
    for name, item in items(assets).items():
        ran = qconvert("dequantize", item["folder"], "--dtype", "f32", "-o", tmp_path / name)
        if item["expect"] == "reject" or name == "q-gptq-and-weight":
            assert ran.code == 1, name
            assert not (tmp_path / name).exists()
            for part in item.get("must_name", ()):
                assert part in ran.err, f"{name}: {ran.err}"
        else:
            assert ran.code == 0, f"{name}: {ran.err}"


def test_hand_written_checkpoints_decode_as_their_author_says(assets: Path) -> None:
    checked = 0
    for item in items(assets).values():
        expected = item["folder"] / "expected.json"
        if not expected.is_file():
            continue
        try:
            checkpoint = open_checkpoint(item["folder"])
        except QConvertError:
            continue
        for tensor, sha256 in json.loads(expected.read_text()).items():
            if tensor != "about" and tensor in checkpoint.tensors:
                assert hashlib.sha256(decoded(checkpoint, tensor, DType.F32)).hexdigest() == sha256, tensor
                checked += 1
    assert checked >= 40


@pytest.mark.parametrize(
    "name", ["cut-gptqm-w4-sym-g128-descact", "cut-mlx-q3-g64", "cut-bnb-int8", "cut-fp8-block-hand"]
)
def test_our_decoder_computes_the_logits_of_the_field(quantized: Path, name: str) -> None:
    folder = quantized / name
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    ids = torch.tensor([json.loads((quantized / "prompt.json").read_text())["ids"]])
    logits = decoder.logits(decoder.hidden(ids % checkpoint.config["vocab_size"]))[0, -1]
    expected = load_file(folder / "golden.safetensors")["logits_float32_reference.last_token"]
    assert (logits - expected.flatten()).abs().max() < 1e-4


@pytest.mark.parametrize("name", FOLDERS)
def test_the_census_counts_the_bytes_that_are_stored(assets: Path, name: str) -> None:
    checkpoint = open_checkpoint(assets / "fixtures" / "quantized" / name)
    stored = sum(s.nbytes for s in checkpoint.files.specs.values())
    counted = table_of_outputs(checkpoint.tensors, checkpoint.architecture, checkpoint.layout.traits).nbytes
    assert abs(counted / stored - 1) < 0.02
