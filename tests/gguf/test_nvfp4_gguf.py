"""NVFP4 as GGML blocks: codes and scales of other formats, and beside them the factor of a whole tensor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import made, qconvert
from tests.support.foreign import weights
from tests.support.gguf_models import llama_cpp_logits
from tests.support.models import stored, tiny

gguf = pytest.importorskip("gguf")
DOWN = "model.layers.1.mlp.down_proj.weight"


def coded(folder: Path, family: str, layout: str = "compressed-tensors") -> Path:
    """A model in NVFP4, with a tokenizer that llama.cpp takes: it wants at least one merge."""
    model = tiny(folder / "m", family)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": tokenizer["model"]["vocab"] | {"ab": 257}, "merges": [["a", "b"]]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made("convert", model, "--to", layout, "--scheme", "nvfp4", "-o", folder / layout)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_codes_scales_and_factor_come_back_to_the_byte(family: str, tmp_path: Path) -> None:
    source = coded(tmp_path, family)
    ran = qconvert("convert", source, "--to", "gguf", "-o", tmp_path / "x.gguf")
    assert ran.code == 0 and "14 measured (at most 2" in ran.err and "e-07 steps" in ran.err
    assert qconvert("verify", tmp_path / "x.gguf", "--against", source).code == 0
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == "NVFP4" and kinds["blk.1.ffn_down.scale"] == "F32"
    ours, theirs = weights(tmp_path / "x.gguf")[DOWN][0], weights(source)[DOWN][0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    back = made("convert", tmp_path / "x.gguf", "--to", "compressed-tensors", "-o", tmp_path / "back")
    before, after = stored(source), stored(back)
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    names = [name for name in before if name.endswith(parts)]
    assert len(names) == 42 and all(after[name] == before[name] for name in names)


def test_llama_cpp_multiplies_by_the_factor(tmp_path: Path) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    source, ids = coded(tmp_path, "qwen3"), list(range(1, 20))
    file = made("convert", source, "--to", "gguf", "-o", tmp_path / "x.gguf")
    plain = made("dequantize", source, "--dtype", "f32", "-o", tmp_path / "plain")
    dense = llama_cpp_logits(made("to-gguf", plain, "--type", "f32", "-o", tmp_path / "f32.gguf"), ids, 320)
    found = llama_cpp_logits(file, ids, 320)
    assert np.abs(dense).max() > 1
    assert np.square(found - dense).mean() < 1e-3 * np.square(dense).mean()  # 8-bit activations


def test_where_llama_cpp_does_not_multiply_the_factor_is_refused(tmp_path: Path) -> None:
    source = coded(tmp_path, "qwen2")
    asked = ("convert", source, "--to", "gguf", "-o", tmp_path / "x.gguf")
    ran = qconvert(*asked)
    assert ran.code == 1 and "llama.cpp's qwen2 is not known to multiply" in ran.err
    assert not (tmp_path / "x.gguf").exists()
    assert "14 requantized" in qconvert(*asked, "--scheme", "q8_0", "--allow-requantize").err


def test_without_a_factor_it_is_exact(tmp_path: Path) -> None:
    source = coded(tmp_path, "qwen2", "mlx")
    ran = qconvert("convert", source, "--to", "gguf", "-o", tmp_path / "x.gguf")
    assert ran.code == 0 and "exact, verified" in ran.err
    np.testing.assert_array_equal(weights(tmp_path / "x.gguf")[DOWN][0], weights(source)[DOWN][0])
    again = made("convert", tmp_path / "x.gguf", "--to", "mlx", "-o", tmp_path / "again")
    before, after = stored(source), stored(again)
    names = [name for name in before if "_proj" in name and not name.endswith("bias")]
    assert len(names) == 28 and all(after[name] == before[name] for name in names)
