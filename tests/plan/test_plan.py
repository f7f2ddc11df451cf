"""Plans: passes are pure, every stored row is read exactly once, and fusing is undone by un-fusing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Encoding, ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Binding, bind
from qconvert.ops import CheckFinite, Dequantize, Quantize
from qconvert.plan.passes.cast import cast_plain
from qconvert.plan.passes.checks import check_finite
from qconvert.plan.passes.dequantize import dequantize
from qconvert.plan.passes.fuse import fuse
from qconvert.plan.passes.quantize import quantize
from qconvert.plan.passes.tie import tie_head
from qconvert.plan.passes.transcode import Target
from qconvert.plan.plan import Plan, RowSlice, copy_of
from qconvert.plan.recipe import Recipe, Rule
from qconvert.plan.state import Compiled, Pass
from tests.support.compiling import fused as fused_plan
from tests.support.compiling import start, unfused
from tests.support.models import EMBED, HEAD, tiny_config, tiny_shapes

BF16 = Unquantized(DType.BF16)
INT4 = AffineInt(4, 32, symmetric=False, scale_dtype=DType.BF16)
ALL_FUSIONS = ("attn.qkv", "mlp.gate_up")
Q = "model.layers.0.self_attn.q_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def bound(encoding: Encoding = BF16, **config: Any) -> Binding:
    """The tiny model's tensors, its linears in `encoding`."""
    made = tiny_config(**config)
    linear = "_proj.weight"
    tensors = {
        n: ModelTensor(n, s, encoding if n.endswith(linear) else BF16) for n, s in tiny_shapes(made).items()
    }
    return bind(Architecture.of(made), tensors)


def rebound(binding: Binding, plan: Plan) -> Binding:
    """The plan's outputs as the checkpoint they will be."""
    return bind(binding.architecture, plan.outputs)


def rows_read(plan: Plan) -> Counter[tuple[str, int]]:
    return Counter(
        (piece.tensor.name, row)
        for unit in plan.units
        for piece in unit.inputs
        for row in range(piece.start, piece.stop)
    )


FUSED = Recipe(fuse=("qkv", "gate_up"))
INT4_RECIPE = Recipe(scheme=Scheme(4, 32))
# Passes, and the request that makes each of them do something.
PASSES: dict[str, tuple[Pass, dict[str, Any]]] = {
    "tie": (tie_head, {"recipe": Recipe(tie=False)}),
    "fuse": (fuse, {"recipe": FUSED}),
    "quantize": (quantize, {"recipe": INT4_RECIPE}),
    "dequantize": (dequantize, {"dequantize": True, "command": "convert", "dtype": DType.F32}),
    "cast": (cast_plain, {"dtype": DType.F16}),
    "check_finite": (check_finite, {}),
}


def passed(name: str, encoding: Encoding = BF16, **how: Any) -> Compiled:
    """What a pass makes of the tiny model."""
    step, asked = PASSES[name]
    return step(start(bound(encoding, family="qwen2"), **{**asked, **how}))


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_leaves_its_state_alone_and_repeats_itself(name: str) -> None:
    step, asked = PASSES[name]
    state, same = (start(bound(family="qwen2"), **asked) for _ in range(2))
    first = step(state)
    assert state.plan == same.plan and first.plan == step(state).plan
    assert (first.plan != state.plan) == (name != "dequantize")


def test_a_copy_reads_every_row_once_in_the_printed_order() -> None:
    config = tiny_config("qwen2", tied=False)
    shapes = tiny_shapes(config)
    tensors = {n: ModelTensor(n, s, BF16) for n, s in reversed(shapes.items())}
    tensors["extra.b"] = tensors["extra.a"] = ModelTensor("extra.a", (3,), BF16)
    plan = copy_of(bind(Architecture.of(config), tensors, allow_unknown=True))
    names = [unit.output.name for unit in plan.units]
    assert names[:2] == [EMBED, "model.layers.0.input_layernorm.weight"]
    assert names[-3:] == [HEAD, "extra.a", "extra.a"] and len(names) == len(shapes) + 2
    assert all(not unit.ops for unit in plan.units)


def test_ignored_buffers_are_dropped_by_name() -> None:
    config, buffer = tiny_config("llama"), "model.rotary_emb.inv_freq"
    tensors = {n: ModelTensor(n, s, BF16) for n, s in (tiny_shapes(config) | {buffer: (8,)}).items()}
    plan = copy_of(bind(Architecture.of(config), tensors))
    assert plan.dropped == (buffer,) and buffer not in plan.outputs


def test_fusing_stacks_rows_in_place_and_reads_all_of_them_once() -> None:
    binding = bound(family="qwen2")
    plan = copy_of(binding)
    fused = fused_plan(plan, binding.architecture, ALL_FUSIONS)
    names = [unit.output.name for unit in fused.units]
    assert names[2:5] == [QKV, QKV.replace("weight", "bias"), "model.layers.0.self_attn.o_proj.weight"]
    assert rows_read(fused) == rows_read(plan)
    assert fused.outputs[QKV].shape == (512, 256)
    assert len(fused.units) == len(plan.units) - 2 * (2 + 2 + 1)


