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
from qconvert.ops.rows import CheckFinite, Dequantize, Quantize
from qconvert.plan import plan as passes
from qconvert.plan.plan import Pass, Plan, RowSlice, copy_of, run_passes
from tests.models import EMBED, HEAD, tiny_config, tiny_shapes

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


ARCHITECTURE = Architecture.of(tiny_config("qwen2"))
LINEARS = [n for n, p in ARCHITECTURE.parameters.items() if p.kind == "linear" and n != HEAD]
PASSES: dict[str, Pass] = {
    "drop": passes.drop(EMBED),
    "untie": passes.untie(EMBED, HEAD),
    "fuse": passes.fuse(ARCHITECTURE, ALL_FUSIONS),
    "unfuse": passes.unfuse(ARCHITECTURE),
    "quantize": passes.quantize(dict.fromkeys(LINEARS, Scheme(4, 32)), search=True),
    "dequantize": passes.dequantize(DType.F32),
    "cast": passes.cast(DType.F16),
    "check_finite": passes.check_finite,
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_leaves_its_plan_alone_and_repeats_itself(name: str) -> None:
    plan, same = copy_of(bound(family="qwen2")), copy_of(bound(family="qwen2"))
    first = PASSES[name](plan)
    assert plan == same
    assert PASSES[name](plan) == first


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
    fused = passes.fuse(binding.architecture, ALL_FUSIONS)(plan)
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
    fused = passes.fuse(binding.architecture, fusions)(plan)
    assert set(fused.outputs) != set(plan.outputs)
    cut = passes.unfuse(binding.architecture)(copy_of(rebound(binding, fused)))
    assert cut.outputs == plan.outputs
    assert set(rows_read(cut).values()) == {1}


def test_a_cut_reads_the_rows_behind_the_parts_before_it() -> None:
    binding = bound(family="qwen2", num_key_value_heads=1, head_dim=6)
    fused = rebound(binding, passes.fuse(binding.architecture, ALL_FUSIONS)(copy_of(binding)))
    cut = passes.unfuse(binding.architecture)(copy_of(fused))
    slices = {unit.output.name: unit.inputs for unit in cut.units}
    for part, start, stop in (("q", 0, 24), ("k", 24, 30), ("v", 30, 36)):
        assert slices[Q.replace("q_proj", f"{part}_proj")] == (RowSlice(fused.tensors[QKV], start, stop),)


def test_fusing_and_unfusing_touch_nothing_else() -> None:
    binding = bound()
    plan = copy_of(binding)
    fused = passes.fuse(binding.architecture, ALL_FUSIONS)(plan)
    assert passes.fuse(binding.architecture, ALL_FUSIONS)(fused) == fused
    assert passes.unfuse(binding.architecture)(plan) == plan
    assert passes.fuse(binding.architecture, ())(plan) == plan


def test_parts_of_different_forms_are_not_fused() -> None:
    binding = bound()
    tensors = binding.tensors | {Q: replace(binding.tensors[Q], encoding=INT4)}
    plan = copy_of(bind(binding.architecture, tensors))
    with pytest.raises(
        BadRecipe, match=r"qkv_proj\.weight: its parts have different forms \(.*q_proj.*int4-asym-g32"
    ):
        passes.fuse(binding.architecture, ALL_FUSIONS)(plan)


def test_quantizing_before_or_after_fusing_is_the_same_plan() -> None:
    binding = bound()
    fuse = passes.fuse(binding.architecture, ALL_FUSIONS)
    schemes = dict.fromkeys(
        [n for n in binding.tensors if "_proj" in n] + list(binding.architecture.fused), Scheme(4)
    )
    quantize = passes.quantize(schemes, search=False)
    plan = copy_of(binding)
    assert run_passes(plan, [fuse, quantize]) == run_passes(plan, [quantize, fuse])


def test_scales_take_the_weights_own_dtype_unless_one_is_given() -> None:
    def form_of(stored: DType, **how: Any) -> Encoding:
        unit = passes.Unit((), (), ModelTensor("w", (4, 32), Unquantized(stored)))
        made = passes.quantize({"w": Scheme(4, 32)}, search=True, **how)(Plan((unit,)))
        return made.outputs["w"].encoding

    for dtype in (DType.BF16, DType.F16, DType.F32):
        assert form_of(dtype) == AffineInt(4, 32, True, dtype)
    assert form_of(DType.F64) == AffineInt(4, 32, True, DType.F32)
    assert form_of(DType.F32, scale_dtype=DType.F16) == AffineInt(4, 32, True, DType.F16)


def test_untying_reads_the_embedding_twice_and_dropping_leaves_the_head_behind() -> None:
    binding = bound(tied=False)
    plan = copy_of(binding)
    tied = passes.drop(HEAD)(plan)
    assert tied.dropped == (HEAD,) and HEAD not in tied.outputs
    untied = passes.untie(EMBED, HEAD)(tied)
    assert untied.outputs[HEAD] == replace(untied.outputs[EMBED], name=HEAD)
    assert set(untied.outputs) == set(plan.outputs)


def test_casting_and_dequantizing_change_only_what_they_can() -> None:
    plan = copy_of(bound(INT4))
    plain = passes.dequantize(None)(plan)
    assert {t.encoding for t in plain.outputs.values()} == {BF16}
    assert {op for u in plain.units for op in u.ops} == {Dequantize(DType.BF16)}
    wide = passes.dequantize(DType.F32)(plan)
    assert wide.outputs[Q].encoding == Unquantized(DType.F32) and wide.outputs[EMBED].encoding == BF16
    cast = passes.cast(DType.F16)(plan)
    assert cast.outputs[Q].encoding == INT4 and cast.outputs[EMBED].encoding == Unquantized(DType.F16)
    assert passes.cast(DType.BF16)(plan) == plan


def test_finite_numbers_are_checked_once_per_tensor() -> None:
    plan = copy_of(bound())
    checked = passes.check_finite(passes.quantize({Q: Scheme(4)}, search=True)(plan))
    for unit in checked.units:
        looks = [op for op in unit.ops if isinstance(op, CheckFinite | Quantize)]
        assert len(looks) == 1
    assert sum(unit.ops == (CheckFinite(),) for unit in checked.units) == len(plan.units) - 1


def test_parameters_are_conserved_by_every_rearrangement() -> None:
    plan = copy_of(bound(family="qwen2"))
    total = sum(prod(shape) for shape in tiny_shapes(tiny_config("qwen2")).values())
    for name in ("fuse", "unfuse", "quantize", "dequantize", "cast", "check_finite"):
        assert sum(t.count for t in PASSES[name](plan).outputs.values()) == total
