"""Passes of the compiler one by one, carried out on numbers: what each changes, refuses and leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.core.statistics import StatisticsKey
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.models import Architecture, Binding, bind
from qconvert.ops import CheckFinite, Dequantize, Quantize, Transcode
from qconvert.plan.passes.cast import cast_plain
from qconvert.plan.passes.checks import check_finite, refuse_ggml_blocks, refuse_unscaled_weights
from qconvert.plan.passes.dequantize import dequantize, resolve_nested_scales
from qconvert.plan.passes.fuse import fuse, unfuse
from qconvert.plan.passes.other_models import leave_out_other_models
from qconvert.plan.passes.output_config import write_config
from qconvert.plan.passes.output_layout import bring_into_layout, restack_for_class
from qconvert.plan.passes.quantize import quantize
from qconvert.plan.passes.tensor_parallel_padding import pad_to_ranks
from qconvert.plan.passes.tie import tie_head
from qconvert.plan.passes.transcode import Target
from qconvert.plan.passes.weigh import weigh_errors
from qconvert.plan.recipe import FUSIONS, Recipe
from qconvert.plan.request import GGUFTarget
from qconvert.plan.state import Compiled, Pass
from tests.support.compiling import start
from tests.support.computing import numbers_of, random_values
from tests.support.family_models import EXPERTS, small
from tests.support.models import EMBED, HEAD, tiny_config, tiny_shapes
from tests.support.values import blocks

BF16 = Unquantized(DType.BF16)
INT4 = AffineInt(4, 32, True, DType.BF16)
NESTED = Codebook("nf4", 64, DType.F32, DType.BF16, second="nested")
DOWN, UP, GATE = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up", "gate"))
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 40}


def bound(encoding: Encoding = BF16, family: str = "qwen3", **config: Any) -> Binding:
    """A tiny model's tensors, its linears in `encoding`."""
    made = tiny_config(family, **{**SIZES, **config})
    tensors = {
        n: ModelTensor(n, s, encoding if n.endswith("_proj.weight") else BF16)
        for n, s in tiny_shapes(made).items()
    }
    return bind(Architecture.of(made), tensors)


def of_experts(encoding: Encoding = BF16) -> Binding:
    """A mixture of experts as its class stores it, one linear for each."""
    sizes = {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 8}
    architecture = Architecture.of(small("qwen3_moe", "Qwen3MoeForCausalLM", **sizes))
    linear = {n for n, p in architecture.parameters.items() if p.kind == "linear" and p.param == "weight"}
    tensors = {
        n: ModelTensor(n, p.shape, encoding if n in linear else BF16)
        for n, p in architecture.parameters.items()
    }
    return bind(architecture, tensors)


EVERY_PASS: tuple[Pass, ...] = (
    refuse_unscaled_weights,
    tie_head,
    resolve_nested_scales,
    restack_for_class,
    unfuse,
    dequantize,
    pad_to_ranks,
    fuse,
    cast_plain,
    quantize,
    bring_into_layout,
    weigh_errors,
    refuse_ggml_blocks,
)