@pytest.mark.parametrize("encoding", [BF16, INT4])
@pytest.mark.parametrize("fusions", [ALL_FUSIONS, ALL_FUSIONS[:1], ALL_FUSIONS[1:]])
def test_unfusing_what_was_fused_gives_the_same_outputs(encoding: Encoding, fusions: tuple[str, ...]) -> None:
    binding = bound(encoding, family="qwen2", num_key_value_heads=1, head_dim=6, intermediate_size=50)
    plan = copy_of(binding)
    fused = fused_plan(plan, binding.architecture, fusions)
    assert set(fused.outputs) != set(plan.outputs)
    cut = unfused(copy_of(rebound(binding, fused)), binding.architecture)
    assert cut.outputs == plan.outputs
    assert set(rows_read(cut).values()) == {1}


def test_a_cut_reads_the_rows_behind_the_parts_before_it() -> None:
    binding = bound(family="qwen2", num_key_value_heads=1, head_dim=6)
    fused = rebound(binding, fused_plan(copy_of(binding), binding.architecture, ALL_FUSIONS))
    cut = unfused(copy_of(fused), binding.architecture)
    slices = {unit.output.name: unit.inputs for unit in cut.units}
    for part, first, stop in (("q", 0, 24), ("k", 24, 30), ("v", 30, 36)):
        assert slices[Q.replace("q_proj", f"{part}_proj")] == (RowSlice(fused.tensors[QKV], first, stop),)


def test_fusing_and_unfusing_touch_nothing_else() -> None:
    binding = bound()
    plan = copy_of(binding)
    fused = fused_plan(plan, binding.architecture, ALL_FUSIONS)
    assert fused_plan(fused, binding.architecture, ALL_FUSIONS) == fused
    assert unfused(plan, binding.architecture) == plan
    assert fused_plan(plan, binding.architecture, ()) == plan


def test_parts_of_different_forms_are_not_fused() -> None:
    binding = bound()
    tensors = binding.tensors | {Q: replace(binding.tensors[Q], encoding=INT4)}
    plan = copy_of(bind(binding.architecture, tensors))
    with pytest.raises(
        BadRecipe, match=r"qkv_proj\.weight: its parts have different forms \(.*q_proj.*int4-asym-g32"
    ):
        fused_plan(plan, binding.architecture, ALL_FUSIONS)


def test_quantizing_before_or_after_fusing_is_the_same_plan() -> None:
    state = start(bound(), INT4_RECIPE.with_(fuse=("qkv", "gate_up")))
    first, second = quantize(fuse(state)).plan, quantize(state)
    assert fused_plan(second.plan, state.architecture, ALL_FUSIONS) == first


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32, DType.F64])
def test_scales_take_the_weights_own_dtype_unless_the_layout_wants_another(dtype: DType) -> None:
    narrow = DType.F32 if dtype is DType.F64 else dtype
    made = passed("quantize", Unquantized(dtype))
    assert made.outputs[Q].encoding == AffineInt(4, 32, True, narrow)
    gptq = passed("quantize", Unquantized(dtype), target=Target("gptq"))
    assert gptq.outputs[Q].encoding == AffineInt(4, 32, True, DType.F16)


def test_untying_reads_the_embedding_twice_and_tying_leaves_the_head_behind() -> None:
    tied = tie_head(start(bound(tied=False), Recipe(tie=True))).plan
    assert tied.dropped == (HEAD,) and HEAD not in tied.outputs
    untied = tie_head(start(bound(), Recipe(tie=False))).plan
    assert untied.outputs[HEAD] == replace(untied.outputs[EMBED], name=HEAD)


def test_casting_and_dequantizing_change_only_what_they_can() -> None:
    plain = passed("dequantize", INT4, dtype=None).plan
    assert {t.encoding for t in plain.outputs.values()} == {BF16}
    assert {op for u in plain.units for op in u.ops} == {Dequantize(DType.BF16)}
    wide = passed("dequantize", INT4).plan
    assert wide.outputs[Q].encoding == Unquantized(DType.F32) and wide.outputs[EMBED].encoding == BF16
    cast = passed("cast", INT4).plan
    assert cast.outputs[Q].encoding == INT4 and cast.outputs[EMBED].encoding == Unquantized(DType.F16)
    assert passed("cast", INT4, dtype=DType.BF16).plan == copy_of(bound(INT4, family="qwen2"))


def test_finite_numbers_are_checked_once_per_tensor() -> None:
    recipe = Recipe(rules=(Rule("re:layers.0.self_attn.o_proj.weight", Scheme(4)),))
    checked = check_finite(quantize(start(bound(), recipe))).plan
    for unit in checked.units:
        looks = [op for op in unit.ops if isinstance(op, CheckFinite | Quantize)]
        assert len(looks) == 1
    assert sum(unit.ops == (CheckFinite(),) for unit in checked.units) == len(checked.units) - 1


def test_parameters_are_conserved_by_every_rearrangement() -> None:
    total = sum(prod(shape) for shape in tiny_shapes(tiny_config("qwen2")).values())
    for name in ("fuse", "quantize", "dequantize", "cast", "check_finite"):
        assert sum(t.count for t in passed(name).outputs.values()) == total


def test_every_step_of_the_table_says_what_it_makes_of_encodings_and_of_rows() -> None:
    from qconvert.ops.transcode import STEPS
    from qconvert.ops.transcode_rows import ROWS

    assert list(STEPS) == list(ROWS)
