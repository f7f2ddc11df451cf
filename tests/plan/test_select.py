"""Selectors and rules: which weight gets which scheme, and every wish that no loader could honour."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qconvert.core.schemes import Scheme
from qconvert.errors import BadRecipe
from qconvert.models import Architecture
from qconvert.plan.recipe import Recipe, Rule, parse_rule
from qconvert.plan.selectors import decide
from tests.support.models import EMBED, HEAD, tiny_config

INT4, INT8 = Scheme(4, 32), Scheme(8, 32)
LINEARS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")


def decided(*rules: str, scheme: Scheme | None = INT4, **config: Any) -> dict[str, Scheme]:
    """The decisions for the tiny model (untied unless told), the name's ends left off."""
    smaller = config.pop("allow_smaller_group", False)
    architecture = Architecture.of(tiny_config(**({"tied": False} | config)))
    recipe = Recipe(scheme, tuple(parse_rule(rule) for rule in rules), allow_smaller_group=smaller)
    parameters = {n: p for n, p in architecture.parameters.items() if n != HEAD or not architecture.tied}
    chosen = decide(recipe, architecture, parameters, tied=architecture.tied)
    return {name.replace("model.layers.", "").replace("_proj.weight", ""): s for name, s in chosen.items()}


def all_linears(scheme: Scheme, layers: int = 2) -> dict[str, Scheme]:
    return {f"{layer}.{name}": scheme for layer in range(layers) for name in LINEARS}


def refusal(*rules: str, **config: Any) -> BadRecipe:
    with pytest.raises(BadRecipe) as caught:
        decided(*rules, **config)
    return caught.value


def test_the_scheme_is_for_the_linears_alone() -> None:
    assert decided() == all_linears(INT4)


def test_without_a_scheme_only_the_rules_count() -> None:
    assert decided("mlp.down=int8-g32", scheme=None) == {"0.mlp.down": INT8, "1.mlp.down": INT8}


def test_a_rule_overrides_its_role() -> None:
    wanted = all_linears(INT4) | {"0.mlp.down": INT8, "1.mlp.down": INT8}
    assert decided("mlp.down=int8-g32") == wanted


def test_a_layer_range_includes_both_ends() -> None:
    chosen = decided("layers.1-2.mlp.down=int8-g32", num_hidden_layers=4)
    assert [chosen[f"{layer}.mlp.down"] for layer in range(4)] == [INT4, INT8, INT8, INT4]
    chosen = decided("layers.3.mlp.down=int8-g32", num_hidden_layers=4)
    assert [chosen[f"{layer}.mlp.down"] for layer in range(4)] == [INT4, INT4, INT4, INT8]


def test_a_regular_expression_is_searched_in_the_name() -> None:
    assert decided(r"re:layers\.0\.mlp\.down=int8-g32") == all_linears(INT4) | {"0.mlp.down": INT8}


@pytest.mark.parametrize(
    "select", ["layers.1", "layer.1", "layers:1", "layers.1-1", "model.layers.1", "layers.1.attn"]
)
def test_whole_layers_are_selected_as_people_write_them(select: str) -> None:
    """Norms lie in the layers too: a scheme goes to what can have one."""
    inside = LINEARS[:4] if "attn" in select else LINEARS
    assert decided(f"{select}=int8-g32") == all_linears(INT4) | {f"1.{name}": INT8 for name in inside}
    kept = decided(f"{select}=keep")
    assert kept == {n: s for n, s in all_linears(INT4).items() if n not in {f"1.{name}" for name in inside}}


def test_several_layers_and_ranges_together() -> None:
    chosen = decided("layers.0,2-3.mlp=int8-g32", num_hidden_layers=5)
    wanted = {f"{layer}.{role}" for layer in (0, 2, 3) for role in LINEARS[4:]}
    assert {name for name, scheme in chosen.items() if scheme == INT8} == wanted


@pytest.mark.parametrize(
    ("select", "roles"),
    [
        ("attention", LINEARS[:4]),
        ("attn", LINEARS[:4]),
        ("self_attn", LINEARS[:4]),
        ("mlp", LINEARS[4:]),
        ("down_proj", LINEARS[6:]),
        ("*.down_proj", LINEARS[6:]),
        ("model.layers.*.mlp.down_proj.weight", LINEARS[6:]),
    ],
)
def test_groups_and_modules_select_in_every_layer(select: str, roles: tuple[str, ...]) -> None:
    wanted = all_linears(INT4) | {f"{layer}.{role}": INT8 for layer in range(2) for role in roles}
    assert decided(f"{select}=int8-g32") == wanted


@pytest.mark.parametrize("select", ["embedding", "model.embed_tokens", "embed_tokens.weight", "embed"])
def test_the_embedding_by_all_its_names(select: str) -> None:
    assert decided(f"{select}=int8-g32") == all_linears(INT4) | {EMBED: INT8}


