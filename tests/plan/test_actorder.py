"""--undo-act-order: the same function without g_idx where the order folds, a reason where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.commands import made, qconvert
from tests.support.models import tiny

IDS = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(0))
DOWN, OUT, Q = "mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj"


def logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    return decoder.logits(decoder.hidden(IDS))


def act_ordered(folder: Path, groups: dict[str, np.ndarray], **sizes: object) -> Path:
    """A GPTQ model in which the columns of these modules, of every layer, are in these groups."""
    model = tiny(folder / "plain", "qwen2", dtype="f16", **sizes)  # type: ignore[arg-type]
    out = made("convert", model, "--to", "gptq", "--scheme", "int4-g32", "-o", folder / "gptq")
    arrays = load_file(out / "model.safetensors")
    for name in arrays:
        for module, order in groups.items():
            if name.endswith(f"{module}.g_idx"):
                assert len(order) == len(arrays[name])
                arrays[name] = order.astype(np.int32)
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    return out


def shuffled(width: int, size: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(width) // size)


def within_heads(heads: int, head_dim: int, seeds: list[int]) -> np.ndarray:
    """Groups shuffled inside every head."""
    each = head_dim // 32
    return np.concatenate([shuffled(head_dim, seed=seeds[h]) + h * each for h in range(heads)])


def kinds(folder: Path) -> dict[str, str]:
    tensors = json.loads((folder / "qconvert.json").read_text())["tensors"]
    return {name: entry["certificate"]["kind"] for name, entry in tensors.items()}


@pytest.mark.parametrize("layout", ["awq", "compressed-tensors", "gptq"])
def test_the_inner_features_of_an_mlp_take_the_order_over(layout: str, tmp_path: Path) -> None:
    source = act_ordered(tmp_path, {DOWN: shuffled(384)}, biases=True)
    assert qconvert("convert", source, "--to", "awq", "-o", tmp_path / "o").code == 1
    out = made("convert", source, "--to", layout, "--undo-act-order", "-o", tmp_path / "out")
    assert set(kinds(out).values()) == {"exact"}
    assert not any(getattr(t.encoding, "act_order", False) for t in open_checkpoint(out).tensors.values())
    assert (logits(out) - logits(source)).abs().max() < 1e-5
    assert qconvert("verify", out, "--against", source).code == 0
    moved = json.loads((out / "qconvert.json").read_text())["tensors"]
    assert moved["model.layers.0.mlp.up_proj.weight"]["reordered"] == "rows"
    assert moved[f"model.layers.0.{DOWN}.weight"]["reordered"] == "columns"


def test_padding_comes_after_the_order(tmp_path: Path) -> None:
    """The features that a rank is filled up with are zeros behind those in their new order."""
    source = act_ordered(tmp_path, {DOWN: shuffled(384)}, biases=True)
    wish = ("convert", source, "--to", "compressed-tensors", "--undo-act-order")
    out = made(*wish, "--pad-to-tp", 5, "-o", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["intermediate_size"] == 480
    assert (logits(out) - logits(made(*wish, "-o", tmp_path / "unpadded"))).abs().max() < 1e-5
    assert qconvert("verify", out, "--against", source).code == 0


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    import transformers

    source = act_ordered(tmp_path, {DOWN: shuffled(384)})
    folded = made("convert", source, "--to", "compressed-tensors", "--undo-act-order", "-o", tmp_path / "out")
    plain = made("dequantize", source, "--dtype", "f32", "-o", tmp_path / "source")
    with torch.no_grad():
        found, expected = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
            for folder in (folded, plain)
        )
    assert expected.abs().max() > 1 and (found - expected).abs().max() < 1e-4


def test_the_numbers_are_those_of_the_source_in_another_order(tmp_path: Path) -> None:
    source = act_ordered(tmp_path, {DOWN: shuffled(384)})
    folded = made("convert", source, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out")
    before, after = (
        load_file(
            made("dequantize", folder, "--dtype", "f32", "-o", tmp_path / f"d{i}") / "model.safetensors"
        )
        for i, folder in enumerate((source, folded))
    )
    order = np.argsort(shuffled(384), kind="stable")
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, side in (
            ("gate_proj", np.s_[order]),
            ("up_proj", np.s_[order]),
            ("down_proj", np.s_[:, order]),
        ):
            key = f"{layer}mlp.{name}.weight"
            np.testing.assert_array_equal(after[key], before[key][side])


def test_heads_of_values_take_an_order_within_them(tmp_path: Path) -> None:
    apart = within_heads(4, 64, [1, 2, 3, 4])
    source = act_ordered(tmp_path / "mha", {OUT: apart}, num_key_value_heads=4, biases=True)
    out = made("convert", source, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out")
    assert (logits(out) - logits(source)).abs().max() < 1e-5
    assert qconvert("verify", out, "--against", source).code == 0
    shared = act_ordered(tmp_path / "gqa", {OUT: within_heads(4, 64, [1, 1, 2, 2])})
    out = made("convert", shared, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out2")
    assert (logits(out) - logits(shared)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({Q: shuffled(256)}, "its input is the hidden state, which every layer shares; 0 of 2"),
        ({Q: shuffled(256), DOWN: shuffled(384)}, "the hidden state, which every layer shares; 2 of 4"),
        ({OUT: within_heads(4, 64, [1, 2, 3, 4])}, "the 2 heads of queries that share a head of values"),
        ({OUT: shuffled(256)}, "it moves inputs from one of 4 heads to another"),
        ({DOWN: np.minimum(shuffled(384), 10)}, "its groups are of unequal sizes"),
    ],
)
def test_an_order_that_nothing_takes_over_is_refused_with_its_reason(
    groups: dict[str, np.ndarray], why: str, tmp_path: Path
) -> None:
    source = act_ordered(tmp_path, groups)
    asked = ("convert", source, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out")
    ran = qconvert(*asked)
    assert ran.code == 1 and why in ran.err and "can be folded" in ran.err
    assert not (tmp_path / "out").exists()
    out = made(*asked, "--allow-requantize")
    found = kinds(out)
    folds = f"model.layers.0.{DOWN}.weight" if DOWN in groups and Q in groups else None
    assert "requantized" in found.values() and (folds is None or found[folds] == "exact")
    assert qconvert("verify", out, "--against", source).code == 0


def test_without_an_order_there_is_nothing_to_undo(tmp_path: Path) -> None:
    source = act_ordered(tmp_path, {})
    ran = qconvert("convert", source, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out")
    assert ran.code == 1 and "no columns in activation order (g_idx) in this checkpoint" in ran.err


def test_gptqmodel_s_own_file_says_how_many_can_be_folded(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "cut-gptqm-w4-sym-g128-descact"
    ran = qconvert("convert", source, "--to", "awq", "--undo-act-order", "-o", tmp_path / "out")
    assert ran.code == 1 and "2 of 14 weights in activation order can be folded" in ran.err
    shared = "  its input is the hidden state, which every layer shares:\n"
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    every = "".join(f"    model.layers.{{0-1}}.{name}_proj.weight\n" for name in names)
    assert shared + every in ran.err
    assert "heads" in ran.err and "    model.layers.{0-1}.self_attn.o_proj.weight\n" in ran.err


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_keeps_what_cannot_be_folded_and_says_so(layout: str, tmp_path: Path) -> None:
    source = act_ordered(tmp_path, {Q: shuffled(256), DOWN: shuffled(384)})
    ran = qconvert("convert", source, "--to", layout, "--undo-act-order", "-o", tmp_path / "out")
    assert ran.code == 0 and "2 of 4 weights keep their g_idx" in ran.err
    assert f"model.layers.{{0-1}}.{Q}.weight" in ran.err
    assert set(kinds(tmp_path / "out").values()) == {"exact"}
    labels = {
        name: tensor.encoding.label for name, tensor in open_checkpoint(tmp_path / "out").tensors.items()
    }
    assert labels[f"model.layers.0.{DOWN}.weight"] == "int4-g32"
    assert labels[f"model.layers.0.{Q}.weight"] == "int4-g32-actorder"
    assert (logits(tmp_path / "out") - logits(source)).abs().max() < 1e-5
    assert qconvert("verify", tmp_path / "out", "--against", source).code == 0


def test_gguf_takes_the_order_as_others_do(tmp_path: Path) -> None:
    source = act_ordered(tmp_path, {DOWN: shuffled(384)}, biases=True)
    ran = qconvert("convert", source, "--to", "gguf", "-o", tmp_path / "o.gguf")
    assert ran.code == 1 and "(g_idx), which gguf cannot hold" in ran.err and "--undo-act-order" in ran.err
    ran = qconvert("convert", source, "--to", "gguf", "--undo-act-order", "-o", tmp_path / "out.gguf")
    assert ran.code == 0 and "exact, verified" in ran.err
    assert (logits(tmp_path / "out.gguf") - logits(source)).abs().max() < 1e-4
    assert qconvert("verify", tmp_path / "out.gguf", "--against", source).code == 0
    assert qconvert("diff", source, tmp_path / "out.gguf", "--json").json["summary"]["differs"] > 0
    refused = act_ordered(tmp_path / "q", {Q: shuffled(256)})
    ran = qconvert("convert", refused, "--to", "gguf", "--undo-act-order", "-o", tmp_path / "o.gguf")
    assert ran.code == 1 and f"    model.layers.{{0-1}}.{Q}.weight" in ran.err
