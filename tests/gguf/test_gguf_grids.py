"""Blocks of GGUF files as the grids that they are: the gguf package's numbers, and codes carried away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import GgmlBlocks
from qconvert.core.ggml_types import GRIDS, GGMLType
from qconvert.core.values import DenseRows, GgmlRows
from qconvert.quant.dequantize import numbers
from qconvert.quant.ggml.encode import encode_rows
from qconvert.quant.ggml.to_codes import grid_of_blocks
from tests.layouts.test_loads_elsewhere import decoded, loaded, logits
from tests.support.commands import made, qconvert
from tests.support.gguf_models import qwen2_tokenizer
from tests.support.models import stored, tiny

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny(
        tmp_path_factory.mktemp("model") / "m", "llama", tied=False, intermediate_size=512, vocab_size=512
    )
    qwen2_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def written(model: Path, out: Path, type_: str) -> Path:
    return made("to-gguf", model, "--type", type_, "--pure", "-o", out)


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_of_blocks_stands_for_their_numbers(name: str) -> None:
    """Multiplied out in float32, whatever the type that scales are stored in here."""
    random = np.random.default_rng(0)
    encoding = GGMLType[name].encoding
    assert isinstance(encoding, GgmlBlocks)
    if name != "NVFP4":
        rows = random.standard_t(3, (5, 512)).astype(np.float32)
        blocks = encode_rows(DenseRows(rows, DType.F32), name)
    else:  # scales of any size that are no NaN: four, then codes
        blocks = random.integers(0, 0x7F, (5, encoding.row_bytes(512)), np.uint8)
    made_ = grid_of_blocks(GgmlRows(blocks, encoding))
    assert made_.encoding == GRIDS[name]
    theirs = quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, name))
    ours = numbers(made_, DType.F32).rows_RI
    if name in ("Q4_1", "Q5_1"):  # a grid of mins is rounded as MLX rounds it, to the type of the mins
        np.testing.assert_allclose(ours, theirs, atol=0.01)
    else:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("type_", "layout"),
    [("q4_0", "gptq"), ("q4_0", "awq"), ("q8_0", "gptq_v2"), ("q4_k", "mlx"), ("q6_k", "compressed-tensors")],
)
def test_codes_leave_a_gguf_file_exactly(model: Path, tmp_path: Path, type_: str, layout: str) -> None:
    file = written(model, tmp_path / "m.gguf", {"q4_k": "q4_k_s"}.get(type_, type_))
    out = made("convert", file, "--to", layout, "-o", tmp_path / "out")
    manifest = json.loads((out / "qconvert.json").read_text())
    found = {name: entry["certificate"]["kind"] for name, entry in manifest["tensors"].items()}
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name, kind in found.items() if kind != "exact"} <= tables
    np.testing.assert_array_equal(decoded(out, DOWN, DType.F32), decoded(file, DOWN, DType.F32))


def test_transformers_runs_what_came_out_of_a_gguf_file(model: Path, tmp_path: Path) -> None:
    file = written(model, tmp_path / "m.gguf", "q8_0")
    out = made("convert", file, "--to", "compressed-tensors", "-o", tmp_path / "out")
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    assert (logits(loaded(out)) - logits(loaded(plain))).abs().max() < 2e-3
    assert torch.isfinite(logits(loaded(plain))).all()


def test_there_and_back_is_the_same_file(model: Path, tmp_path: Path) -> None:
    source = made("quantize", model, "--scheme", "int4-g32", "--dtype", "f16", "-o", tmp_path / "int4")
    file = made("convert", source, "--to", "gguf", "-o", tmp_path / "m.gguf")
    back = made("convert", file, "--to", "compressed-tensors", "-o", tmp_path / "back")
    ours, theirs = stored(back), stored(source)
    weights = [name for name in theirs if "weight_packed" in name or "weight_scale" in name]
    assert len(weights) == 28 and all(ours[name] == theirs[name] for name in weights)


def test_blocks_that_are_no_grid_are_requantized_only_when_asked(model: Path, tmp_path: Path) -> None:
    file = written(model, tmp_path / "m.gguf", "iq4_nl")
    asked = ("convert", file, "--to", "gptq", "-o", tmp_path / "out")
    ran = qconvert(*asked)
    assert ran.code == 1 and "blocks have no counterpart in other formats" in ran.err
    assert qconvert(*asked, "--allow-requantize", "-q").code == 0
    encodings = {tensor.encoding.label for tensor in open_checkpoint(tmp_path / "out").tensors.values()}
    assert "int4-g128" in encodings


def test_scales_that_are_not_finite_are_told(model: Path, tmp_path: Path) -> None:
    file = written(model, tmp_path / "m.gguf", "q8_0")
    with open_checkpoint(file).files.file as opened:  # type: ignore[union-attr]
        offset = opened.source_offset("blk.0.ffn_down.weight")[1]
    data = bytearray(file.read_bytes())
    data[offset : offset + 2] = b"\x00\x7c"  # the first scale: infinity
    file.write_bytes(data)
    ran = qconvert("convert", file, "--to", "gptq", "-o", tmp_path / "out")
    assert ran.code == 1 and "NaN or Inf in the scales of row 0" in ran.err


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose q, k, v have two types, as those of a Q4_K_M."""
    out = tmp_path_factory.mktemp("mixed") / "m.gguf"
    return made("to-gguf", model, "--type", "q4_k_s", "--pure", "--tensor-type", "attn_v=q6_k", "-o", out)