@pytest.mark.parametrize("step", EVERY_PASS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("encoding", [BF16, INT4], ids=["plain", "int4"])
def test_a_pass_that_was_not_asked_does_nothing(step: Pass, encoding: Encoding) -> None:
    state = start(bound(encoding))
    assert step(state) == state


ASKED: dict[str, tuple[Pass, Encoding, dict[str, Any]]] = {
    "fuse": (fuse, INT4, {"recipe": Recipe(fuse=("qkv",), scheme=Scheme(4))}),
    "resolve": (resolve_nested_scales, NESTED, {}),
    "cast": (cast_plain, BF16, {"dtype": DType.F32}),
    "dequantize": (dequantize, INT4, {"dequantize": True, "command": "convert"}),
    "pad": (pad_to_ranks, INT4, {"recipe": Recipe(pad_to_tp=4)}),
    "layout": (bring_into_layout, INT4, {"target": Target("gptq")}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_second_time_changes_nothing_more(name: str) -> None:
    """The tensors that a pass has made are already what it was asked for."""
    step, encoding, how = ASKED[name]
    once = step(start(bound(encoding), **how))
    again = step(once)
    assert once.plan != start(bound(encoding), **how).plan
    assert {n: (t.shape, t.encoding) for n, t in again.outputs.items()} == {
        n: (t.shape, t.encoding) for n, t in once.outputs.items()
    }


@pytest.mark.parametrize("name", ASKED)
def test_a_pass_changes_the_plan_and_no_fact(name: str) -> None:
    step, encoding, how = ASKED[name]
    before = start(bound(encoding), **how)
    after = step(before)
    same = ("request", "binding", "facts", "layout", "tied", "config", "notices", "gguf")
    assert all(getattr(after, field) == getattr(before, field) for field in same)
    untouched = [u for u in before.plan.units if "norm" in u.output.name]
    assert name == "cast" or all(unit in after.plan.units for unit in untouched)


@pytest.mark.parametrize("fusions", [("qkv",), ("gate_up",), ("qkv", "gate_up")])
@pytest.mark.parametrize("encoding", [BF16, INT4, AffineInt(3, None, False, DType.F16)])
def test_a_fused_weight_is_its_members_one_below_the_other(
    fusions: tuple[str, ...], encoding: Encoding
) -> None:
    binding = bound(encoding)
    values = random_values(binding)
    state = fuse(start(binding, Recipe(fuse=fusions)))
    before, after = numbers_of(start(binding).plan, values), numbers_of(state.plan, values)
    made = [e for e in binding.architecture.fused.values() if e.whole.name in after]
    assert {e.fusion.role for e in made} == {role for name in fusions for role in FUSIONS[name]}
    for entry in made:
        stacked = np.concatenate([before.pop(member.name) for member in entry.members])
        np.testing.assert_array_equal(after.pop(entry.whole.name), stacked)
    assert before.keys() == after.keys()
    for name, numbers in before.items():
        np.testing.assert_array_equal(after[name], numbers)


@pytest.mark.parametrize("encoding", [BF16, INT4])
def test_unfusing_a_plan_of_fused_linears_gives_the_members_numbers(encoding: Encoding) -> None:
    binding = bound(encoding)
    values = random_values(binding)
    wholes = fuse(start(binding, Recipe(fuse=("qkv", "gate_up"))))
    state = replace(wholes, request=replace(wholes.request, unfuse=("attn.qkv", "mlp.gate_up")))
    after, before = numbers_of(unfuse(state).plan, values), numbers_of(start(binding).plan, values)
    assert after.keys() == before.keys()
    for name, numbers in before.items():
        np.testing.assert_array_equal(after[name], numbers)


def test_experts_are_stacked_and_taken_apart_without_a_change_of_numbers() -> None:
    binding = of_experts()
    values = random_values(binding)
    stacked = fuse(start(binding, Recipe(fuse=("experts",))))
    stacks = [t for n, t in stacked.outputs.items() if "experts" in n]
    assert {len(t.shape) for t in stacks} == {3}
    again = replace(stacked, request=replace(stacked.request, unfuse=FUSIONS["experts"]))
    after, before = numbers_of(unfuse(again).plan, values), numbers_of(start(binding).plan, values)
    assert after.keys() == before.keys()
    for name, numbers in before.items():
        np.testing.assert_array_equal(after[name], numbers)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("encoding", [BF16, INT4, AffineInt(4, 32, False, DType.BF16)])
def test_padding_leaves_the_function_of_an_mlp_unchanged(ranks: int, encoding: Encoding) -> None:
    """down @ (gate x * up x), with x random: the sum has zeros more, and no other term."""
    binding = bound(encoding)
    values = random_values(binding)
    padded = pad_to_ranks(start(binding, Recipe(pad_to_tp=ranks)))
    before, after = numbers_of(start(binding).plan, values), numbers_of(padded.plan, values)
    x = np.random.default_rng(0).standard_normal((SIZES["hidden_size"], 5)).astype(np.float64)
    results = [n[DOWN].astype(np.float64) @ ((n[GATE] @ x) * (n[UP] @ x)) for n in (before, after)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9, atol=1e-9)
    inner = after[UP].shape[0]
    assert inner % ranks == 0 and after[DOWN].shape == (64, inner) == padded.outputs[DOWN].shape
    assert encoding is BF16 or (inner // ranks) % 32 == 0
    assert padded.architecture.config["intermediate_size"] == inner
    assert (
        f"64 -> {inner}" in padded.warnings[0] if inner > 64 else "nothing was padded" in padded.warnings[0]
    )
    others = before.keys() - {DOWN, UP, GATE}
    for name in others:
        np.testing.assert_array_equal(after[name], before[name])


def test_blocks_are_not_padded() -> None:
    with pytest.raises(BadRecipe, match=r"q4_0 blocks are not padded"):
        pad_to_ranks(start(bound(blocks("Q4_0")), Recipe(pad_to_tp=3)))


def test_dequantizing_gives_the_numbers_that_codes_stand_for() -> None:
    binding = bound(INT4)
    values = random_values(binding)
    plain = dequantize(start(binding, dequantize=True, command="convert", dtype=DType.F32))
    before, after = numbers_of(start(binding).plan, values), numbers_of(plain.plan, values)
    for name, numbers in before.items():
        np.testing.assert_array_equal(after[name], numbers)
    assert plain.outputs[DOWN].encoding == Unquantized(DType.F32)
    assert plain.outputs[EMBED].encoding == BF16  # `cast_plain` rounds what is plain


def test_nested_scales_become_numbers_before_anything_else_looks_at_them() -> None:
    binding = bound(NESTED)
    values = random_values(binding)
    state = resolve_nested_scales(start(binding))
    ops = {op for unit in state.plan.units for op in unit.ops}
    assert ops == {Transcode("resolve_nested_scales")}
    assert state.outputs[DOWN].encoding == replace(NESTED, second=None)
    np.testing.assert_array_equal(
        numbers_of(state.plan, values)[DOWN], numbers_of(start(binding).plan, values)[DOWN]
    )


def test_tying_and_untying_are_one_tensor_less_and_one_more() -> None:
    for tied in (True, False):
        state = start(bound(tied=tied), Recipe(tie=not tied))
        made = tie_head(state)
        assert (HEAD in made.outputs) is tied and set(made.outputs) ^ set(state.outputs) == {HEAD}
    with pytest.raises(BadRecipe, match="the head is already tied"):
        tie_head(start(bound(tied=True), Recipe(tie=True)))


def test_blocks_are_refused_where_safetensors_are_written() -> None:
    state = start(bound(blocks("Q4_K"), hidden_size=256, intermediate_size=256))
    with pytest.raises(BadRecipe, match="q4_k blocks, which safetensors files do not hold") as caught:
        refuse_ggml_blocks(state)
    assert "from-gguf" in caught.value.hint


@pytest.mark.parametrize("dtype", [DType.I8, DType.U8, DType.F8_E4M3, DType.I64])
def test_weights_that_nothing_scales_are_refused(dtype: DType) -> None:
    with pytest.raises(UnsupportedModel, match=f"stored as {dtype.label} without scales"):
        refuse_unscaled_weights(start(bound(Unquantized(dtype))))


def test_a_look_for_nan_comes_before_everything_that_reorders() -> None:
    """What quantizes looks by itself, unless its rows are not all the rows that were read."""
    state = quantize(start(bound(), Recipe(scheme=Scheme(4, 32))))
    made = check_finite(state)
    for before, after in zip(state.plan.units, made.plan.units, strict=True):
        looks = [type(op) for op in after.ops]
        assert looks[0] is (Quantize if before.quantizes else CheckFinite)
    allowed = replace(state, request=replace(state.request, allow_nonfinite=True))
    assert check_finite(allowed) is allowed


class Measured:
    """Statistics of these roles, or of all."""

    def __init__(self, *roles: str) -> None:
        self.roles = roles

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, StatisticsKey)
        return not self.roles or key.role in self.roles

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        raise AssertionError("a plan reads no statistics")

    def rounding(self, key: StatisticsKey) -> None:
        return None


def keys_of(state: Compiled) -> dict[str, tuple[StatisticsKey, ...]]:
    units = weigh_errors(state).plan.units
    return {unit.output.name: unit.statistics for unit in units if unit.quantizes}


def test_a_fused_weight_is_measured_once_and_an_expert_by_itself() -> None:
    scheme = Scheme(4, 32)
    dense = keys_of(quantize(fuse(start(bound(), Recipe(scheme, fuse=("qkv",)), statistics=Measured()))))
    assert dense["model.layers.0.self_attn.qkv_proj.weight"] == (StatisticsKey("attn.q", 0),)
    assert dense[DOWN] == (StatisticsKey("mlp.down", 0),)
    experts = keys_of(quantize(start(of_experts(), Recipe(scheme), statistics=Measured())))
    found = {key.expert for name, (key,) in experts.items() if ".experts." in name}
    assert found == set(range(len(found))) and len(found) > 1
    assert all(len(keys) == 1 for keys in experts.values())
    assert all(key.expert is None for name, (key,) in experts.items() if ".experts." not in name)


def test_what_was_not_measured_is_quantized_without_weights() -> None:
    keys = keys_of(quantize(start(bound(), Recipe(Scheme(4, 32)), statistics=Measured("mlp.down"))))
    assert keys.pop(DOWN) == (StatisticsKey("mlp.down", 0),)
    assert set(keys.values()) == {()}
    assert set(keys_of(quantize(start(bound(), Recipe(Scheme(4, 32))))).values()) == {()}


def test_doubles_are_rounded_to_float32_before_they_are_quantized() -> None:
    state = quantize(start(bound(Unquantized(DType.F64)), Recipe(Scheme(4, 32))))
    unit = next(unit for unit in state.plan.units if unit.output.name == DOWN)
    assert [type(op).__name__ for op in unit.ops] == ["Cast", "Quantize"]
    assert unit.output.encoding == AffineInt(4, 32, True, DType.F32)


def test_a_gguf_leaves_towers_of_other_models_out_and_says_so() -> None:
    made, towers = tiny_config("qwen3", **SIZES), ("model.visual.qkv.weight", "model.visual.proj.weight")
    tensors = {n: ModelTensor(n, s, BF16) for n, s in tiny_shapes(made).items()}
    tensors |= {name: ModelTensor(name, (8, 8), BF16) for name in towers}
    plain = Architecture.of(made)
    sees = replace(plain, family=replace(plain.family, carried={r"model\.visual\..*": "vision"}))
    state = start(bind(sees, tensors, allow_unknown=True), target=GGUFTarget("q8_0"))
    left = leave_out_other_models(state)
    assert left.outputs.keys() == state.outputs.keys() - {*towers} and {*left.plan.dropped} == {*towers}
    assert left.warnings == ("vision: 2 tensors are left out; the GGUF holds the language model",)
    tensors["odd"] = ModelTensor("odd", (8, 8), BF16)
    with pytest.raises(UnsupportedModel, match="odd: GGUF has no name for it"):
        leave_out_other_models(start(bind(sees, tensors, allow_unknown=True), target=GGUFTarget("q8_0")))


def test_the_config_changes_where_the_output_does_and_nowhere_else() -> None:
    plain = write_config(start(bound()))
    assert plain.config == tiny_config("qwen3", **SIZES) and not plain.notices
    cast = write_config(start(bound(), dtype=DType.F16))
    assert cast.config == {**plain.config, "torch_dtype": "float16"}
    quantized = write_config(quantize(start(bound(), Recipe(Scheme(4, 32)))))
    settings = quantized.config.pop("quantization_config")
    assert quantized.config == plain.config
    assert DOWN.removesuffix(".weight") in settings["forms"] and "lm_head" in settings["kept"]
    back = write_config(dequantize(start(bound(INT4), dequantize=True, command="convert")))
    assert "quantization_config" not in back.config


@pytest.mark.parametrize("layout", ["gptq", "awq", "mlx", "int-quantized"])
def test_a_layout_is_reached_by_codes_or_refused_with_a_way_out(layout: str) -> None:
    """The numbers of what is written are those of the source, up to the distance of the scales' type."""
    encoding = AffineInt(8, None, True, DType.F16) if layout == "int-quantized" else INT4
    binding = bound(encoding)
    values = random_values(binding)
    state = start(binding, target=Target(layout))
    made = bring_into_layout(state)
    before, after = numbers_of(state.plan, values), numbers_of(made.plan, values)
    assert not any(isinstance(op, Dequantize | Quantize) for u in made.plan.units for op in u.ops)
    for name, numbers in before.items():
        assert np.abs(after[name] - numbers).max() <= 2.0**-6 * np.abs(numbers).max()
    with pytest.raises(BadRecipe, match="no quantized tensors to write in"):
        bring_into_layout(start(bound(), target=Target("gptq")))
