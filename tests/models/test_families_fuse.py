"""Native spellings of fused linears, held against the classes that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.checkpoint.open import open_checkpoint
from qconvert.convert.runner import gather
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.core.values import DenseRows
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, bind
from qconvert.plan.passes.fuse import unstack_experts
from qconvert.plan.plan import Plan, copy_of
from qconvert.plan.recipe import Recipe, Rule
from qconvert.plan.selectors import decide
from tests.support.commands import made as made_folder
from tests.support.commands import qconvert
from tests.support.compiling import fused, unfused
from tests.support.family_models import ALONE, RELATIVES, ROWS, small
from tests.support.models import write_file

STACKS = ["mlp.experts.gate_up", "mlp.experts.down"]
F32 = Unquantized(DType.F32)


class Arrays:
    """A reader of arrays in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def read(self, tensor: ModelTensor, start: int, stop: int) -> DenseRows:
        rows = self.arrays[tensor.name].reshape(tensor.rows, tensor.width)
        return DenseRows(rows[start:stop], DType.F32)


def made(plan: Plan, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a plan that moves rows, computed from arrays."""
    reader: Any = Arrays(arrays)
    found = {}
    for unit in plan.units:
        value, _ = gather(unit.inputs, reader, 0, unit.output.rows)
        assert isinstance(value, DenseRows)
        found[unit.output.name] = value.rows_RI.reshape(unit.output.shape)
    return found


def planned(config: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Architecture, Plan]:
    tensors = {name: ModelTensor(name, array.shape, F32) for name, array in arrays.items()}
    binding = bind(Architecture.of(config), tensors)
    return binding.architecture, copy_of(binding)


def numbered(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the class stores, every element with a number of its own."""
    arrays, first = {}, 0
    for name, parameter in Architecture.of(config).stored.items():
        size = int(np.prod(parameter.shape))
        arrays[name] = np.arange(first, first + size, dtype=np.float32).reshape(parameter.shape)
        first += size
    return arrays


FALCONS = {"falcon-7b": (4, 1), "falcon-rw": (4, 4), "falcon-40b": (4, 2)}


@pytest.mark.parametrize("row", FALCONS)
def test_falcon_heads_are_where_the_class_looks_for_them(row: str) -> None:
    import torch
    import transformers

    heads, kv_heads = FALCONS[row]
    config = {"bias": False, **ROWS[row].config, "hidden_size": 32}
    attention = transformers.models.falcon.modeling_falcon.FalconAttention(
        transformers.AutoConfig.for_model(**config), 0
    )
    arrays = numbered(config)
    prefix = "transformer.h.0.self_attention."
    fused = arrays[f"{prefix}query_key_value.weight"]
    q, k, v = attention._split_heads(torch.from_numpy(fused.T[None]))
    architecture, plan = planned(config, arrays)
    cut = made(unfused(plan, architecture), arrays)
    split = {"query": (q, heads), "key": (k, kv_heads), "value": (v, kv_heads)}
    for name, (theirs, count) in split.items():
        rows = theirs.reshape(1, 32, -1, 8)[:, :, :: heads // count if theirs.shape[2] == heads else 1]
        expected = rows[0].permute(1, 2, 0).reshape(-1, 32).numpy()
        np.testing.assert_array_equal(cut[f"{prefix}{name}.weight"], expected, err_msg=name)


@given(
    kv_heads=st.integers(1, 5),
    per_kv=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    layers=st.integers(1, 2),
)
def test_grouped_qkv_unfuses_by_group_and_fuses_back(
    kv_heads: int, per_kv: int, head_dim: int, layers: int
) -> None:
    """InternLM2 sees wqkv as [kv head, q heads per kv head + 2, head_dim]."""
    heads = kv_heads * per_kv
    config = small("internlm2", "InternLM2ForCausalLM", num_hidden_layers=layers)
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim}
    arrays = numbered(config)
    architecture, plan = planned(config, arrays)
    cut = unfused(plan, architecture)
    values, prefix = made(cut, arrays), f"model.layers.{layers - 1}.attention."
    grouped = arrays[f"{prefix}wqkv.weight"].reshape(kv_heads, per_kv + 2, head_dim, heads * head_dim)
    for name, expected in {"wq": grouped[:, :-2], "wk": grouped[:, -2], "wv": grouped[:, -1]}.items():
        np.testing.assert_array_equal(
            values[f"{prefix}{name}.weight"], expected.reshape(-1, heads * head_dim)
        )
    whole = made(fused(cut, architecture, ["attn.qkv"]), arrays)
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in arrays.items()}


def test_diff_follows_the_rows_of_interleaved_qkv(tmp_path: Path) -> None:
    config = RELATIVES["internlm2"][0]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    write_file(tmp_path / "whole" / "model.safetensors", numbered(config), "f32")
    pair = [tmp_path / "whole", made_folder("unfuse", tmp_path / "whole", "-o", tmp_path / "apart")]
    for a, b in (pair, reversed(pair)):
        assert set(qconvert("diff", a, b, "--json").json["summary"]) == {"equal"}
    assert qconvert("verify", pair[1], "--against", pair[0]).code == 0


