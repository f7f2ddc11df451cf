"""The mix of encodings for a target: exact, grouped as loaders want it, in words that a recipe reads."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from qconvert.errors import BadRecipe
from qconvert.models import Architecture
from qconvert.plan.budget import (
    Group,
    Option,
    alike,
    fewest_bytes,
    parse_target_kl,
    parse_target_size,
    selectors,
    smallest_cost,
    uniform,
)
from qconvert.plan.knapsack import Item, lower_hull, solve
from tests.support.family_models import ROWS, SMALL, small


def random_groups(seed: int, groups: int, options: int, *, concave: bool = False) -> list[list[Item]]:
    """Options of rising weight and falling cost, as encodings are, or of any."""
    draw = random.Random(seed)
    found = []
    for _ in range(groups):
        scale, importance = draw.choice([1, 4, 9, 64]), draw.lognormvariate(0, 2)
        weights = sorted(draw.randint(1, 40) * scale for _ in range(options))
        costs = [importance * draw.random() for _ in range(options)]
        found.append(list(zip(weights, sorted(costs, reverse=True) if concave else costs, strict=True)))
    return found


def best_of_all(groups: list[list[Item]], capacity: float) -> float | None:
    """The least cost among all choices, by trying them."""
    sums = (
        (sum(item[0] for item in taken), sum(item[1] for item in taken))
        for taken in itertools.product(*groups)
    )
    return min((cost for weight, cost in sums if weight <= capacity), default=None)


def totals(groups: list[list[Item]], taken: list[int]) -> tuple[float, float]:
    items = [options[i] for options, i in zip(groups, taken, strict=True)]
    return sum(item[0] for item in items), sum(item[1] for item in items)


@pytest.mark.parametrize("seed", range(60))
def test_the_solution_is_the_best_of_all(seed: int) -> None:
    groups = random_groups(seed, 1 + seed % 6, 2 + seed % 4, concave=seed % 2 == 0)
    lightest, heaviest = (sum(pick(o[0] for o in options) for options in groups) for pick in (min, max))
    for share in (-0.1, 0.0, 0.2, 0.5, 0.8, 1.0):
        capacity = lightest + share * (heaviest - lightest)
        taken, best = solve(groups, capacity), best_of_all(groups, capacity)
        if best is None:
            assert taken is None
            continue
        assert taken is not None
        weight, cost = totals(groups, taken)
        assert weight <= capacity and cost == pytest.approx(best, rel=1e-9)


def exact_by_bytes(groups: list[list[Item]], capacity: int) -> float:
    """The least cost by dynamic programming over every number of bytes."""
    costs = [0.0] * (capacity + 1)
    for options in groups:
        costs = [
            min((costs[room - int(w)] + c for w, c in options if w <= room), default=float("inf"))
            for room in range(capacity + 1)
        ]
    return costs[capacity]


def test_a_model_of_many_groups_is_solved_exactly_and_fast() -> None:
    groups = random_groups(1, 40, 4, concave=True)
    capacity = int(sum(sum(o[0] for o in options) / 4 for options in groups))
    taken = solve(groups, capacity)
    assert taken is not None
    assert totals(groups, taken)[1] == pytest.approx(exact_by_bytes(groups, capacity), rel=1e-9)
    large = random_groups(2, 600, 4, concave=True)
    started = time.process_time()
    taken = solve(large, sum(sum(o[0] for o in options) / 4 for options in large))
    assert taken is not None and time.process_time() - started < 20


def test_the_hull_leaves_out_what_two_others_beat() -> None:
    assert lower_hull([(3, 4.0), (1, 10.0), (2, 9.0), (5, 3.9), (2, 11.0)]) == [1, 0, 3]


def group(name: str, *options: tuple[str, int, float]) -> Group:
    return Group(name, (name,), tuple(Option(*option) for option in options))


GROUPS = [
    group("a", ("int3", 30, 0.50), ("int4", 40, 0.10), ("int8", 80, 0.0)),
    group("b", ("int3", 30, 0.05), ("int4", 40, 0.01), ("int8", 80, 0.0)),
]


def test_a_size_and_a_divergence_choose_the_same_mix() -> None:
    mix = smallest_cost(GROUPS, 70)
    assert mix.labels == {"a": "int4", "b": "int3"} and mix.nbytes == 70
    assert mix.cost == pytest.approx(0.15)
    assert fewest_bytes(GROUPS, 0.151).labels == mix.labels
    assert fewest_bytes(GROUPS, 0.0).labels == {"a": "int8", "b": "int8"}
    same = uniform(GROUPS, "int4")
    assert same is not None and same.nbytes == 80 and smallest_cost(GROUPS, 80).cost <= same.cost


def test_what_cannot_be_reached_is_told_with_the_least() -> None:
    with pytest.raises(BadRecipe, match="have 59 bytes, and take 60 at least"):
        smallest_cost(GROUPS, 59)
    rough = [group("a", ("int3", 30, 0.5))]
    with pytest.raises(BadRecipe, match=r"the best 0\.5"):
        fewest_bytes(rough, 0.1)


@pytest.mark.parametrize(
    ("text", "most_bytes"),
    [
        ("4.5bpw", 562_500),
        ("4.5 BPW", 562_500),
        ("3.2GB", 3_200_000_000),
        ("2GiB", 2 << 30),
        ("900MB", 9 * 10**8),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, most_bytes: int) -> None:
    assert parse_target_size(text).most_bytes(10**6) == most_bytes


@pytest.mark.parametrize(
    "text", ["", "4.5", "bpw", "0bpw", "64bpw", "-1GB", "0MB", "4.5 bits", "nan", "1e3bpw"]
)
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(BadRecipe, match="--target-size"):
        parse_target_size(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1%", "", "10"])
def test_what_is_no_divergence_is_told(text: str) -> None:
    with pytest.raises(BadRecipe, match="--target-kl"):
        parse_target_kl(text)
    assert parse_target_kl("0.01") == 0.01


def weights_of(architecture: Architecture) -> list[str]:
    kinds = ("linear", "embedding")
    return [p.name for p in architecture.stored.values() if p.kind in kinds and p.param == "weight"]


def test_what_loaders_stack_is_one_group() -> None:
    architecture = Architecture.of(small("llama", "LlamaForCausalLM"))
    layer = "model.layers.1."
    groups = [members for members in alike(weights_of(architecture), architecture) if layer in members[0]]
    assert sorted(sorted(name.removeprefix(layer) for name in members) for members in groups) == [
        ["mlp.down_proj.weight"],
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        ["self_attn.k_proj.weight", "self_attn.q_proj.weight", "self_attn.v_proj.weight"],
        ["self_attn.o_proj.weight"],
    ]


def test_experts_of_a_layer_are_two_groups() -> None:
    architecture = Architecture.of(ROWS["qwen3-moe"].config)
    experts = [p.name for p in architecture.parameters.values() if ".experts." in p.role]
    groups = alike(experts, architecture)
    assert sorted(map(len, groups)) == [4, 4, 8, 8]  # four experts in each of two layers
    assert all(len({name.split(".")[2] for name in members}) == 1 for members in groups)


def test_selectors_name_runs_of_layers() -> None:
    architecture = Architecture.of(small("llama", "LlamaForCausalLM", num_hidden_layers=4))
    down = "model.layers.{}.mlp.down_proj.weight"
    labels = {down.format(i): "int8" if i == 2 else "int4" for i in range(4)}
    labels |= {"lm_head.weight": "int8"}
    assert sorted(selectors(labels, architecture)) == [
        ("layers.0-1.mlp.down", "int4"),
        ("layers.2.mlp.down", "int8"),
        ("layers.3.mlp.down", "int4"),
        ("lm_head", "int8"),
    ]
    assert SMALL["num_hidden_layers"] == 2
