"""Activation orders undone in memory: the same function in another order, and reasons where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, ModelTensor, Unquantized
from qconvert.core.values import AffineIntRows, Value
from qconvert.errors import BadRecipe
from qconvert.models import Architecture, Binding, bind
from qconvert.plan.facts import SourceFacts
from qconvert.plan.passes.activation_order import (
    Refused,
    by_reason,
    complain,
    orders_of,
    reordered,
    undo,
    undo_activation_order,
)
from qconvert.plan.passes.tensor_parallel_padding import pad_to_ranks, zeros_added
from qconvert.plan.passes.transcode import Target
from qconvert.plan.plan import copy_of
from qconvert.plan.recipe import Recipe
from qconvert.plan.state import Compiled
from tests.support.compiling import start
from tests.support.computing import numbers_of, random_values
from tests.support.models import tiny_config, tiny_shapes

ORDERED = AffineInt(4, 32, False, DType.F16, act_order=True)
GRID = replace(ORDERED, act_order=False)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 64, 64, 96
LAYER = "model.layers.0."
Q, V, OUT = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


def bound(*ordered: str, family: str = "qwen3", **config: Any) -> Binding:
    """A tiny model of 4-bit linears, these in activation order."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": HEAD_DIM, "vocab_size": 40}
    made = tiny_config(family, **{**sizes, "num_hidden_layers": 1, **config})
    plain = Unquantized(DType.F16)
    tensors = {
        n: ModelTensor(n, s, ORDERED if n in ordered else GRID if n.endswith("_proj.weight") else plain)
        for n, s in tiny_shapes(made).items()
    }
    return bind(Architecture.of(made), tensors)


def values_of(binding: Binding, **orders: np.ndarray) -> dict[str, Value]:
    """Random values, columns of `o` and `down` in these groups."""
    values = random_values(binding)
    for part, groups in orders.items():
        name = {"o": OUT, "down": DOWN, "q": Q}[part]
        value = values[name]
        assert isinstance(value, AffineIntRows)
        values[name] = replace(value, groups_I=groups.astype(np.int32))
    return values


def groups_in(values: dict[str, Value]) -> dict[str, tuple[int, ...]]:
    found = ((n, v.groups_I) for n, v in values.items() if isinstance(v, AffineIntRows))
    return {name: tuple(groups.tolist()) for name, groups in found if groups is not None}