@pytest.mark.parametrize("select", ["head", "lm_head", "lm_head.weight"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_by_all_its_names(select: str, tied: bool) -> None:
    assert decided(f"{select}=int8-g32", tied=tied) == all_linears(INT4) | {EMBED if tied else HEAD: INT8}


def test_a_layer_of_one_digit_is_not_the_ten_after_it() -> None:
    chosen = decided("model.layers.1.mlp.down_proj=int8-g32", num_hidden_layers=12)
    assert [name for name, scheme in chosen.items() if scheme == INT8] == ["1.mlp.down"]


def test_experts_and_routers_of_a_mixture(assets: Path) -> None:
    """A stack of the class means its experts; `gate` is the router, as the checkpoint has it."""
    path = assets / "metadata" / "configs" / "Qwen--Qwen3-30B-A3B_config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 2, "num_experts": 4}
    architecture = Architecture.of(config)

    def chosen(*rules: str) -> set[str]:
        recipe = Recipe(INT4, tuple(parse_rule(rule) for rule in rules))
        found = decide(recipe, architecture, architecture.parameters, tied=False)
        return {name for name, scheme in found.items() if scheme == INT8}

    experts = {name for name in architecture.parameters if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for select in ("experts", "mlp.experts", "mlp", "*.experts.*"):
        assert chosen(f"{select}=int8-g32") == experts
    first = {name for name in experts if ".layers.0." in name}
    assert chosen("layers.0.experts=int8-g32") == chosen("model.layers.0.mlp=int8-g32") == first
    assert len(chosen("layers.1.gate_up_proj=int8-g32")) == 2 * 4
    for select in ("router", "mlp.gate", "model.layers.0.mlp.gate"):
        assert not chosen(f"{select}=keep")
        with pytest.raises(BadRecipe, match="a router tensor is never quantized"):
            chosen(f"{select}=int8-g32")


def test_a_vision_tower_is_always_kept(assets: Path) -> None:
    path = assets / "metadata" / "configs" / "Qwen--Qwen3-VL-2B-Instruct_config.json"
    architecture = Architecture.of(json.loads(path.read_text()))
    plain = decide(Recipe(INT4), architecture, architecture.parameters, tied=False)
    kept = Recipe(INT4, (Rule("vision", None),))
    assert decide(kept, architecture, architecture.parameters, tied=False) == plain
    with pytest.raises(BadRecipe, match="copied as it is"):
        decide(Recipe(INT4, (Rule("vision", INT8),)), architecture, architecture.parameters, tied=False)


def test_the_last_rule_wins() -> None:
    wanted = all_linears(INT4) | {"1.mlp.down": INT8}
    assert decided("mlp.down=keep", "mlp.down=int4-g32", "layers.1.mlp.down=int8-g32") == wanted
    assert decided("layers.1.mlp.down=int8-g32", "mlp.down=int4-g32") == all_linears(INT4)


def test_keep_takes_a_weight_out() -> None:
    chosen = decided("attn.o=keep")
    assert chosen == {n: s for n, s in all_linears(INT4).items() if not n.endswith("attn.o")}
    assert decided("final_norm=keep") == all_linears(INT4)


def test_head_and_embedding_only_when_asked_and_each_alone() -> None:
    assert decided("lm_head=int8-g32") == all_linears(INT4) | {HEAD: INT8}
    assert decided("embed=int8-g32") == all_linears(INT4) | {EMBED: INT8}
    assert decided("embed=int8-g32", "lm_head=int4-g32") == all_linears(INT4) | {EMBED: INT8, HEAD: INT4}


def test_on_a_tied_model_embedding_and_head_are_one_role() -> None:
    wanted = all_linears(INT4) | {EMBED: INT8}
    for rules in (("embed=int8-g32",), ("lm_head=int8-g32",), ("embed=int8-g32", "lm_head=int8-g32")):
        assert decided(*rules, tied=True) == wanted
    assert decided("embed=int4-g32", "embed=int8-g32", "lm_head=int8-g32", tied=True) == wanted


@pytest.mark.parametrize(
    "rules", [("embed=int8-g32", "lm_head=int4-g32"), ("embed=keep", "lm_head=int8-g32")]
)
def test_on_a_tied_model_two_wishes_for_one_table_are_refused(rules: tuple[str, str]) -> None:
    error = refusal(*rules, tied=True)
    assert "one table" in error.fact and "--untie" in str(error.hint)


def test_a_fused_role_means_its_parts() -> None:
    chosen = decided("attn.qkv=int8-g32", "mlp.gate_up=keep")
    assert {n.split(".", 1)[1]: s for n, s in chosen.items()} == {
        **dict.fromkeys(("self_attn.q", "self_attn.k", "self_attn.v"), INT8),
        **dict.fromkeys(("self_attn.o", "mlp.down"), INT4),
    }


def test_a_part_means_the_fused_weight_where_that_is_stored() -> None:
    architecture = Architecture.of(tiny_config())
    fused = {name: entry.whole for name, entry in architecture.fused.items()}
    chosen = decide(Recipe(None, (Rule("attn.k", INT8),)), architecture, fused, tied=True)
    assert set(chosen) == {n for n in fused if "qkv" in n}


@pytest.mark.parametrize("rule", ["attn.k=int8-g32", "mlp.up=keep", r"re:layers\.1.*q_proj=int4-asym-g32"])
def test_a_rule_that_splits_a_fused_group_is_refused(rule: str) -> None:
    error = refusal(rule)
    assert "loaders fuse them" in error.fact
    fused = re.search(r"(layers\.\d\.\S+) selects them, (\S+) those of all layers", str(error.hint))
    assert fused and fused[1].endswith(fused[2]) and fused[2] in ("attn.qkv", "mlp.gate_up")
    assert decided(f"{fused[1]}=int8-g32") != decided(f"{fused[2]}=int8-g32") != all_linears(INT4)


def test_all_parts_of_a_group_may_change_together() -> None:
    chosen = decided("attn.q=int8-g32", "attn.k=int8-g32", "attn.v=int8-g32")
    assert chosen["0.self_attn.k"] == INT8 and chosen["0.mlp.up"] == INT4


@pytest.mark.parametrize(
    ("rule", "fact", "hint"),
    [
        ("mlp.dwon=int8", "selector 'mlp.dwon': matches no weight", "did you mean 'mlp.down'?"),
        ("layers.0.mlp.dwon=int8", "selector 'layers.0.mlp.dwon': ma", "did you mean 'layers.0.mlp.down'?"),
        ("self_atn=int8", "selector 'self_atn': matches no weight", "did you mean 'self_attn'?"),
        ("model.layers.0.mlp.down_porj=int8", "selector", "did you mean 'model.layers.0.mlp.down_proj'?"),
        ("experts=keep", "selector 'experts': this model has no experts", "a group (attention, mlp, "),
        ("vision=keep", "selector 'vision': this model has no vision", "give a role (embed, "),
        ("layers.0,2=int8", "selector 'layers.0,2': no such layers", "layers 0-1"),
        ("layers.0-1,1-0=int8", "selector 'layers.0-1,1-0': the layers run", "layers.0-1,0-1"),
        ("q_proj=int8", "model.layers.0.self_attn.q_proj.weight, ", "layers.0.attn.qkv selects them"),
        ("layers.2.mlp.down=int8", "selector 'layers.2.mlp.down': no such layers", "layers 0-1"),
        ("layers.1-0.mlp.down=int8", "selector 'layers.1-0.mlp.down': the layers run", "layers.0-1.mlp"),
        ("layers.0.embed=int8", "selector 'layers.0.embed': matches no weight", "nearest name is"),
        ("re:gate_porj=int8", "selector 're:gate_porj': matches no weight", "gate_proj.weight"),
        ("re:[=int8", "selector 're:[': not a regular expression", "re module"),
        ("re:layernorm=int8", "model.layers.0.input_layernorm.weight: a norm tensor", "narrow the selector"),
        ("=int8", "rule '=int8'", "--rule SELECTOR=SCHEME"),
    ],
)
def test_a_selector_that_means_nothing_is_an_error_with_the_nearest(rule: str, fact: str, hint: str) -> None:
    error = refusal(rule)
    assert error.fact.startswith(fact) and hint in str(error.hint)


@pytest.mark.parametrize("scheme", [Scheme(4, 128), Scheme(4, 64), Scheme(4, 512)])
def test_a_row_that_the_group_does_not_divide_names_the_sizes_that_do(scheme: Scheme) -> None:
    error = refusal(scheme=scheme, intermediate_size=96)
    name = "model.layers.0.mlp.down_proj.weight" if scheme.group_size != 512 else "model.layers.0."
    assert error.fact.startswith(name) and f"group size {scheme.group_size}" in error.fact
    assert "--allow-smaller-group" in str(error.hint) and "sizes that divide: " in str(error.hint)


def test_a_smaller_group_is_taken_when_allowed() -> None:
    chosen = decided(scheme=Scheme(4, 128), intermediate_size=96, allow_smaller_group=True)
    assert chosen["0.mlp.down"] == Scheme(4, 32) and chosen["0.mlp.up"] == Scheme(4, 128)


@pytest.mark.parametrize("allow", [True, False])
def test_a_row_that_nothing_divides_leaves_channel_or_keep(allow: bool) -> None:
    error = refusal(scheme=Scheme(4, 128), intermediate_size=100, allow_smaller_group=allow)
    assert "--group-size channel" in str(error.hint) and "--keep mlp.down" in str(error.hint)
    assert decided(scheme=Scheme(4, None), intermediate_size=100) == all_linears(Scheme(4, None))
