"""Stacks of experts: put together and taken apart, plain and quantized, also gpt-oss' turned ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.quant.dequantize import numbers
from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS
from tests.support.models import stored

LAYER = "model.layers.1.mlp.experts."


def saved(row: str, folder: Path, **sizes: Any) -> Path:
    """A random model of transformers' class, saved by it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**ROWS[row].config | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    return folder


def plain_stacks(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers' class holds of a 16-bit folder."""
    import transformers

    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name: tensor for name, tensor in state.items() if ".experts." in name}


BIG = {"hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3-moe", tmp_path_factory.mktemp("mixture") / "m", **BIG)


def test_transformers_loads_the_stacks_as_its_own_parameters(mixture: Path, tmp_path: Path) -> None:
    stacked = made("fuse", mixture, "--only", "experts", "-o", tmp_path / "s")
    names = {name for name in stored(stacked) if ".experts." in name}
    assert names == {
        f"model.layers.{n}.mlp.experts.{part}_proj" for n in (0, 1) for part in ("gate_up", "down")
    }
    theirs, before = plain_stacks(stacked), plain_stacks(mixture)
    assert theirs.keys() == before.keys() and all(torch.equal(theirs[n], t) for n, t in before.items())
    assert stored(made("unfuse", stacked, "-o", tmp_path / "u")) == stored(mixture)
    for a, b in ((mixture, stacked), (stacked, mixture)):
        assert set(qconvert("diff", a, b, "--json").json["summary"]) == {"equal"}


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("compressed-tensors", ("--scheme", "int4-g32")),
        ("compressed-tensors", ("--scheme", "int3-asym-g64")),
        ("int-quantized", ("--scheme", "int8-asym-channel")),
        ("fp8", ()),
    ],
)
def test_quantized_experts_stack_and_come_back_to_the_byte(
    mixture: Path, tmp_path: Path, layout: str, scheme: tuple[str, ...]
) -> None:
    before = made("convert", mixture, "--to", layout, *scheme, "-o", tmp_path / "q")
    stacked = made("fuse", before, "--only", "experts", "-o", tmp_path / "s")
    kinds = json.loads((stacked / "qconvert.json").read_text())["tensors"].values()
    assert {entry["certificate"]["kind"] for entry in kinds} == {"exact"}
    assert open_checkpoint(stacked).tensors[f"{LAYER}gate_up_proj"].shape == (4, 256, 128)
    assert stored(made("unfuse", stacked, "-o", tmp_path / "u")) == stored(before)
    assert set(qconvert("diff", before, stacked, "--json").json["summary"]) == {"equal"}
    assert qconvert("verify", stacked, "--against", before).code == 0
    plain = load_file(
        made("dequantize", stacked, "--dtype", "f32", "-o", tmp_path / "d") / "model.safetensors"
    )
    apart = load_file(
        made("dequantize", before, "--dtype", "f32", "-o", tmp_path / "e") / "model.safetensors"
    )
    for expert in range(4):
        parts = [apart[f"{LAYER}{expert}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(plain[f"{LAYER}gate_up_proj"][expert], torch.cat(parts))


def test_the_stack_of_fp8_experts_is_what_transformers_names_it(mixture: Path, tmp_path: Path) -> None:
    fp8 = made("convert", mixture, "--to", "fp8", "-o", tmp_path / "q")
    arrays = stored(made("fuse", fp8, "--only", "experts", "-o", tmp_path / "s"))
    assert arrays[f"{LAYER}gate_up_proj"][:2] == ("F8_E4M3", (4, 256, 128))
    assert arrays[f"{LAYER}gate_up_proj_scale_inv"][:2] == ("F32", (4, 2, 1))


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("gptq", "int4-g32"), ("awq", "int4-g32"), ("bitsandbytes", "nf4")],
)
def test_layouts_of_linears_refuse_stacks(mixture: Path, tmp_path: Path, layout: str, scheme: str) -> None:
    before = made("convert", mixture, "--to", layout, "--scheme", scheme, "-o", tmp_path / "q")
    ran = qconvert("fuse", before, "--only", "experts", "-o", tmp_path / "s")
    assert ran.code == 1 and "a stack of 4 experts" in ran.err and "one for each expert" in ran.err
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oss") / "m"
    return saved("gpt-oss", folder, hidden_size=64, intermediate_size=96, layer_types=["full_attention"] * 2)


