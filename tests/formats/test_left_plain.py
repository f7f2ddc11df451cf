"""Lists of modules left plain: read once for all weights, with the meaning that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.formats.layouts.config_checks import left_plain


def weight(module: str) -> ModelTensor:
    return ModelTensor(f"{module}.weight", (8, 8), Unquantized(DType.BF16))


def names_it(name: str, module: str) -> bool:
    """The rule for one name and one module, as the source has it."""
    if "*" in name and fnmatchcase(module, name.replace("[", "[[]") + "*"):
        return True
    return module == name or module.startswith(f"{name}.") or f".{name}." in f".{module}."


@pytest.mark.parametrize(
    ("name", "module", "plain"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.gate", True),
        ("model.layers.1", "model.layers.11.mlp.gate", False),
        ("gate", "model.layers.3.mlp.gate", True),
        ("gate", "model.layers.3.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("layers.mlp", "model.layers.3.mlp.gate", False),
        ("model.layers.1.*", "model.layers.1.mlp.up", True),
        ("model.layers.1*", "model.layers.12.mlp.up", True),
        ("*.mlp.up", "model.layers.12.mlp.up_proj", True),  # a name with * is of all that begins so
        ("model.layers.?.mlp.u*p", "model.layers.1.mlp.up", True),
        ("model.layers.?.mlp.up", "model.layers.1.mlp.up", False),  # ? alone is a letter like another
        ("*.experts[0]", "model.experts[0].up", True),
        ("*.experts[0]", "model.experts0.up", False),
        ("*", "anything", True),
        ("", "anything", False),
    ],
)
def test_a_name_and_a_module(name: str, module: str, plain: bool) -> None:
    assert left_plain([name])(weight(module)) is plain
    assert left_plain(["other", None, 3, name, "another*"])(weight(module)) is plain


LETTERS = st.text("ab.*?[]!\n", max_size=7)


@given(st.lists(LETTERS, max_size=5), LETTERS)
def test_several_names_are_the_rule_for_each(names: list[str], module: str) -> None:
    tensor = weight(module)
    assert left_plain(names)(tensor) == any(names_it(name, module) for name in names if name)


@pytest.mark.parametrize("nothing", [None, "lm_head", {"lm_head": True}, 7, []])
def test_what_is_no_list_names_nothing(nothing: object) -> None:
    assert not left_plain(nothing)(weight("lm_head"))


def test_the_list_is_read_once_for_all_weights() -> None:
    class Counted(list[str]):
        readings = 0

        def __iter__(self) -> Iterator[str]:
            Counted.readings += 1
            return super().__iter__()

    named = left_plain(Counted(["lm_head", "model.layers.0.*", "*.gate"]))
    assert [named(weight(f"model.layers.{i}.mlp.up")) for i in range(3)] == [True, False, False]
    assert Counted.readings == 1


def test_the_list_of_a_published_model(assets: Path) -> None:
    config = assets / "metadata/configs/nvidia--Qwen3.5-397B-A17B-NVFP4_config.json"
    names = json.loads(config.read_text())["quantization_config"]["ignore"]
    assert len(names) > 100
    named, parts = left_plain(names), ("linear_attn.in_proj_qkv", "self_attn.q_proj", "mlp.experts.7.up_proj")
    modules = [f"model.language_model.layers.{i}.{part}" for i in range(60) for part in parts]
    found = [named(weight(module)) for module in modules]
    assert found == [any(names_it(name, module) for name in names) for module in modules]
    assert {True, False} == set(found)