NATIVE = {
    "phi3": ROWS["phi3"].config,
    "glm": ROWS["glm"].config,
    "falcon-40b": ROWS["falcon-40b"].config,
    "qwen3.5-moe": ROWS["qwen3.5-moe"].config,
    "baichuan": RELATIVES["baichuan"][0],
    "qwen1": RELATIVES["qwen1"][0],
    "chatglm": RELATIVES["chatglm"][0],
    "chatglm-without-multi-query": small(
        "chatglm", "ChatGLMModel", padded_vocab_size=96, ffn_hidden_size=48, num_layers=2, kv_channels=8
    ),
    "openelm": ALONE["openelm"][0],
}


@pytest.mark.parametrize("name", NATIVE)
def test_unfused_native_tensors_fuse_back_to_the_same_bytes(name: str) -> None:
    arrays = numbered(NATIVE[name])
    architecture, plan = planned(NATIVE[name], arrays)
    native = [fusion.role for fusion in architecture.family.fusions if fusion.native]
    cut = unfused(plan, architecture)
    assert any(fusion.native for fusion in architecture.family.fusions)
    assert not set(cut.outputs) & set(architecture.fused)
    assert set(cut.outputs) <= set(architecture.parameters)
    whole = made(fused(cut, architecture, native), arrays)
    assert {n: a.tobytes() for n, a in whole.items()} == {n: a.tobytes() for n, a in arrays.items()}


@pytest.mark.parametrize(
    ("select", "weights"),
    [("mlp.experts.down", 8), ("layers.1.mlp.experts.gate_up", 8), ("mlp.shared.gate", 2)],
)
def test_rules_reach_all_experts_of_a_layer(select: str, weights: int) -> None:
    architecture = Architecture.of(ROWS["qwen2-moe"].config)
    recipe = Recipe(rules=(Rule(select, Scheme(8, None)),))
    assert len(decide(recipe, architecture, architecture.parameters, tied=False)) == weights


@pytest.mark.parametrize("select", ["mlp.experts.gate", "mlp.experts.3.up"])
def test_what_loaders_stack_shares_a_scheme(select: str) -> None:
    architecture = Architecture.of(ROWS["qwen2-moe"].config)
    with pytest.raises(BadRecipe, match="loaders fuse them") as caught:
        decide(
            Recipe(rules=(Rule(select, Scheme(8, None)),)), architecture, architecture.parameters, tied=False
        )
    assert "mlp.experts.gate_up those of all layers" in str(caught.value.hint)


def test_a_router_is_never_quantized() -> None:
    architecture = Architecture.of(ROWS["qwen2-moe"].config)
    for role in ("mlp.router", "mlp.shared_gate"):
        with pytest.raises(BadRecipe, match="a router tensor is never quantized"):
            decide(Recipe(rules=(Rule(role, Scheme(8)),)), architecture, architecture.parameters, tied=False)


def test_quantizing_takes_stacks_of_experts_apart(tmp_path: Path) -> None:
    """No layout of linears has 3-D weights: each expert becomes a linear of its own, router and all kept."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**ROWS["qwen3.5-moe"].config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    quantized = made_folder(
        "quantize", tmp_path / "model", "--scheme", "int8-channel", "--min-max", "-o", tmp_path / "q"
    )
    back = load_file(made_folder("dequantize", quantized, "-o", tmp_path / "d") / "model.safetensors")
    stack = state["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(4):
        names = [f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up")]
        whole = torch.cat([back[name] for name in names])
        assert float((whole - stack[expert]).abs().max()) < float(stack.abs().max()) / 200
    assert torch.equal(back["model.layers.1.mlp.gate.weight"], state["model.layers.1.mlp.gate.weight"])
    assert not any("experts.gate_up" in name or "experts.down" in name for name in back)


@pytest.mark.parametrize("row", ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "qwen3.5-moe"])
def test_experts_stack_as_transformers_holds_them(row: str, tmp_path: Path) -> None:
    """What `save_pretrained` wrote expert by expert stacks to the class's own 3-D parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**ROWS[row].config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture, plan = checkpoint.architecture, copy_of(checkpoint.bind())
    apart = unstack_experts(plan, architecture)
    stacked = fused(apart, architecture, STACKS)
    state = {n: t for n, t in model.state_dict().items() if ".experts." in n}
    assert len([n for n in stacked.outputs if ".experts." in n]) == len(state) > 0
    units = {unit.output.name.replace("block_sparse_moe", "mlp"): unit for unit in stacked.units}
    for name, expected in state.items():
        value, _ = gather(units[name].inputs, checkpoint.reader, 0, units[name].output.rows)
        assert isinstance(value, DenseRows)
        np.testing.assert_array_equal(value.rows_RI.reshape(expected.shape), expected.numpy())