def test_gpt_oss_experts_come_apart_as_the_class_computes_with_them(gpt_oss: Path, tmp_path: Path) -> None:
    before = load_file(gpt_oss / "model.safetensors")
    apart = load_file(made("unfuse", gpt_oss, "-o", tmp_path / "u") / "model.safetensors")
    gate_up, bias = before[f"{LAYER}gate_up_proj"], before[f"{LAYER}gate_up_proj_bias"]
    for expert in range(4):
        for start, part in enumerate(("gate", "up")):
            name = f"{LAYER}{expert}.{part}_proj"
            assert torch.equal(apart[f"{name}.weight"], gate_up[expert][:, start::2].T)
            assert torch.equal(apart[f"{name}.bias"], bias[expert][start::2])
        assert torch.equal(apart[f"{LAYER}{expert}.down_proj.weight"], before[f"{LAYER}down_proj"][expert].T)
        assert torch.equal(apart[f"{LAYER}{expert}.down_proj.bias"], before[f"{LAYER}down_proj_bias"][expert])
    stacked = made("fuse", tmp_path / "u", "--only", "experts", "-o", tmp_path / "s")
    assert stored(stacked) == stored(gpt_oss)
    for a, b in ((gpt_oss, tmp_path / "u"), (tmp_path / "u", gpt_oss)):
        assert set(qconvert("diff", a, b, "--json").json["summary"]) == {"equal"}


def test_gpt_oss_is_quantized_expert_by_expert(gpt_oss: Path, tmp_path: Path) -> None:
    quantized = made("quantize", gpt_oss, "--scheme", "int8-channel", "--min-max", "-o", tmp_path / "q")
    checkpoint = open_checkpoint(quantized)
    assert checkpoint.tensors[f"{LAYER}3.gate_proj.weight"].encoding.label == "int8-channel"
    assert qconvert("verify", quantized, "--against", gpt_oss).code == 0
    back = made("fuse", quantized, "--only", "experts", "-o", tmp_path / "s")
    whole = load_file(made("dequantize", back, "-o", tmp_path / "d") / "model.safetensors")
    before = load_file(gpt_oss / "model.safetensors")
    assert whole.keys() == before.keys()
    stack = before[f"{LAYER}gate_up_proj"]
    assert (whole[f"{LAYER}gate_up_proj"] - stack).abs().max() < stack.abs().max() / 100
    assert torch.equal(whole[f"{LAYER}gate_up_proj_bias"], before[f"{LAYER}gate_up_proj_bias"])


def test_gpt_oss_padded_computes_the_same(gpt_oss: Path, tmp_path: Path) -> None:
    import transformers

    padded = made("convert", gpt_oss, "--to", "f32", "--pad-to-tp", 10, "-o", tmp_path / "p")
    ids = torch.arange(12)[None]
    logits = []
    for folder in (gpt_oss, padded):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert json.loads((padded / "config.json").read_text())["intermediate_size"] == 100
    assert logits[0].abs().max() > 0.1
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].abs().max()