def within_heads(random: np.random.Generator, shared: int = HEADS // KV_HEADS) -> np.ndarray:
    """Groups shuffled within every head, alike for the heads of queries that share one of values."""
    per = HEAD_DIM // 32
    orders = [random.permutation(np.arange(HEAD_DIM) // 32) for _ in range(HEADS // shared)]
    return np.concatenate([orders[head // shared] + head * per for head in range(HEADS)])


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_inner_features_of_an_mlp_are_the_same_in_another_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    binding = bound(DOWN)
    values = values_of(binding, down=random.permutation(np.arange(INNER) // 32))
    plan, refused, folded = undo(copy_of(binding), binding.architecture, groups_in(values))
    assert (refused, folded) == ([], 1)
    before, after = numbers_of(copy_of(binding), values), numbers_of(plan, values)
    assert plan.outputs[DOWN].encoding == GRID
    x = random.standard_normal((HIDDEN, 3))
    results = [n[DOWN].astype(np.float64) @ ((n[GATE] @ x) * np.tanh(n[UP] @ x)) for n in (before, after)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9, atol=1e-9)
    for name in before.keys() - {DOWN, GATE, UP}:
        np.testing.assert_array_equal(after[name], before[name])


def attention(numbers: dict[str, np.ndarray], x: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """The output of attention where head h mixes tokens as `mix[h]` does, whatever q and k are."""
    values = (numbers[V].astype(np.float64) @ x).reshape(KV_HEADS, HEAD_DIM, -1)
    heads = [values[head * KV_HEADS // HEADS] @ mix[head] for head in range(HEADS)]
    return np.asarray(numbers[OUT].astype(np.float64) @ np.concatenate(heads))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_heads_of_values_are_the_same_in_another_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    binding = bound(OUT)
    values = values_of(binding, o=within_heads(random))
    plan, refused, folded = undo(copy_of(binding), binding.architecture, groups_in(values))
    assert (refused, folded) == ([], 1)
    before, after = numbers_of(copy_of(binding), values), numbers_of(plan, values)
    x, mix = random.standard_normal((HIDDEN, 5)), random.standard_normal((HEADS, 5, 5))
    np.testing.assert_allclose(attention(after, x, mix), attention(before, x, mix), rtol=1e-9, atol=1e-8)
    units = {unit.output.name: unit for unit in plan.units}
    assert (reordered(units[OUT]), reordered(units[V]), reordered(units[Q])) == ("columns", "rows", "")
    rows, columns = orders_of(units[OUT])
    assert rows == () and sorted(columns) == list(range(HEADS * HEAD_DIM))


def test_a_bias_goes_where_its_row_goes() -> None:
    random = np.random.default_rng(3)
    binding = bound(OUT, family="qwen2")
    values = values_of(binding, o=within_heads(random))
    plan, _, _ = undo(copy_of(binding), binding.architecture, groups_in(values))
    after, bias = numbers_of(plan, values), V.replace("weight", "bias")
    order = orders_of(next(unit for unit in plan.units if unit.output.name == bias))[0]
    assert order and order == orders_of(next(unit for unit in plan.units if unit.output.name == V))[0]
    np.testing.assert_array_equal(after[bias], numbers_of(copy_of(binding), values)[bias][list(order)])


def why(binding: Binding, values: dict[str, Value]) -> str:
    plan, refused, folded = undo(copy_of(binding), binding.architecture, groups_in(values))
    assert folded == 0 and plan == copy_of(binding)
    return refused[0].why


def test_orders_that_nothing_takes_over_are_left_with_their_reason() -> None:
    random = np.random.default_rng(0)
    across = random.permutation(np.arange(HEADS * HEAD_DIM) // 32)
    assert "from one of 4 heads to another" in why(bound(OUT), values_of(bound(OUT), o=across))
    own = within_heads(random, shared=1)
    assert "share a head of values" in why(bound(OUT), values_of(bound(OUT), o=own))
    hidden = values_of(bound(Q), q=random.permutation(np.arange(HIDDEN) // 32))
    assert "the hidden state" in why(bound(Q), hidden)
    uneven = np.zeros(INNER, int)
    assert "unequal sizes" in why(bound(DOWN), values_of(bound(DOWN), down=uneven))


def asked(binding: Binding, values: dict[str, Value], layout: str, **how: Any) -> Compiled:
    state = start(binding, target=Target(layout, undo_act_order=True, **how))
    return replace(state, facts=SourceFacts(column_groups=groups_in(values)))


def test_what_cannot_be_undone_is_kept_refused_or_quantized_again() -> None:
    """GPTQ can hold it, AWQ cannot, and AWQ may be told to quantize it again."""
    random = np.random.default_rng(1)
    binding = bound(DOWN, Q)
    orders = {n: random.permutation(np.arange(w) // 32) for n, w in (("down", INNER), ("q", HIDDEN))}
    values = values_of(binding, **orders)
    kept = undo_activation_order(asked(binding, values, "gptq"))
    assert kept.warnings[0].startswith("1 of 2 weights keep their g_idx:") and Q in kept.warnings[0]
    assert kept.outputs[DOWN].encoding == GRID and kept.outputs[Q].encoding == ORDERED
    with pytest.raises(BadRecipe, match=r"1 of 2 weights in activation order can be folded") as caught:
        undo_activation_order(asked(binding, values, "awq"))
    assert "--allow-requantize" in caught.value.hint and caught.value.fact.startswith(f"{Q}: its columns")
    allowed = undo_activation_order(asked(binding, values, "awq", allow_requantize=True))
    assert not allowed.warnings and allowed.outputs[Q].encoding == ORDERED
    with pytest.raises(BadRecipe, match="no columns in activation order"):
        undo_activation_order(asked(bound(), values_of(bound()), "awq"))


def test_layers_of_one_reason_share_a_line() -> None:
    names = [f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1, 2, 5, 7, 8)]
    refused = [Refused(name, "it is so") for name in names]
    refused += [Refused("lm_head.weight", "it is so"), Refused("model.layers.3.x.weight", "of another")]
    lines = by_reason(refused).splitlines()
    assert lines == [
        "  it is so:",
        "    model.layers.{0-2,5,7-8}.mlp.down_proj.weight",
        "    lm_head.weight",
        "  of another:",
        "    model.layers.3.x.weight",
    ]
    told = complain(refused, 4, "awq")
    assert told.fact.startswith(
        f"{names[0]}: its columns are in activation order (g_idx), and it is so; 4 of 12"
    )


def test_padding_after_an_order_appends_zeros_and_moves_nothing() -> None:
    random = np.random.default_rng(2)
    binding = bound(DOWN)
    values = values_of(binding, down=random.permutation(np.arange(INNER) // 32))
    state = asked(binding, values, "awq")
    request = replace(state.request, recipe=Recipe(pad_to_tp=4))
    ordered = undo_activation_order(replace(state, request=request))
    padded = pad_to_ranks(ordered)
    before, after = numbers_of(ordered.plan, values), numbers_of(padded.plan, values)
    inner = after[DOWN].shape[1]
    assert inner == 128
    np.testing.assert_array_equal(after[DOWN][:, :INNER], before[DOWN])
    np.testing.assert_array_equal(after[UP][:INNER], before[UP])
    assert not after[DOWN][:, INNER:].any() and not after[UP][INNER:].any() and not after[GATE][INNER:].any()
    added = {u.output.name: zeros_added(u) for u in padded.plan.units if any(zeros_added(u))}
    assert added == {GATE: (inner - INNER, 0), UP: (inner - INNER, 0), DOWN: (0, inner - INNER)}
