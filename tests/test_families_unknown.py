"""A model that is not in the catalogue: shown, guessed at with consent, or declared in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import BadRecipe
from qconvert.models.guessed import guessed_family
from qconvert.plan.recipe import Recipe, parse_recipe
from tests.commands import qconvert
from tests.models import byte_tokenizer, tiny_arrays, tiny_config, write_file

RENAMES = {"self_attn.": "attention.", "model.embed_tokens": "model.tokens", "mlp.": "ff."}
RECIPE = """
scheme: int4-g64
architecture:
  like: llama
  rename: {self_attn.: attention., model.embed_tokens: model.tokens, mlp.: ff.}
  keys: {hidden_size: width}
  slots:
    - {role: attn.gain, module: "model.layers.{layer}.attention.gain", shape: [head_dim, 3], kind: other}
"""


def strange_model(folder: Path) -> Path:
    """A Llama under other names, with one config key of its own and one tensor more in each layer."""
    config = tiny_config("llama", tied=False)
    arrays = tiny_arrays(config)
    for ours, theirs in RENAMES.items():
        arrays = {name.replace(ours, theirs, 1): array for name, array in arrays.items()}
    for layer in range(2):
        arrays[f"model.layers.{layer}.attention.gain.weight"] = np.ones((64, 3), np.float32)
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeForCausalLM"],
        "width": config.pop("hidden_size"),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_file(folder / "model.safetensors", arrays)
    return folder


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    return strange_model(tmp_path / "strange")


def test_inspect_shows_it_and_says_what_is_guessed(strange: Path) -> None:
    result = qconvert("inspect", strange, "--json")
    found = result.json
    count = sum(t.count for t in open_checkpoint(strange).tensors.values())
    assert result.code == 0 and found["parameters"] == count
    assert any("not in the catalogue" in warning for warning in found["warnings"])
    assert {"model.layers.attention.q_proj", "model.tokens"} <= {row["role"] for row in found["rows"]}


def test_quantize_refuses_it_and_says_how_to_declare_it(strange: Path) -> None:
    result = qconvert("quantize", strange, "--bits", 4)
    assert result.code == 1
    assert "model_type 'strange' is not known here" in result.err
    assert "architecture: {like: llama" in result.err and "--allow-unknown" in result.err


def test_the_guess_quantizes_the_linears_of_the_layers_alone(strange: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = qconvert(
        "quantize",
        strange,
        "--bits",
        4,
        "--group-size",
        64,
        "--allow-unknown",
        "-o",
        out,
        "--keep",
        "re:gain",
    )
    assert result.code == 0, result.err
    assert "taken for linears" in result.err
    packed = {n for n, t in open_checkpoint(out).tensors.items() if not isinstance(t.encoding, Unquantized)}
    assert len(packed) == 2 * 7
    assert all(".attention." in name or ".ff." in name for name in packed)


def test_a_declared_model_is_quantized_like_its_relative(strange: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(RECIPE)
    result = qconvert("quantize", strange, "--recipe", recipe, "-o", out)
    assert result.code == 0, result.err
    packed = {n for n, t in open_checkpoint(out).tensors.items() if not isinstance(t.encoding, Unquantized)}
    assert len(packed) == 2 * 7
    assert json.loads((out / "qconvert.json").read_text())["recipe"]["architecture"]["like"] == "llama"


def test_a_declaration_fuses_under_the_names_it_gives(strange: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(RECIPE + "fuse: [qkv]\n")
    result = qconvert("quantize", strange, "--recipe", recipe, "-o", out)
    assert result.code == 0, result.err
    assert "model.layers.1.attention.qkv_proj.weight" in open_checkpoint(out).tensors


def test_a_declaration_survives_the_manifest() -> None:
    import yaml

    recipe = parse_recipe(yaml.safe_load(RECIPE), "x")
    assert recipe.architecture is not None
    assert parse_recipe(json.loads(json.dumps(recipe.to_json())), "x") == recipe
    assert Recipe().to_json().keys() == recipe.to_json().keys() - {"architecture"}


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ({"like": "lama"}, "'llama'"),
        ({"rename": {}}, "like:"),
        ({"like": "llama", "renames": {}}, "'rename'"),
        ({"like": "llama", "without": ["mlp.nrom"]}, "'mlp.norm'"),
        ({"like": "llama", "slots": [{"role": "x", "module": "x"}]}, "shape"),
        ({"like": "llama", "slots": [{"role": "x", "module": "{x}.y", "shape": ["hidden"]}]}, "{layer}"),
        ({"like": "llama", "slots": [{"role": "x", "module": "y", "shape": ["hiden"]}]}, "'hidden'"),
        (
            {"like": "llama", "slots": [{"role": "x", "module": "y", "shape": ["hidden"], "kind": "big"}]},
            "linear",
        ),
    ],
)
def test_a_misspelt_declaration_names_the_nearest_word(section: object, hint: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        declared = parse_recipe({"architecture": section}, "r.yaml").architecture
        assert declared is not None
        declared.architecture(tiny_config("llama"))
    assert "architecture" in caught.value.fact and hint in str(caught.value.hint)


def test_what_is_taken_for_a_linear() -> None:
    shapes = {
        "h.0.attn.wq.weight": True,
        "h.0.mlp.gate_proj.weight": True,
        "h.0.mlp.experts.3.up.weight": True,
        "h.0.mlp.gate.weight": False,
        "h.0.ln1.weight": False,
        "h.0.router.weight": False,
        "h.0.attn.bias": False,
        "h.0.q_norm.weight": False,
        "h.0.rel_pos_embed.weight": False,
        "lm_head.weight": False,
        "tokens.weight": False,
    }
    tensors = {
        name: ModelTensor(f"x.{name}", (8, 8), Unquantized(DType.BF16)) for name in (f"x.{n}" for n in shapes)
    }
    family = guessed_family({"model_type": "strange"}, tensors)
    linear = {slot.module.format(layer=0) for slot in family.slots if slot.kind == "linear"}
    assert linear == {f"x.{name}".removesuffix(".weight") for name, taken in shapes.items() if taken}


def test_names_that_look_like_layers_do_not_make_the_guess_slow() -> None:
    import time

    tensors = {
        f"x.4000.t{i}.weight": ModelTensor(f"x.4000.t{i}.weight", (2, 2), Unquantized(DType.F32))
        for i in range(5000)
    }
    started = time.perf_counter()
    assert len(guessed_family({"model_type": "strange"}, tensors).slots) == 5000
    assert time.perf_counter() - started < 2