def test_mxfp4_experts_become_linears_with_the_same_codes(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "gptoss-mxfp4"
    apart = made("unfuse", made_ct(source, tmp_path), "-o", tmp_path / "u")
    a, b = open_checkpoint(source), open_checkpoint(apart)
    stack = a.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    whole = numbers(a.reader.read(stack, 0, stack.rows), DType.F32).rows_RI.reshape(stack.shape)
    for expert in (0, stack.shape[0] - 1):
        up = b.tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
        assert up.encoding.label == "e2m1-g32"
        found = numbers(b.reader.read(up, 0, up.rows), DType.F32).rows_RI
        np.testing.assert_array_equal(found, whole[expert, 1::2])


def made_ct(source: Path, tmp_path: Path) -> Path:
    return made("convert", source, "--to", "compressed-tensors", "-o", tmp_path / "ct")


def test_linears_in_mxfp4_become_gpt_oss_s_stacks_to_the_byte(assets: Path, tmp_path: Path) -> None:
    """From stacks, single experts, and experts beside quantized attention, which becomes numbers."""
    source = assets / "fixtures" / "quantized" / "gptoss-mxfp4"
    stacks = made_ct(source, tmp_path)
    apart = made("unfuse", stacks, "-o", tmp_path / "u")
    for number, linears in enumerate((stacks, apart)):
        back = made("convert", linears, "--to", "mxfp4", "-o", tmp_path / f"back{number}")
        assert stored(back) == stored(source)
        assert qconvert("verify", back, "--against", linears).code == 0
    plain = made("unfuse", made("dequantize", source, "-o", tmp_path / "p"), "-o", tmp_path / "pu")
    assert stored(made("convert", plain, "--to", "mxfp4", "-o", tmp_path / "new")) == stored(source)
    every = made(
        "convert", plain, "--to", "compressed-tensors", "--scheme", "mxfp4", "-o", tmp_path / "every"
    )
    back = made("convert", every, "--to", "mxfp4", "-o", tmp_path / "back")
    assert qconvert("verify", back, "--against", every).code == 0
    before, after = stored(source), stored(back)
    assert {name for name in before if before[name] != after[name]} == {
        f"model.layers.{n}.self_attn.{part}_proj.weight" for n in (0, 1) for part in "qkvo"
    }
    assert before.keys() == after.keys()


def test_codes_that_are_no_mxfp4_are_refused_for_gpt_oss_s_stacks(gpt_oss: Path, tmp_path: Path) -> None:
    quantized = made("quantize", gpt_oss, "--scheme", "int4-g32", "-o", tmp_path / "q")
    asked = ("convert", quantized, "--to", "mxfp4", "-o", tmp_path / "o")
    ran = qconvert(*asked)
    assert ran.code == 1 and "int4-g32 is not MXFP4" in ran.err and "--allow-requantize" in ran.err
    out = made(*asked, "--allow-requantize")
    kinds = json.loads((out / "qconvert.json").read_text())["tensors"]
    assert kinds[f"{LAYER}down_proj"]["certificate"]["kind"] == "requantized"


def for_mlx(folder: Path) -> Path:
    """The model with the names that transformers 5 gave up and mlx-lm still reads."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["num_experts"] = config["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mlx_logits(folder: Path) -> np.ndarray:
    mx = pytest.importorskip("mlx.core")
    network, _ = pytest.importorskip("mlx_lm.utils").load_model(folder)
    return np.array(network(mx.array(np.arange(12)[None])).astype(mx.float32))


@pytest.mark.parametrize("scheme", ["int4-asym-g32", "mxfp4"])
def test_mlx_holds_a_stack_for_each_projection(tmp_path: Path, scheme: str) -> None:
    import transformers

    model = for_mlx(saved("qwen3-moe", tmp_path / "m", **BIG, num_experts_per_tok=4))
    out = made("convert", model, "--to", "mlx", "--scheme", scheme, "-o", tmp_path / "mlx")
    arrays = stored(out)
    assert arrays["model.layers.1.mlp.switch_mlp.up_proj.weight"][:2] == ("U32", (4, 128, 16))
    assert not any(".experts." in name for name in arrays)
    assert qconvert("verify", out, "--against", model).code == 0
    plain = made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain")
    with torch.no_grad():
        network = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        ours = network(torch.arange(12)[None]).logits.numpy()
    theirs = mlx_logits(out)  # computed in bf16
    assert np.abs(ours).max() > 1 and np.square(theirs - ours).mean() < 0.002 * np.square(ours).mean()
    weights = CheckpointWeights(open_checkpoint(out))
    value = weights.get("mlp.experts.3.up", 1)
    assert value is not None
    expected = load_file(plain / "model.safetensors")[f"{LAYER}3.up_proj.weight"]
    np.testing.assert_array_equal(numbers(value, DType.F32).rows_RI, expected.numpy())


def test_stacks_of_mlx_go_to_the_linears_of_others_and_back(mixture: Path, tmp_path: Path) -> None:
    before = made("convert", mixture, "--to", "gptq_v2", "--scheme", "int4-g32", "-o", tmp_path / "gptq")
    stacks = made("convert", before, "--to", "mlx", "-o", tmp_path / "mlx")
    for layout in ("gptq_v2", "awq"):
        after = made("convert", stacks, "--to", layout, "-o", tmp_path / layout)
        assert set(qconvert("diff", before, after, "--json").json["summary"]) == {"equal"}
        assert qconvert("verify", after, "--against", stacks).code == 0
    ran = qconvert("unfuse", stacks, "-o", tmp_path / "u")
    assert ran.code == 1 and "mlx holds experts only in such stacks" in ran.err


def test_gpt_oss_goes_to_mlx_and_back_to_the_byte(assets: Path, tmp_path: Path) -> None:
    """mlx-lm computes the very same from our file as from gpt-oss's own, which it repacks on loading."""
    source = assets / "fixtures" / "quantized" / "gptoss-mxfp4"
    config = json.loads((source / "config.json").read_text()) | {"rope_theta": 150000.0}
    ours = made("convert", source, "--to", "mlx", "-o", tmp_path / "mlx")
    back = made("convert", ours, "--to", "mxfp4", "-o", tmp_path / "back")
    assert stored(back) == stored(source)
    for folder in (ours, back):
        own = json.loads((folder / "config.json").read_text())
        kept = {key: own[key] for key in ("quantization", "quantization_config") if key in own}
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(plain | kept))
    np.testing.assert_array_equal(mlx_logits(ours), mlx_logits(back))