def test_loaders_are_told_of_stacked_linears_as_check_tells(mixed: Path, tmp_path: Path) -> None:
    ran = qconvert(
        "convert", mixed, "--to", "compressed-tensors", "--allow-requantize", "-o", tmp_path / "out"
    )
    told = [line.split()[2] for line in ran.err.splitlines() if line.strip().startswith("vLLM")]
    assert told == ["no", "no"] and "SGLang 0.5  no" in ran.err
    checked = qconvert("check", tmp_path / "out", "--for", "vllm")
    assert checked.code == 3 and "different forms (int4-asym-g32, int6-g16)" in checked.out


@pytest.mark.parametrize(("scheme", "kept"), [("int4-g128", 0), ("int4-asym-g32", 12), ("fp8-channel", 0)])
def test_all_linears_of_a_gguf_file_get_the_scheme(
    mixed: Path, tmp_path: Path, scheme: str, kept: int
) -> None:
    out = tmp_path / "out"
    made("convert", mixed, "--to", "compressed-tensors", "--scheme", scheme, "--allow-requantize", "-o", out)
    tensors = json.loads((out / "qconvert.json").read_text())["tensors"].items()
    linears = {name: entry for name, entry in tensors if "_proj" in name}
    assert {entry["form"] for entry in linears.values()} == {scheme.replace("fp8", "e4m3")}
    kinds = [entry["certificate"]["kind"] for entry in linears.values()]
    assert kinds.count("requantized") == 14 - kept and kinds.count("measured") == kept
    assert qconvert("check", out, "--for", "vllm").code == 0


def test_blocks_that_mlx_lacks_are_counted_and_the_embedding_keeps_its_codes(
    mixed: Path, tmp_path: Path
) -> None:
    ran = qconvert("convert", mixed, "--to", "mlx", "-o", tmp_path / "out")
    assert ran.code == 1 and "in the file it is Q6_K, as 2 of 14 linears are" in ran.err
    assert "quantizes these again, as int8-g64, which" in ran.err
    out = made("convert", mixed, "--to", "mlx", "--allow-requantize", "-o", tmp_path / "out")
    forms = {name: (e["form"], e["certificate"]["kind"]) for name, e in manifest(out).items()}
    values = {forms.pop(f"model.layers.{layer}.self_attn.v_proj.weight") for layer in range(2)}
    assert values == {("min8-g64", "requantized")}
    assert {form for name, form in forms.items() if "norm" not in name} == {("min4-g32", "exact")}
    table = "model.embed_tokens.weight"
    np.testing.assert_array_equal(decoded(out, table, DType.F32), decoded(mixed, table, DType.F32))


def manifest(out: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = json.loads((out / "qconvert.json").read_text())["tensors"]
    return tensors


@pytest.mark.parametrize(
    ("flags", "form"),
    [((), "bf16"), (("--allow-requantize",), "min8-g64"), (("--scheme", "int4-g64"), "bf16")],
)
def test_an_embedding_in_blocks_that_mlx_lacks(
    model: Path, tmp_path: Path, flags: tuple[str, ...], form: str
) -> None:
    """As of every Q4_0: its linears go over as they are, its embedding is Q6_K. A scheme is for linears."""
    file = tmp_path / "m.gguf"
    made("to-gguf", model, "--type", "q4_0", "--pure", "--token-embedding-type", "q6_k", "-o", file)
    ran = qconvert("convert", file, "--to", "mlx", *flags, "-o", tmp_path / "out")
    found = manifest(tmp_path / "out")
    assert found.pop("model.embed_tokens.weight")["form"] == form
    assert {entry["form"] for name, entry in found.items() if "norm" not in name} == {"min4-g32"}
    assert ("is Q6_K in the file and bf16 here" in ran.err) == (form == "bf16")


def test_mlx_runs_an_embedding_and_a_head_from_a_gguf_file(model: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    file = tmp_path / "m.gguf"
    made("to-gguf", model, "--type", "q4_k_m", "--token-embedding-type", "q8_0", "-o", file)
    out = made("convert", file, "--to", "mlx", "--allow-requantize", "-o", tmp_path / "out")
    forms = {name: entry["form"] for name, entry in manifest(out).items()}
    assert (forms["model.embed_tokens.weight"], forms["lm_head.weight"]) == ("min8-g32", "min8-g64")
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    ids = [[1, 5, 9, 17, 33, 65]]
    mine, theirs = (np.array(load_model(folder)[0](mx.array(ids))) for folder in (out, plain))
    assert np.abs(mine - theirs).max() < 2e-3
