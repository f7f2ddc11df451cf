"""Recipes: flags and YAML give one value, and a misspelt wish is never ignored."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.schemes import Scheme
from qconvert.errors import BadRecipe
from qconvert.plan.recipe import FUSIONS, Recipe, Rule, load_recipe, parse_recipe, parse_rule
from tests.core.test_schemes import SCHEMES

RULES = st.builds(Rule, select=st.text(min_size=1, max_size=20), scheme=st.none() | SCHEMES)
RECIPES = st.builds(
    Recipe,
    scheme=st.none() | SCHEMES,
    rules=st.lists(RULES, max_size=4).map(tuple),
    fuse=st.lists(st.sampled_from(list(FUSIONS)), unique=True).map(tuple),
    tie=st.none() | st.booleans(),
    search=st.booleans(),
    allow_smaller_group=st.booleans(),
)
MANIFEST_SCHEMA = Path(__file__).parents[2] / "qconvert" / "manifest.schema.json"


@given(RECIPES)
def test_the_json_of_a_recipe_is_a_recipe(recipe: Recipe) -> None:
    assert parse_recipe(json.loads(json.dumps(recipe.to_json())), "x") == recipe


@given(RECIPES)
def test_the_json_of_a_recipe_fits_the_manifest_schema(recipe: Recipe) -> None:
    schema = json.loads(MANIFEST_SCHEMA.read_text())["properties"]["recipe"]
    jsonschema.validate(recipe.to_json(), schema)


def test_a_recipe_file(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "scheme: int4\n"
        "rules:\n  - {select: mlp.down, scheme: int8-g64}\n  - {select: 're:o_proj', scheme: keep}\n"
        "keep: [layers.0-1.attn.o]\n"
        "fuse: [qkv, gate_up]\n"
        "tie: false\n"
        "layout: compressed-tensors\n"
    )
    assert load_recipe(file) == Recipe(
        scheme=Scheme(4),
        rules=(Rule("mlp.down", Scheme(8, 64)), Rule("re:o_proj", None), Rule("layers.0-1.attn.o", None)),
        fuse=("qkv", "gate_up"),
        tie=False,
    )


def test_empty_lists_may_be_written_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("scheme: int8-channel\nrules:\nkeep:\nfuse:\ntie:\n")
    assert load_recipe(tmp_path / "r.yaml") == Recipe(scheme=Scheme(8, None))


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        ({"schema": "int4"}, "x: unknown key 'schema'"),
        ({"rules": [{"selct": "a", "scheme": "int4"}]}, "x: rules[0]: unknown key 'selct'"),
        ({"rules": [{"select": "a", "scheme": "int4"}, {"select": "a"}]}, "x: rules[1]: scheme is missing"),
        ({"rules": {"select": "a"}}, "x: rules is not a list"),
        ({"rules": ["mlp.down=int4"]}, "x: rules[0]: not a mapping"),
        ({"rules": 0}, "x: rules is not a list"),
        ({"keep": "mlp.down"}, "x: keep is not a list"),
        ({"keep": [3]}, "x: keep: 3 is not text"),
        ({"scheme": 4}, "x: scheme: 4 is not text"),
        ({"scheme": "int99"}, "scheme 'int99': not a scheme"),
        ({"fuse": ["qvk"]}, "x: fuse: 'qvk' is not known"),
        ({"fuse": [["qkv"]]}, "x: fuse: ['qkv'] is not known"),
        ({"tie": "yes"}, "x: tie is 'yes'"),
        ({"search": 1}, "x: search is 1"),
        ({"layout": "exl3"}, "x: layout: 'exl3' is not known"),
        ([], "x: not a mapping"),
        (None, "x: not a mapping"),
        ("int4", "x: not a mapping"),
        ({3: 4}, "x: unknown key 3"),
    ],
)
def test_what_is_not_a_recipe_is_refused_by_key(data: object, fact: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_recipe(data, "x")
    assert caught.value.fact.startswith(fact) and caught.value.hint


def test_an_unknown_key_is_guessed() -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_recipe({"rule": []}, "x")
    assert caught.value.hint == "did you mean 'rules'?"


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\t- x", "[" * 2000, "!!python/object:os.system {}"])
def test_what_is_not_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(BadRecipe, match=r"r\.yaml: "):
        load_recipe(file)


def test_an_unreadable_recipe_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"scheme: \xff")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(BadRecipe, match="cannot be read"):
            load_recipe(path)


def test_a_recipe_of_endless_aliases_stays_a_short_message(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join([f"scheme: &s {{{', '.join(lines)}}}"]))
    with pytest.raises(BadRecipe) as caught:
        load_recipe(file)
    assert len(caught.value.fact) < 1000


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("mlp.down=int8", Rule("mlp.down", Scheme(8))),
        ("re:a=b=keep", Rule("re:a=b", None)),
        ("layers.0-3.attn.o=int4-asym-g32", Rule("layers.0-3.attn.o", Scheme(4, 32, symmetric=False))),
    ],
)
def test_rules_from_the_command_line(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["mlp.down", "=int8", ""])
def test_a_rule_without_its_halves_shows_an_example(text: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_rule(text)
    assert "--rule mlp.down=int8" in str(caught.value.hint)
