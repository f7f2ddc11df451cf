"""Zeros for tensor parallelism: the same function, the same bytes inside, whole groups on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, Unquantized
from qconvert.core.tensor_parallel import whole_unit
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, Value
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.models import Architecture
from qconvert.plan.passes.tensor_parallel_padding import growths
from qconvert.quant.codebook import TABLES
from qconvert.quant.dequantize import numbers
from qconvert.quant.zero_padding import pad_columns, zero_rows
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.commands import made, qconvert
from tests.support.family_models import ALONE, ROWS
from tests.support.models import tiny

IDS = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(0))
DOWN = "model.layers.1.mlp.down_proj.weight"


def logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    return decoder.logits(decoder.hidden(IDS))


def theirs(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def assert_same_function(padded: Path, before: Path) -> None:
    assert logits(before).abs().max() > 0.1
    assert (logits(padded) - logits(before)).abs().max() < 1e-5


def config_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


def value_of(encoding: Encoding, random: np.random.Generator, rows: int, width: int) -> Value:
    """Random rows of a form."""
    if isinstance(encoding, Unquantized):
        return DenseRows(random.standard_normal((rows, width), np.float32), encoding.dtype)
    assert isinstance(encoding, AffineInt | AffineMin | Codebook)
    groups = encoding.groups(width)
    scales_RG = random.uniform(0.5, 2, (rows, groups)).astype(np.float32)
    codes_RI = random.integers(0, 1 << min(encoding.bits, 6), (rows, width), np.uint8)
    if isinstance(encoding, Codebook):
        return CodebookRows(codes_RI, scales_RG, encoding)
    if isinstance(encoding, AffineMin):
        return AffineMinRows(codes_RI, scales_RG, -3 * scales_RG, encoding)
    zeros_RG = None if encoding.symmetric else random.integers(0, 4, scales_RG.shape, np.uint8)
    order_I = (
        random.permutation(np.arange(width) // (encoding.group_size or width)) if encoding.act_order else None
    )
    return AffineIntRows(codes_RI, scales_RG, zeros_RG, encoding, order_I)


FORMS: list[Encoding] = [
    Unquantized(DType.F32),
    AffineInt(4, 32, True, DType.F32),
    AffineInt(3, 32, False, DType.F32),
    AffineInt(4, 32, False, DType.F32, act_order=True),
    AffineInt(8, None, True, DType.F32),
    AffineMin(4, 32, DType.F32),
    *(Codebook(table, 32, DType.F32, DType.F32) for table in TABLES),
    Codebook("e4m3", 48, DType.F32, DType.F32, group_rows=3),
]


@pytest.mark.parametrize("encoding", FORMS, ids=lambda encoding: encoding.label)
@given(seed=st.integers(0, 99), rows=st.integers(1, 5), more=st.integers(0, 3))
def test_what_is_added_decodes_to_zeros_and_what_was_there_stays(
    encoding: Encoding, seed: int, rows: int, more: int
) -> None:
    before = value_of(encoding, np.random.default_rng(seed), rows, 96)
    width = 96 + 32 * more
    after = pad_columns(before, width)
    decoded = numbers(after, DType.F32).rows_RI
    np.testing.assert_array_equal(decoded[:, :96], numbers(before, DType.F32).rows_RI)
    assert decoded.shape == (rows, width) and not decoded[:, 96:].any()
    for array, inside in zip(after.arrays, before.arrays, strict=True):  # unpad(pad(x)) is a slice
        np.testing.assert_array_equal(array[:, : inside.shape[1]], inside)
    last = before.with_arrays(tuple(array[-1:] for array in before.arrays))
    blank = zero_rows(last, 1 + more)
    assert blank.rows == 1 + more and not numbers(blank, DType.F32).rows_RI.any()


@pytest.mark.parametrize(
    ("encodings", "ranks", "layout", "after"),
    [
        (Unquantized(DType.BF16), 5, "compressed-tensors", 385),
        (AffineInt(4, 128, True, DType.F16), 2, "compressed-tensors", 512),
        (AffineInt(4, 128, True, DType.F16), 3, "compressed-tensors", 384),
        (AffineInt(4, 32, True, DType.F16), 8, "gptq", 512),
        (AffineInt(4, None, True, DType.F16), 5, "awq", 400),
        (Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128), 4, "fp8", 512),
    ],
)
def test_the_smallest_size_of_which_every_rank_holds_whole_groups(
    encodings: Encoding, ranks: int, layout: str, after: int
) -> None:
    from tests.support.models import tiny_config

    architecture = Architecture.of(tiny_config("qwen2"))
    by_name = dict.fromkeys(architecture.parameters, encodings)
    (growth,) = growths(by_name, architecture, ranks, layout)
    assert (growth.before, growth.after) == (384, after)
    for split in ("rows", "columns"):
        assert after % (ranks * whole_unit(encodings, split, registry.traits_of(layout))) == 0


def test_sizes_that_no_config_key_holds_are_refused() -> None:
    architecture = Architecture.of(ALONE["openelm"][0])
    with pytest.raises(BadRecipe, match="not one number that could grow"):
        growths(
            dict.fromkeys(architecture.parameters, Unquantized(DType.BF16)),
            architecture,
            4,
            "compressed-tensors",
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_transformers_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", family, biases=True, dtype="f32", intermediate_size=300)
    padded = made("convert", model, "--to", "f32", "--pad-to-tp", 7, "-o", tmp_path / "p")
    assert config_of(padded)["intermediate_size"] == 301
    assert_same_function(padded, model)
    assert (theirs(padded) - theirs(model)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("layout", "scheme", "ranks", "size"),
    [
        ("compressed-tensors", "int4-g128", 8, 1024),
        ("compressed-tensors", "int3-asym-g32", 8, 512),
        ("gptq", "int4-g128", 8, 1024),
        ("gptq_v2", "int4-asym-g64", 8, 512),
        ("awq", "int4-asym-g64", 8, 512),
        ("mlx", "int4-g64", 8, 512),
        ("int-quantized", "int8-channel", 5, 385),
    ],
)
def test_quantized_weights_are_padded_by_whole_groups(
    layout: str, scheme: str, ranks: int, size: int, tmp_path: Path
) -> None:
    model = tiny(tmp_path / "m", "qwen3", dtype="f16")
    before = made("convert", model, "--to", layout, "--scheme", scheme, "-o", tmp_path / "q")
    padded = made("convert", before, "--to", layout, "--pad-to-tp", ranks, "-o", tmp_path / "p")
    assert_same_function(padded, before)
    assert config_of(padded)["intermediate_size"] == size
    manifest = json.loads((padded / "qconvert.json").read_text())
    assert {entry["certificate"]["kind"] for entry in manifest["tensors"].values()} == {"exact"}
    assert manifest["tensors"][DOWN]["zeros_added"] == {"rows": 0, "columns": size - 384}
    assert any(f"384 -> {size}" in text for text in manifest["warnings"])


def test_a_size_that_no_group_divides_is_padded_before_it_is_quantized(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen2", intermediate_size=300)
    asked = ("quantize", model, "--bits", 4, "-o", tmp_path / "q")
    assert qconvert(*asked).code == 1
    out = made(*asked, "--pad-to-tp", 2)
    assert config_of(out)["intermediate_size"] == 512
    assert qconvert("check", out, "--for", "vllm", "--tp", 2).code == 0
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "d")
    assert_same_function(plain, out)


def test_fused_linears_and_stacks_are_filled_up_inside(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen3", dtype="f32", intermediate_size=300)
    fused = made("fuse", model, "-o", tmp_path / "f")
    padded = made("convert", fused, "--to", "f32", "--pad-to-tp", 8, "-o", tmp_path / "p")
    assert open_checkpoint(padded).tensors["model.layers.0.mlp.gate_up_proj.weight"].shape == (608, 256)
    assert_same_function(padded, model)


@pytest.mark.parametrize(
    "row", ["qwen2-moe", "qwen3-moe", "mixtral", "deepseek-v3", "qwen3.5-moe", "phi3", "gpt2"]
)
def test_other_families_compute_the_same(row: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 4} if row == "deepseek-v3" else {}
    config = transformers.AutoConfig.for_model(**ROWS[row].config | sizes)
    cls = getattr(transformers, ROWS[row].auto)
    model = cls.from_config(config) if ROWS[row].auto.startswith("Auto") else cls(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(tmp_path / "m")
    padded = made("convert", tmp_path / "m", "--to", "f32", "--pad-to-tp", 20, "-o", tmp_path / "p")
    after = cls.from_pretrained(padded)
    with torch.no_grad():
        before = cls.from_pretrained(tmp_path / "m")(IDS % 96).logits
        assert before.abs().max() > 0.1
        assert (after(IDS % 96).logits - before).abs().max() < 1e-4 * before.abs().max()
    assert sum(p.numel() for p in after.parameters()) > sum(p.numel() for p in model.parameters())


def test_rounding_to_another_type_verifies_and_other_numbers_do_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny(tmp_path / "m", "qwen3", dtype="f32", intermediate_size=300)
    padded = made("convert", model, "--to", "bf16", "--pad-to-tp", 8, "-o", tmp_path / "p")
    assert qconvert("verify", padded, "--against", model).code == 0
    arrays = load_file(padded / "model.safetensors")
    for row, column in ((0, 0), (0, 303)):  # a number of the source, and one of the zeros
        changed = {name: array.clone() for name, array in arrays.items()}
        changed[DOWN][row, column] += 1
        save_file(changed, padded / "model.safetensors", {"format": "pt"})
        (padded / "qconvert.json").unlink(missing_ok=True)
        ran = qconvert("verify", padded, "--against", model)
        assert ran.code == 3 and DOWN in ran.err
